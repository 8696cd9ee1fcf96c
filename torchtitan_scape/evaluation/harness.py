"""Interface to the lm-evaluation-harness: known tasks, their data, and the scores of a model.

Requires the extra `eval`; importers check that it is installed.
"""

import difflib
import functools
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets.config
import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from huggingface_hub import constants
from lm_eval import evaluator_utils
from lm_eval.api.metrics import stderr_for_metric
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.patching import environment, replaced
from torchtitan_scape.evaluation import squad
from torchtitan_scape.huggingface.folder import load_model

TASKS = Path(__file__).with_name("tasks")
_RESAMPLES = 1000  # Bootstrap samples for the standard errors of metrics that are not means.
# Values of `dataset_path` that denote local files instead of a repository.
_FORMATS = ("json", "csv", "parquet", "arrow", "text", "pandas")

squad.provide()


# ------------------------------------------------------------------------------------------------------ tasks


def find_tasks(names: Sequence[str], include: Sequence[Path]) -> TaskManager:
    """Return a task manager that knows these tasks, groups or tags, and all of their members.

    Reading the harness's thousands of files takes 6 s. They are read only if a name is found neither in this project
    nor in `include`. Raises ValueError if a name is unknown, or two names contain the same task, which the harness
    refuses.
    """
    folders = [TASKS, *include]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if next(_unknown(manager, names), None):
        manager = TaskManager(include_path=folders)
    for name, part in _unknown(manager, names):
        near = difflib.get_close_matches(part, manager.all_tasks)
        within = "" if part == name else f", a member of {name},"
        similar = f"; similar names are {', '.join(near)}" if near else ""
        raise ValueError(f"--tasks: {part!r}{within} is unknown{similar}")
    requested: dict[str, str] = {}
    for name in names:
        for part in dict.fromkeys(parts(manager, name)):
            if (other := requested.setdefault(part, name)) != name:
                raise ValueError(f"--tasks: {part!r} is in {other} and in {name}; omit one, or run them separately")
    return manager


def parts(manager: TaskManager, name: str) -> Iterator[str]:
    """Yield the name, and the names of all tasks and groups that it contains."""
    yield name
    for member in members(manager, name):
        yield from parts(manager, member)


def members(manager: TaskManager, name: str) -> list[str]:
    """Return the names of the members of a group or a tag; empty for a task."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("TAG", "GROUP"):
        return []
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    tasks = entry.cfg.get("task") or []
    rows = [tasks] if isinstance(tasks, str) else tasks
    # A group may modify a member, or define it inline, in which case it has no registered name.
    named = [row if isinstance(row, str) else row.get("group", row.get("task")) for row in rows]
    return [
        member for row, member in zip(rows, named, strict=True) if isinstance(row, str) or member in manager.task_index
    ]


def _unknown(manager: TaskManager, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name, part) for name in names for part in parts(manager, name) if part not in manager.task_index)


def sources(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Return the repositories of the hub that contain the tasks' data."""
    configs = [manager.task_index[part].cfg or {} for name in names for part in parts(manager, name)]
    paths = dict.fromkeys(config.get("dataset_path") for config in configs if "custom_dataset" not in config)
    return [path for path in paths if path and path not in _FORMATS and not Path(path).exists()]


def load_tasks(manager: TaskManager, names: Sequence[str], offline: bool) -> dict[str, Any]:
    """Return the tasks with their data, as the harness evaluates them; `offline` with data of the local cache only."""
    if offline:  # Reading from disk is fast, and progress bars would precede the messages.
        datasets.disable_progress_bars()
    flag = "HF_HUB_OFFLINE"
    patches = [replaced(module, flag, offline or getattr(module, flag)) for module in (datasets.config, constants)]
    with patches[0], patches[1]:
        try:
            return manager.load(list(names))
        except Exception as error:  # The exception types differ between versions of the libraries.
            message = one_line(error) or type(error).__name__
    tasks = ",".join(names)
    include = "".join(f" --include-path {shlex.quote(str(folder))}" for folder in manager.include_path[1:])
    source = next((path for path in sources(manager, names) if path in message), None)
    if source and offline:
        raise ValueError(
            f"{source} has not been fetched; on a machine with network access, run python -m torchtitan_scape.evaluate "
            f"fetch --tasks {tasks}{include}, with the same HF_HOME"
        )
    raise ValueError(f"the data of {tasks} cannot be read: {message}")


# ----------------------------------------------------------------------------------------------------- scores


class _Model(HFLM):
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts after the token before them.

        The harness adds this token. A tokenizer that also added it would have it predicted after itself.
        """
        with replaced(self, "add_bos_token", False):
            return super().loglikelihood_rolling(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        """Return log-likelihoods of (text, context, continuation), or raise ValueError for a continuation that is too
        long.

        The harness evaluates equal token sequences once (`logits_cache`), but reads the logits of a shorter
        continuation at the positions of the longest one. Then sequences are evaluated separately.
        """
        lengths: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"the answer {texts[1][:40]!r}... has {len(continuation)} tokens; "
                    f"a sequence of this model has {self.max_length}"
                )
            lengths[*context, *continuation[:-1]].add(len(continuation))
        with replaced(self, "logits_cache", all(len(length_set) == 1 for length_set in lengths.values())):
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)


def _aggregate_safely(tasks: Mapping[str, Any]) -> None:
    """Replace the tasks' aggregations by ones that return infinity on overflow and NaN for an empty sum."""

    def safe(aggregate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(aggregate)
        def aggregate_safely(items: Any) -> Any:
            try:
                return aggregate(items)
            except OverflowError:
                return math.inf
            except ZeroDivisionError:
                return math.nan

        return aggregate_safely

    for task in tasks.values():  # Metrics may be added while documents are evaluated.
        task.aggregation = lambda own=task.aggregation: {metric: safe(aggregate) for metric, aggregate in own().items()}


def _safe_stderr(metric: Callable[..., Any], bootstrap_iters: int) -> Callable[..., Any] | None:
    """Return the standard error of an aggregation, as NumPy's numbers, which do not raise in means of groups."""
    estimate = stderr_for_metric(getattr(metric, "__wrapped__", metric), bootstrap_iters)

    def estimate_safely(items: Any) -> Any:
        try:
            return np.float64(estimate(items))
        except (OverflowError, ZeroDivisionError):
            return np.float64(math.nan)

    return estimate_safely if estimate else None


@dataclass(frozen=True)
class Scores:
    """Results of the harness: metrics by task or group; version, number of examples in the prompt and hash of each
    task; and properties of the evaluated model.
    """

    results: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, Any]
    shots: Mapping[str, int]
    hashes: Mapping[str, str]
    facts: Mapping[str, Any]


def score(folder: Path, tasks: dict[str, Any], limit: int | None, batch_size: int) -> Scores | None:
    """Evaluate the model in a folder on this process's share of the documents. Return None on all ranks but the first.

    Under torchrun each process has a copy of the model, and the harness distributes the documents; on CPUs with gloo.
    """
    model = load_model(folder, "auto")
    # Without `cpu`, Accelerate would treat ranks without a GPU as independent processes.
    process_group_options = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[process_group_options])
    processes = accelerator.num_processes
    for name, task in tasks["tasks"].items():
        count = min(len(task.eval_docs), limit or len(task.eval_docs))
        if count < processes:
            raise ValueError(f"{name} has {count} documents for {processes} processes; start fewer")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    model.to(accelerator.device)
    # Sums of BF16 logarithms would be rounded to BF16, at -40 to a quarter, and different choices would tie.
    lm = _Model(pretrained=model, tokenizer=str(folder), batch_size=batch_size, softmax_dtype="float32")
    if lm.prefix_token_id is None:
        raise ValueError(f"the tokenizer in {folder} defines neither BOS nor EOS; one must precede a text")
    if processes > 1:  # The harness assumes a single process for a model that it did not load.
        lm.accelerator, lm._rank, lm._world_size = accelerator, accelerator.process_index, processes
    _check_generation(tasks["tasks"], lm)
    _aggregate_safely(tasks["tasks"])
    # Resampling would fork processes.
    with environment(DISABLE_MULTIPROC="1"), replaced(evaluator_utils, "stderr_for_metric", _safe_stderr):
        output = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=_RESAMPLES)
    if processes > 1:
        accelerator.wait_for_everyone()
        torch.distributed.destroy_process_group()
    if output is None:
        return None
    facts = {
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "longest": lm.max_length,
        "bos": lm.tok_encode("a")[:1] == [lm.prefix_token_id],
        "processes": processes,
        "batch_size": batch_size,
    }
    return Scores(output["results"], output["versions"], output["n-shot"], _hashes(output["samples"]), facts)


def _check_generation(tasks: Mapping[str, Any], lm: HFLM) -> None:
    """Raise ValueError for a task that generates more tokens than a sequence has, before anything is evaluated."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            generation_options = task.get_config("generation_kwargs") or {}
            tokens = normalize_gen_kwargs(generation_options, lm.max_gen_toks)["max_gen_toks"]
            if tokens >= lm.max_length:
                raise ValueError(f"{name} generates {tokens} tokens; a sequence of this model has {lm.max_length}")


def _hashes(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return the hashes as the harness computes them, in document order, independent of the number of processes."""
    hashes: dict[str, str] = defaultdict(str)
    for name, rows in samples.items():
        ordered = sorted(rows, key=lambda row: (row["doc_id"], row["filter"]))
        hashes[name] = hash_string(
            "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in ordered)
        )
    return dict(hashes)

"""The lm-evaluation-harness: which tasks it knows, where their data are, and what a model makes of them.

Needs the extra `eval`; whoever imports this file has looked whether it is there.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets.config
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from huggingface_hub import constants
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.patching import environment, replaced
from torchtitan_scape.evaluation import squad
from torchtitan_scape.huggingface.loading import load_model

TASKS = Path(__file__).with_name("tasks")
_RESAMPLES = 1000  # for the errors of what is no mean
# Formats of local files, where a repository's name would stand.
_FORMATS = ("json", "csv", "parquet", "arrow", "text", "pandas")

squad.provide()


# ------------------------------------------------------------------------------------------------------ tasks


def find_tasks(names: Sequence[str], include: Sequence[Path]) -> TaskManager:
    """What knows these tasks, groups or tags, and all that they are made of.

    The harness has thousands of files, and takes 6 s to read them; it does where a name is found neither among ours nor
    in `include`.

    Raises:
        ValueError: a name that nobody knows; a task that two of the names stand for, which the harness refuses.
    """
    places = [TASKS, *include]
    manager = TaskManager(include_path=places, include_defaults=False)
    if next(_unknown(manager, names), None):
        manager = TaskManager(include_path=places)
    for name, part in _unknown(manager, names):
        near = difflib.get_close_matches(part, manager.all_tasks)
        within = "" if part == name else f", of which {name} is made,"
        raise ValueError(f"--tasks: {part!r}{within} is unknown" + (f"; near it are {', '.join(near)}" if near else ""))
    asked: dict[str, str] = {}
    for name in names:
        for part in dict.fromkeys(parts(manager, name)):
            if (other := asked.setdefault(part, name)) != name:
                raise ValueError(f"--tasks: {part!r} is in {other} and in {name}; leave one out, or run them apart")
    return manager


def parts(manager: TaskManager, name: str) -> Iterator[str]:
    """The name, and those of all tasks and groups that it stands for."""
    yield name
    for member in members(manager, name):
        yield from parts(manager, member)


def members(manager: TaskManager, name: str) -> list[str]:
    """What a group or a tag consists of, by name; of a task nothing."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("TAG", "GROUP"):
        return []
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    found = entry.cfg.get("task") or []
    rows = [found] if isinstance(found, str) else found
    # A group may change a member, or define it where it stands: then it has no name to look for.
    named = [row if isinstance(row, str) else row.get("group", row.get("task")) for row in rows]
    return [own for row, own in zip(rows, named, strict=True) if isinstance(row, str) or own in manager.task_index]


def _unknown(manager: TaskManager, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name, part) for name in names for part in parts(manager, name) if part not in manager.task_index)


def sources(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Repositories of the hub that hold the tasks' data."""
    configs = [manager.task_index[part].cfg or {} for name in names for part in parts(manager, name)]
    found = dict.fromkeys(config.get("dataset_path") for config in configs if "custom_dataset" not in config)
    return [path for path in found if path and path not in _FORMATS and not Path(path).exists()]


def load_tasks(manager: TaskManager, names: Sequence[str], offline: bool) -> dict[str, Any]:
    """The tasks with their data, as the harness evaluates them.

    offline: nothing is asked of the hub; what it has is taken from where it was put before.
    Raises ValueError that says what cannot be read.
    """
    if offline:  # what is read from a disk is short, and bars would stand in front of what is said
        datasets.disable_progress_bars()
    flag = "HF_HUB_OFFLINE"
    asked = [replaced(module, flag, offline or getattr(module, flag)) for module in (datasets.config, constants)]
    with asked[0], asked[1]:
        try:
            return manager.load(list(names))
        except Exception as error:  # each version of the libraries raises others
            said = one_line(error) or type(error).__name__
    given = ",".join(names)
    again = "".join(f" --include-path {folder}" for folder in manager.include_path[1:])
    source = next((path for path in sources(manager, names) if path in said), None)
    if source and offline:
        raise ValueError(
            f"{source} has not been fetched; where there is a network, run python -m torchtitan_scape.evaluate fetch "
            f"--tasks {given}{again}, with the same HF_HOME"
        )
    raise ValueError(f"the data of {given} cannot be read: {said}")


# ----------------------------------------------------------------------------------------------------- scores


class _Model(HFLM):
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts after the token that stands in front of them. The harness puts it there; a tokenizer that did
        the same would have it predicted, after itself."""
        with replaced(self, "add_bos_token", False):
            return super().loglikelihood_rolling(requests, disable_tqdm)


@dataclass(frozen=True)
class Scores:
    """What the harness found.

    Attributes:
        results: task or group -> what the harness says of it.
        hashes: of each task's documents, prompts and answers.
        facts: of the model, as it was evaluated.
    """

    results: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, Any]
    shots: Mapping[str, int]
    hashes: Mapping[str, str]
    facts: Mapping[str, Any]


def score(folder: Path, tasks: dict[str, Any], limit: int | None, batch_size: int) -> Scores | None:
    """Evaluates the model in a folder on this process's share of the documents; None on all ranks but the first.

    Under torchrun each process has a copy of the model, and the harness deals out the documents; on CPUs with gloo.

    Raises:
        ValueError: a task has fewer documents than there are processes; the tokenizer has neither BOS nor EOS.
        DifferentError: the folder's weights do not fit its config.
    """
    # Without `cpu` it would take ranks without a GPU for processes that have nothing to do with each other.
    patient = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patient])
    processes = accelerator.num_processes
    for name, task in tasks["tasks"].items():
        count = min(len(task.eval_docs), limit or len(task.eval_docs))
        if count < processes:
            raise ValueError(f"{name} has {count} documents for {processes} processes; start fewer")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    model = load_model(folder, "auto").to(accelerator.device)
    # Sums of BF16 logarithms would be BF16: of -40 to the next quarter, and choices that differ would tie.
    lm = _Model(pretrained=model, tokenizer=str(folder), batch_size=batch_size, softmax_dtype="float32")
    if lm.prefix_token_id is None:
        raise ValueError(f"the tokenizer in {folder} names neither BOS nor EOS; one has to stand in front of a text")
    if processes > 1:  # it takes a model that it has not loaded for a single process's
        lm.accelerator, lm._rank, lm._world_size = accelerator, accelerator.process_index, processes
    _check_generation(tasks["tasks"], lm)
    with environment(DISABLE_MULTIPROC="1"):  # of resampling; it would fork
        found = evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=_RESAMPLES)
    if processes > 1:
        accelerator.wait_for_everyone()
        torch.distributed.destroy_process_group()
    if found is None:
        return None
    facts = {
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "longest": lm.max_length,
        "bos": lm.tok_encode("a")[:1] == [lm.prefix_token_id],
        "processes": processes,
        "batch_size": batch_size,
    }
    return Scores(found["results"], found["versions"], found["n-shot"], _hashes(found["samples"]), facts)


def _check_generation(tasks: Mapping[str, Any], lm: HFLM) -> None:
    """Raises ValueError for a task that asks for more tokens than a sequence has; the harness would find it when its
    turn comes."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            given = task.get_config("generation_kwargs") or {}
            wanted = normalize_gen_kwargs(given, lm.max_gen_toks)["max_gen_toks"]
            if wanted >= lm.max_length:
                raise ValueError(f"{name} generates {wanted} tokens; a sequence of this model has {lm.max_length}")


def _hashes(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """As the harness makes them; in the documents' order, whoever had them."""
    found: dict[str, str] = defaultdict(str)
    for name, rows in samples.items():
        ordered = sorted(rows, key=lambda row: (row["doc_id"], row["filter"]))
        found[name] = hash_string("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in ordered))
    return dict(found)

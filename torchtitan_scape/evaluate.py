"""Scores of an exported model on tasks of the lm-evaluation-harness, beside those of the papers.

    python -m torchtitan_scape.evaluate fetch --tasks scape_paper
    python -m torchtitan_scape.evaluate run --model outputs/embedded/export --tasks scape_paper

`fetch` downloads the data of the tasks into the cache of this machine; `run` needs no network. Under torchrun every
process evaluates a share of the documents. Results are a JSON document and a table, each replaced atomically. Needs the
extra `eval`.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_scape.core.command import install_command, one_line, parser_of
from torchtitan_scape.core.files import parse_json, refuse_pointers, write_whole
from torchtitan_scape.huggingface.folder import DifferentError

# Metrics reported in %, as in the papers.
_SHARES = {"acc", "acc_norm", "acc_all", "acc_bytes", "acc_mutual_info", "f1", "em", "exact_match", "mcc"}
_PAPER = Path(__file__).with_name("evaluation") / "paper.json"
_PACKAGES = ("lm_eval", "transformers", "torch", "datasets")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("torchtitan_scape.evaluate", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser(
        "fetch", help="download the data of tasks into this machine's cache", allow_abbrev=False
    )
    run = commands.add_parser("run", help="evaluate a model", allow_abbrev=False)
    run.add_argument("--model", type=Path, required=True, help="folder that torchtitan_scape.export has written")
    for command in (fetch, run):
        command.add_argument("--tasks", required=True, help='names, "scape_paper" or "piqa,wikitext"')
        command.add_argument(
            "--include-path",
            type=Path,
            action="append",
            default=[],
            help="folder with tasks of your own; may be repeated",
        )
    run.add_argument("--limit", type=int, help="documents of each task, for a trial (all)")
    run.add_argument("--batch-size", type=int, default=8, help="sequences at a time (8)")
    run.add_argument("--output", type=Path, help="folder for the results (evaluation, in the model's)")
    return parser


def fetch(options: argparse.Namespace) -> None:
    """Read the data of all tasks, so that they are cached. Raises ValueError if the hub cannot be reached."""
    names = _names(options)
    from torchtitan_scape.data.datasets import unreachable
    from torchtitan_scape.evaluation.harness import find_tasks, load_tasks, sources

    manager = find_tasks(names, options.include_path)
    if (wanted := sources(manager, names)) and (why := unreachable()):
        raise ValueError(
            f"{', '.join(wanted)}: the hub cannot be reached ({why}); run this on a machine with network access"
        )
    for name, task in load_tasks(manager, names, offline=False)["tasks"].items():
        print(f"{name}: {len(task.eval_docs):,} documents")


def run(options: argparse.Namespace) -> None:
    """Evaluate, write and print. Raises ValueError for invalid input, before anything is written."""
    config = _config(options.model)
    names = _names(options)
    for name in ("limit", "batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}; it must be 1 or more")
    folder, name = _place(options, names)
    from torchtitan_scape.evaluation.harness import find_tasks, load_tasks, score

    begin = time.monotonic()
    manager = find_tasks(names, options.include_path)
    tasks = load_tasks(manager, names, offline=True)
    scores = score(options.model, tasks, options.limit, options.batch_size)
    if scores is None:  # rank 0 has them
        return
    results = {name: metrics for name, result in scores.results.items() if (metrics := metrics_of(result))}
    document = {
        "model": str(options.model),
        "digest": digest(options.model),
        "model_type": config.get("model_type"),
        **scores.facts,
        "tasks": names,
        "limit": options.limit,
        "seconds": round(time.monotonic() - begin, 1),
        "versions": {name: version(name) for name in _PACKAGES},
        "results": results,
        "documents": {name: result.get("sample_len") for name, result in scores.results.items() if name in results},
        "shots": {name: scores.shots.get(name) for name in results},
        "task_versions": {name: scores.versions.get(name) for name in results},
        "task_hashes": scores.hashes,
        "shown": list(dict.fromkeys(part for name in names for part in _shown(name, results, manager))),
    }
    text = table(document)
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.json", as_json(document))
    write_whole(folder / f"{name}.md", text)
    print(f"{folder / name}.json and .md")


def _place(options: argparse.Namespace, names: list[str]) -> tuple[Path, str]:
    """Return the folder for the results, and the name of their files, or raise ValueError if they cannot be written."""
    folder = options.output or options.model / "evaluation"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--output {folder} cannot be written: {there} is no folder for this user")
    name = "+".join(names) + (f"-limit{options.limit}" if options.limit else "")
    if len(name) > 200:  # file systems take 255
        name = f"{name[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    before = folder / f"{name}.json"
    if before.is_file() and (other := _model_of(before)) not in (None, str(options.model)):
        raise ValueError(f"{before} has the scores of {other}; give a folder for each model as --output")
    return folder, name


def _model_of(document: Path) -> str | None:
    """Return the model of a document's scores, or None if it cannot be read."""
    try:
        return str(parse_json(document.read_bytes())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _shown(name: str, results: dict[str, Any], manager: Any) -> list[str]:
    """Return the names that have a score: the task or group itself, else its members, recursively."""
    from torchtitan_scape.evaluation.harness import members

    if name in results:
        return [name]
    return [part for member in members(manager, name) for part in _shown(member, results, manager)]


def _names(options: argparse.Namespace) -> list[str]:
    """Return the requested tasks, or raise ValueError if they, a folder or the extra are missing."""
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--tasks {options.tasks!r} names none")
    for folder in options.include_path:
        if not folder.is_dir():
            raise ValueError(f"--include-path {folder} is no folder")
    if not all(find_spec(name) for name in ("lm_eval", "transformers", "accelerate")):
        raise ValueError(f"the lm-evaluation-harness is not installed: {install_command('eval')}")
    return names


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json of an exported model. Raises ValueError for any other folder."""
    refuse_pointers(*_files(folder))
    try:
        config: dict[str, Any] = dict(parse_json((folder / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        config = {}
    weights = (folder / name for name in ("model.safetensors", "model.safetensors.index.json"))
    if "model_type" not in config or not (folder / "tokenizer.json").is_file() or not any(map(Path.is_file, weights)):
        raise ValueError(
            f"--model {folder} is no exported model (config.json, safetensors, tokenizer.json); "
            "python -m torchtitan_scape.export writes one"
        )
    return config


def _files(folder: Path) -> list[Path]:
    """Return the files of an exported model that decide its scores, sorted."""
    others = (folder / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json"))
    return sorted([*folder.glob("*.safetensors*"), *filter(Path.is_file, others)])


def digest(folder: Path) -> str:
    """Return the first 16 digits of the SHA-256 of an exported model: weights, config, tokenizer and their names."""
    whole = hashlib.sha256()
    for path in _files(folder):
        with open(path, "rb") as file:
            whole.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------------- the report


def metrics_of(result: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return value and standard error by metric, from the harness's results of one task: "acc,none", "acc_stderr,none".

    The name of a filter is kept. Values that are unknown or not a number are None, as are infinite standard errors.
    """
    metrics = {}
    for key, value in result.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name = metric if filter_name == "none" else key
            error = _number(result.get(f"{metric}_stderr,{filter_name}"))
            metrics[name] = {"value": _number(value), "stderr": None if error == math.inf else error}
    return metrics


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) or hasattr(value, "dtype")
    return float(value) if known and not math.isnan(value) else None


def as_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON. JSON has no infinity; parsers read the number 1e999 as infinity."""
    return re.sub(r'(?m)^( *"value": -?)Infinity', r"\g<1>1e999", json.dumps(document, indent=1)) + "\n"


def table(document: Mapping[str, Any]) -> str:
    """Return a document as Markdown: the evaluated model, and a row for each metric of each requested task."""
    rows = [(task, metric) for task in document["shown"] for metric in document["results"][task]]
    papers = [
        paper
        for paper in json.loads(_PAPER.read_bytes())["papers"]
        if paper["model_type"] == document["model_type"] and any(f"{t} {m}" in paper["figures"] for t, m in rows)
    ]
    columns = [f"{paper['title']}: {column}" for paper in papers for column in paper["columns"]]
    head = ["task", "metric", "score", "±", "documents", *columns]
    lines = [head, ["---"] * len(head), *_table_rows(document, papers)]
    about = [f"`{document['model']}`, {document['dtype']}, digest {document['digest']}"]
    about.append(f"{'BOS' if document['bos'] else 'no token'} before a text; at most {document['longest']} tokens")
    about.append(f"lm-eval {document['versions']['lm_eval']}")
    if document["limit"] is not None:
        about.append(f"**only the first {document['limit']} documents of each task: scores are not comparable**")
    rendered = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    note = "Accuracies, F1 and exact matches in %. ± is the standard error."
    if columns:
        note += " Unknown figures of papers are -; a figure that may be either accuracy is listed at acc."
    return f"{'; '.join(about)}.\n\n{rendered}\n\n{note}\n"


def _table_rows(document: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for task in document["shown"]:
        count = document["documents"].get(task)
        for metric, estimate in document["results"][task].items():
            scale = 100 if metric.partition(",")[0] in _SHARES else 1  # Also with a filter.
            figures = [
                figure
                for paper in papers
                for figure in paper["figures"].get(f"{task} {metric}", [None] * len(paper["columns"]))
            ]
            values = [_figure(estimate["value"], scale), _figure(estimate["stderr"], scale)]
            yield [
                task,
                metric,
                *values,
                "-" if count is None else str(count),
                *(_figure(figure) for figure in figures),
            ]


def _figure(value: float | None, scale: float = 1) -> str:
    if value is None:
        return "-"
    return f"{scale * value:.2f}" if abs(value) < 1e6 else f"{value:.2e}"


def main(arguments: Sequence[str] | None = None) -> int:
    logging.disable(logging.WARNING)  # the harness logs every stage
    try:
        options = _parser().parse_args(arguments)
        (fetch if options.command == "fetch" else run)(options)
    except (ValueError, OSError, DifferentError) as error:
        # Before the processes are connected, all have the same error; afterwards it may be that of a document.
        if os.environ.get("LOCAL_RANK", "0") == "0" or dist.is_initialized():
            print(f"evaluate: {one_line(error)}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    return 0


if __name__ == "__main__":
    sys.exit(main())

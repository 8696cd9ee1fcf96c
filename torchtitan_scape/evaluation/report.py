"""Report of an evaluation: a JSON document, and its table with the papers' figures."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Metrics reported in %, as in the papers.
_SHARES = {"acc", "acc_norm", "acc_all", "acc_bytes", "acc_mutual_info", "f1", "em", "exact_match", "mcc"}
_PAPER = Path(__file__).with_name("paper.json")


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
    lines = [head, ["---"] * len(head), *_rows(document, papers)]
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


def _rows(document: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for task in document["shown"]:
        count = document["documents"].get(task)
        for metric, estimate in document["results"][task].items():
            scale = 100 if metric.partition(",")[0] in _SHARES else 1  # Also with a filter.
            figures = [
                figure
                for paper in papers
                for figure in paper["figures"].get(f"{task} {metric}", [None] * len(paper["columns"]))
            ]
            values = [_text(estimate["value"], scale), _text(estimate["stderr"], scale)]
            yield [task, metric, *values, "-" if count is None else str(count), *(_text(figure) for figure in figures)]


def _text(value: float | None, scale: float = 1) -> str:
    if value is None:
        return "-"
    return f"{scale * value:.2f}" if abs(value) < 1e6 else f"{value:.2e}"

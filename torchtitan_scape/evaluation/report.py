"""What is told of an evaluation: a JSON document, and a table of it beside the papers' figures."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Told in %, as the papers do; all else as it is.
_SHARES = {"acc", "acc_norm", "acc_all", "acc_bytes", "acc_mutual_info", "f1", "em", "exact_match", "mcc"}
_PAPER = Path(__file__).with_name("paper.json")


def metrics_of(result: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Metric -> value and standard error, of what the harness says of one task: "acc,none", "acc_stderr,none", names.

    A filter's name stays where there is one. None for what is not known, and for what is not finite.
    """
    found = {}
    for key, value in result.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name = metric if filter_name == "none" else key
            error = result.get(f"{metric}_stderr,{filter_name}")
            found[name] = {"value": _finite(value), "stderr": _finite(error)}
    return found


def _finite(value: Any) -> float | None:
    known = isinstance(value, int | float) or hasattr(value, "dtype")
    return float(value) if known and math.isfinite(value) else None


def table(document: Mapping[str, Any]) -> str:
    """The Markdown of a document: what was evaluated, and a row for each metric of each task that was asked for."""
    rows = [(task, metric) for task in document["shown"] for metric in document["results"][task]]
    papers = [
        paper
        for paper in _papers()
        if paper["model_type"] == document["model_type"] and any(f"{t} {m}" in paper["figures"] for t, m in rows)
    ]
    columns = [f"{paper['title']}: {column}" for paper in papers for column in paper["columns"]]
    head = ["task", "metric", "score", "±", "documents", *columns]
    lines = [head, ["---"] * len(head), *_rows(document, papers)]
    about = [f"`{document['model']}`, {document['dtype']}, digest {document['digest']}"]
    about.append(f"{'BOS' if document['bos'] else 'nothing'} in front of a text; at most {document['longest']} tokens")
    about.append(f"lm-eval {document['versions']['lm_eval']}")
    if document["limit"] is not None:
        about.append(f"**the first {document['limit']} documents of each task alone: no score to compare**")
    told = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    note = "Accuracies, F1 and exact matches in %. ± is the standard error."
    if columns:
        note += " A paper's figure that is not known here is -; one that may be either accuracy stands at acc."
    return f"{'; '.join(about)}.\n\n{told}\n\n{note}\n"


def _papers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_PAPER.read_bytes())["papers"]
    return found


def _rows(document: Mapping[str, Any], papers: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for task in document["shown"]:
        count = document["documents"].get(task)
        for metric, found in document["results"][task].items():
            scale = 100 if metric.partition(",")[0] in _SHARES else 1  # with a filter, too
            figures = [
                figure
                for paper in papers
                for figure in paper["figures"].get(f"{task} {metric}", [None] * len(paper["columns"]))
            ]
            own = [_text(found["value"], scale), _text(found["stderr"], scale)]
            yield [task, metric, *own, "-" if count is None else str(count), *(_text(figure) for figure in figures)]


def _text(value: float | None, scale: float = 1) -> str:
    if value is None:
        return "-"
    return f"{scale * value:.2f}" if abs(value) < 1e6 else f"{value:.2e}"

"""Names of the papers' tasks in the harness, and the papers' figures in the table."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchtitan_scape import evaluate as report
from torchtitan_scape.evaluation import squad

SIXTEEN = [
    *("arc_challenge", "arc_easy", "lambada_openai", "hellaswag", "mmlu", "piqa", "winogrande", "openbookqa"),
    *("boolq", "cb", "copa", "multirc", "record", "sglue_rte", "wic", "wsc"),
]
PAPERS: list[dict[str, Any]] = json.loads(Path(squad.__file__).with_name("paper.json").read_bytes())["papers"]


def test_the_papers_tasks_are_registered(registry: Any) -> None:
    """With the pinned version, whose functions load with the pinned transformers; without in-context examples."""
    from lm_eval.tasks._yaml_loader import load_yaml

    from torchtitan_scape.evaluation.harness import members, parts, sources

    assert sorted(members(registry, "scape_paper")) == sorted(SIXTEEN)
    radius = {key.split()[0] for paper in PAPERS if "Radius" in paper["title"] for key in paper["figures"]}
    assert radius <= set(parts(registry, "radius_paper"))
    index = registry.task_index
    for name in ("scape_paper", "radius_paper", "wikitext"):
        for part in parts(registry, name):
            assert part in index, part
            if part.startswith("mmlu_") or index[part].yaml_path is None:  # 57 similar tasks; a tag.
                continue
            config = load_yaml(index[part].yaml_path)
            assert config.get("num_fewshot") in (None, 0), part
    assert set(sources(registry, ["scape_paper"])) == {
        *("allenai/ai2_arc", "EleutherAI/lambada_openai", "Rowan/hellaswag", "cais/mmlu", "baber/piqa"),
        *("allenai/winogrande", "allenai/openbookqa", "aps/super_glue"),
    }
    metrics = {name: [row["metric"] for row in load_yaml(index[name].yaml_path)["metric_list"]] for name in TWO}
    assert metrics == TWO


TWO = {
    **{name: ["acc", "acc_norm"] for name in ("arc_challenge", "arc_easy", "hellaswag", "piqa", "openbookqa")},
    "lambada_openai": ["perplexity", "acc"],
    "cb": ["acc", "f1"],
    "record": ["f1", "em"],
}


def test_the_papers_figures_are_numbers_or_nulls() -> None:
    for paper in PAPERS:
        for key, row in paper["figures"].items():
            assert len(key.split()) == 2 and len(row) == len(paper["columns"]), key
            assert all(figure is None or isinstance(figure, int | float) for figure in row)
        if "SCAPE" in paper["title"]:
            assert {key.split()[0] for key in paper["figures"]} == set(SIXTEEN)


def test_the_table_has_the_papers_columns() -> None:
    lambada = {"acc,none": 0.5, "acc_stderr,none": 0.01, "perplexity,none": 12.5, "perplexity_stderr,none": "N/A"}
    own = {"alias": "own", "acc,strict": 1, "acc_stderr,strict": float("nan")}
    results = {"lambada_openai": report.metrics_of(lambada), "own": report.metrics_of(own)}
    assert results["own"] == {"acc,strict": {"value": 1.0, "stderr": None}}
    endless = report.metrics_of({"perplexity,none": math.inf, "perplexity_stderr,none": math.inf, "f1,none": math.nan})
    assert endless == {"perplexity": {"value": math.inf, "stderr": None}, "f1": {"value": None, "stderr": None}}
    assert json.loads(report.as_json(endless)) == endless and "Infinity" not in report.as_json(endless)
    document = {
        **{"model": "m", "model_type": "gpt2", "dtype": "bfloat16", "digest": "d", "bos": False, "longest": 1024},
        **{"limit": None, "versions": {"lm_eval": "0"}, "results": results, "shown": list(results)},
        "documents": {"lambada_openai": 5153},
    }
    markdown = report.table(document)
    assert (
        "| Radius, GPT-355M: AdamW |" in markdown
        and "SCAPE, GPT-345M: SCAPE 0.01" in markdown
        and "Llama" not in markdown
    )
    assert "| lambada_openai | acc | 50.00 | 1.00 | 5153 | - | - | - | - | 43.12 | 42.73 | 50.15 |" in markdown
    assert "| lambada_openai | perplexity | 12.50 | - | 5153 | - | - | - | - | 16.00 | 16.24 | 9.73 |" in markdown
    assert "| own | acc,strict | 100.00 | - | - | - | - | - | - | - |" in markdown
    assert "SCAPE" not in report.table({**document, "shown": ["own"]})


@pytest.mark.parametrize(
    ("gold", "found", "exact", "f1"),
    [
        ("The  Cat, sat.", "cat sat", 1, 1.0),
        ("New York City", "in New York", 0, 2 / 3),
        ("a", "the", 1, 1.0),
        ("a", "word", 0, 0.0),
        ("red red blue", "red", 0, 0.5),
        ("one", "two", 0, 0.0),
    ],
)
def test_answers_are_compared_as_squad_does(gold: str, found: str, exact: int, f1: float) -> None:
    assert squad.compute_exact(gold, found) == exact and squad.compute_f1(gold, found) == pytest.approx(f1)

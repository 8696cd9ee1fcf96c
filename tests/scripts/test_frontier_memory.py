"""scripts/benchmarks/frontier_memory.py: the stored runs against closed forms, and the largest models as published."""

import json

import pytest

from scripts.benchmarks.frontier_memory import FORMS, MODELS, largest_rows, rows_of, table
from scripts.common import RESULTS

FOLDER = RESULTS / "frontier_memory"


def test_the_stored_table_is_that_of_the_stored_runs() -> None:
    stored = json.loads((FOLDER / "runs.json").read_text())
    assert (FOLDER / "table.md").read_text() == table(stored)
    assert {name: set(forms) for name, forms in stored["runs"].items()} == {name: set(FORMS) for name in MODELS}


def test_every_kind_is_within_two_percent_of_its_closed_form() -> None:
    """SHARDING's form, the tensors of the dry run, and what the report at a run's start says."""
    runs = json.loads((FOLDER / "runs.json").read_text())["runs"]
    for name in MODELS:
        assert all(abs(float(row["off"].split()[0])) < 2.0 for row in rows_of(runs, name))
        for form, one in runs[name].items():
            report = dict(one["report"])
            report["secondary weights"] = report.pop("secondary partition", report.get("secondary weights"))
            for kind, got in one["held"].items():
                assert got == pytest.approx(report[kind], rel=0.02), (name, form, kind)
    assert runs["20B"]["levels"]["n"] == pytest.approx(20_554_567_680, rel=1e-3)


def test_the_largest_models_are_those_of_the_paper() -> None:
    """68 B, 55 B on 16 GCDs of 64 GiB; 36 B on three levels is what 80 have room for."""
    found = {(row["form"], row["GCDs"]): row["as published, largest"] for row in largest_rows()}
    assert found["ZeRO-3", "16"] == "68.7 B" and found["ZeRO++", "16"] == "55.0 B"
    assert found["three levels", "80"] == "36.2 B" and found["three levels", "16"] == "27.5 B"

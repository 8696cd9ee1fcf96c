"""scripts/benchmarks/memory.py, Frontier: the stored runs against closed forms, and the largest models as published."""

import pytest

from scripts.benchmarks.harness import tables
from scripts.benchmarks.memory import BENCHMARKS, CASES, MODELS, frontier_rows, largest_rows
from scripts.common import RESULTS, read

STORED = read(RESULTS / "memory" / "facts.json")
RUNS = STORED["frontier"]["runs"]


def test_the_stored_table_matches_the_stored_runs() -> None:
    assert "\n".join(tables(BENCHMARKS, STORED)) in (RESULTS / "memory" / "table.md").read_text()
    assert {name: set(forms) for name, forms in RUNS.items()} == {name: set(CASES) for name in MODELS}


def test_every_kind_of_memory_is_within_two_percent_of_its_formula() -> None:
    """The cost formula, the tensors of the dry run, and the report at startup agree."""
    for name in MODELS:
        assert all(abs(float(row["off"].split()[0])) < 2.0 for row in frontier_rows(RUNS, name))
        for form, one in RUNS[name].items():
            report = dict(one["report"])
            report["secondary weights"] = report.pop("secondary partition", report.get("secondary weights"))
            for kind, got in one["held"].items():
                assert got == pytest.approx(report[kind], rel=0.02), (name, form, kind)
    assert RUNS["20B"]["levels"]["n"] == pytest.approx(20_554_567_680, rel=1e-3)


def test_the_largest_models_equal_those_of_the_paper() -> None:
    """68 B and 55 B parameters on 16 GCDs of 64 GiB; 36 B fit on 80 GCDs with three levels."""
    found = {(row["form"], row["GCDs"]): row["as published, largest"] for row in largest_rows()}
    assert found["ZeRO-3", "16"] == "68.7 B" and found["ZeRO++", "16"] == "55.0 B"
    assert found["three levels", "80"] == "36.2 B" and found["three levels", "16"] == "27.5 B"

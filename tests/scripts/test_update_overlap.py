"""The table of `scripts.benchmarks.update_overlap` from made-up times."""

from typing import Any

import pytest

from scripts.benchmarks.update_overlap import OVERLAP, SILENT, UPDATE, VARIANTS, table
from scripts.common import RunError


def facts(skipped: int = 0) -> dict[str, Any]:
    times = {f"{name}|True": [1.0, 1.1, 9.0] for name in SILENT} | {f"{name}|False": [2.1] for name in VARIANTS}
    times[UPDATE + OVERLAP + "|False"] = [1.3, 1.4, 5.0]
    return {"times": times, "sent": dict.fromkeys(VARIANTS, 2.5e6), "parameters": 1, "skipped": skipped}


def test_the_exposed_exchange_is_the_median_step_without_that_of_silent_steps() -> None:
    rows = {row["variant"]: row for row in table(facts())}
    assert list(rows) == list(VARIANTS)
    row = rows[UPDATE + OVERLAP]
    assert (row["step, ms"], row["without exchange, ms"], row["exposed exchange, ms"]) == ("1,400", "1,100", "300")
    assert row[f"of {UPDATE}'s"] == "30 %" and rows[UPDATE][f"of {UPDATE}'s"] == "100 %" and row["steps"] == "3"


def test_skipped_steps_are_no_measurement() -> None:
    with pytest.raises(RunError, match="2 steps were skipped"):
        table(facts(skipped=2))

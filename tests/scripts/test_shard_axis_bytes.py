"""scripts/benchmarks/bytes.py, shard axis: ratios and verdicts from runs that can be worked out by hand."""

import json
from typing import Any

from scripts.benchmarks.bytes import SHARD_AXIS, SHARD_AXIS_TARGETS, shard_axis_rows, shard_axis_table
from scripts.common import RESULTS


def one(counter: float, counted: float, planned: float) -> dict[str, Any]:
    node = {"interface": counter, "counted": counted, "by_kind": {}}
    return {
        "options": ["--a"],
        "validation_loss": 8.0,
        "interfaces": {"steps": 7, "sent_per_step": {"network": [node, node], "node": [node, node]}},
        "planned_shard_axis_bytes_per_step_and_rank": {"network weights": planned / 2, "node gradients": planned / 4},
    }


def test_network_bytes_are_compared_with_dense_training() -> None:
    runs = {str(n): {name: one(10.5e6, 10e6, 10e6) for name in SHARD_AXIS.variants} for n in SHARD_AXIS_TARGETS}
    runs["1"]["all"], runs["2"]["all"] = one(2.4e6, 2.3e6, 2.3e6), one(2.4e6, 2.3e6, 2.3e6)
    rows = shard_axis_rows(runs)
    dense, (first, second) = rows[0], [row for row in rows if row["form"] == "all three"]
    assert dense["network, counter"] == "10.500" and dense["counter / counted"] == "1.050"
    assert dense["against dense"] == "1.050" and dense["target"] == "-" and dense["node, planned"] == "5.000"
    assert first["against dense"] == second["against dense"] == "0.240"
    assert (first["target"], first["holds"]) == ("0.25", "yes") and (second["target"], second["holds"]) == (
        "0.20",
        "no",
    )
    assert "`--sharding.weights=int8`" in shard_axis_table(runs)


def test_the_stored_table_matches_the_stored_runs() -> None:
    folder = RESULTS / "shard_axis_bytes"
    stored = json.loads((folder / "runs.json").read_text())
    assert (folder / "table.md").read_text() == shard_axis_table(stored["runs"])
    rows = shard_axis_rows(stored["runs"])
    assert (
        len(rows) == len(SHARD_AXIS.layouts) * len(SHARD_AXIS.variants)
        and [row["holds"] for row in rows if row["target"] != "-"] == ["yes"] * 2
    )
    assert all(1.0 <= float(row["counter / counted"]) <= 1.05 for row in rows)

"""Bytes in scripts/study/special_tables.py: ratios and verdicts from runs with known results, and the stored report."""

from pathlib import Path
from typing import Any

import pytest

from scripts.common import RESULTS
from scripts.study.grid import GRIDS, Grid
from scripts.study.report import write_report
from scripts.study.special_tables import PLANNED, bytes_row, link_bytes
from scripts.study.store import Store


def node(counter: float, **by_kind: float) -> dict[str, Any]:
    return {"interface": counter, "counted": sum(by_kind.values()), "by_kind": by_kind}


def line(ranks: int, nodes: list[dict[str, Any]], shard: int = 1, **planned: float) -> dict[str, Any]:
    options = {"launch.ranks": ranks, "launch.ranks_per_node": ranks // len(nodes)}
    options["parallelism.data_parallel_shard_degree"] = shard
    sent = {"network": nodes, "node": nodes}
    result = {"interfaces": {"sent_per_step": sent}, "validation_loss": 8.0, PLANNED: planned}
    return {"options": options, "result": result}


# Without masks: 2.00 MB per replica on the interface, 1.95 MB counted.
FIRST = line(2, [node(2.5e6, mask=0.5e6, payload=1.95e6), node(2.5e6, mask=0.5e6, payload=1.95e6)])


def test_ratios_exclude_masks_and_are_per_replica() -> None:
    # Without half of the masks: 2.3 of 2.0 MB on the interface, and 1.989 of 1.95 MB counted.
    other = line(2, [node(2.6e6, mask=0.25e6, payload=1.0e6, values=0.989e6), node(2.5e6, mask=0.25e6, values=1.989e6)])
    first, own = (link_bytes(one, "network") for one in (FIRST, other))
    row = bytes_row(first, first, None, 2)
    assert (row["interface"], row["counted"], row["masks"], row["planned"]) == ("2.500", "2.450", "0.500", "-")
    assert (row["ratio, interface"], row["target"], row["holds"]) == ("1.000", "-", "-")
    row = bytes_row(own, first, 1.02, 2)
    assert (row["interface"], row["interface without masks"]) == ("2.550", "2.300")
    assert (row["ratio, interface"], row["ratio, counted"], row["target"]) == ("1.150", "1.020", "1.02")
    assert row["holds"] == "no" and bytes_row(own, first, 1.16, 2)["holds"] == "yes"


def test_four_replicas_on_two_nodes_count_half_of_a_nodes_bytes() -> None:
    found = link_bytes(line(4, [node(1.2e6, payload=1.0e6)] * 2), "node")
    assert (found["interface"], found["counted"]) == (0.6e6, 0.5e6)


def test_the_shard_axis_is_compared_with_a_ring() -> None:
    """Gradients need 3/4 on a ring. A secondary that is gathered by a validation counts as sent."""
    first = link_bytes(
        line(4, [node(10e6, weights=9e6)] * 2, 4, **{"network weights": 2e6, "network gradients": 4e6}), "network"
    )
    assert (first["planned"], first["ring"]) == (12e6, 2 * (2e6 + 0.75 * 4e6))
    own = link_bytes(line(4, [node(2.4e6, weights=2.0e6)] * 2, 4, **{"network weights": 1.3e6}), "network")
    row = bytes_row(own, first, {"4": 0.25, "8": 0.2}, 4)
    assert (row["ratio, interface"], row["target"], row["holds"]) == ("0.300", "0.25", "no")
    assert row["interface"] == "2.400" and row["planned"] == "2.600"
    assert bytes_row(own, first | {"ring": 0.0}, {"4": 0.25}, 4)["target"] == "-"  # inside a node


@pytest.fixture
def grid() -> Grid:
    return Grid(GRIDS / "sent_bytes.toml")


def test_the_stored_report_matches_the_stored_runs(grid: Grid, tmp_path: Path) -> None:
    stored = RESULTS / "sent_bytes"
    (tmp_path / "runs.jsonl").write_bytes((stored / "runs.jsonl").read_bytes())
    text = write_report(grid, tmp_path).read_text()
    removed = ("sharded, values in BF16", "sharded, BF16 both ways")  # methods that the grid does not have any more
    lines = (stored / "report.md").read_text().splitlines(keepends=True)
    assert text == "".join(line for line in lines if not any(f"| {name} |" in line for name in removed))
    assert text.count("| yes |") + text.count("| no |") == text.count("| yes |") == 8
    own = {key for key, line in Store(tmp_path).own.items() if line["method"] in grid.methods}
    specs = [spec for one in grid.sets for method in one.methods for spec in grid.specs(one, method)]
    assert len(specs) == len(own) and {spec.key for spec in specs} == own

"""scripts/benchmarks/bytes.py, sharded update: ratios and verdicts from runs with known results; its stored table."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.bytes import SHARDED, sharded_rows, sharded_table, spread, verdict
from scripts.common import RESULTS
from tests import server

STORED = RESULTS / "gather_bytes"


def node(counter: float, **by_kind: float) -> dict[str, Any]:
    return {"interface": counter, "counted": sum(by_kind.values()), "by_kind": by_kind}


def run(replicas: int, network: list[dict[str, Any]], inside: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    sent = {"network": network, "node": inside or [node(177.0), node(0.0)]}
    return {"replicas": replicas, "options": [], "interfaces": {"steps": 4, "sent_per_step": sent}}


# Without masks: 2.00 MB per replica on the interface, 1.95 MB counted.
LOCAL = run(2, [node(2.5e6, mask=0.5e6, payload=1.95e6), node(2.5e6, mask=0.5e6, payload=1.95e6)])


def test_ratios_exclude_masks_and_are_per_replica() -> None:
    # Without half of the masks: 2.3 of 2.0 MB on the interface, and 1.989 of 1.95 MB counted.
    gather = run(2, [node(2.6e6, mask=0.25e6, payload=1.0e6, values=0.989e6), node(2.5e6, mask=0.25e6, values=1.989e6)])
    first, second = sharded_rows({"2x1": {"local": LOCAL, "gather": gather}}, "network")
    assert (first["counter"], first["counted"], first["masks"]) == ("2.500", "2.450", "0.500")
    assert (first["against replicated, counter"], first["target"], first["holds"]) == ("1.000", "-", "-")
    assert second["cluster"] == "2 nodes of 1 rank" and second["form"] == "sharded, FP32"
    assert (second["counter"], second["counter without masks"]) == ("2.550", "2.300")
    assert (second["against replicated, counter"], second["against replicated, counted"]) == ("1.150", "1.020")
    assert (second["target"], second["holds"]) == ("1.02", "as counted only")


def test_four_replicas_on_two_nodes_count_half_of_a_nodes_bytes() -> None:
    both = [node(1.2e6, payload=1.0e6), node(1.2e6, payload=1.0e6)]
    (row,) = sharded_rows({"2x2": {"local": run(4, both, both)}}, "node")
    assert (row["counter"], row["counted"]) == ("0.600", "0.500")


def test_links_without_payload_have_no_verdict() -> None:
    """The loopback of single ranks is unused; that of shards carries only scalars and FSDP's collectives."""
    shards = run(2, LOCAL["interfaces"]["sent_per_step"]["network"], [node(3e7, flag=4.0), node(3e7, flag=4.0)])
    runs = {"2x1": {"local": LOCAL, "gather": LOCAL}, "2x2-shard": {"local": shards, "gather": shards}}
    rows = sharded_rows(runs, "node")
    assert [row["cluster"] for row in rows] == [SHARDED.layouts["2x2-shard"].title] * 2
    assert rows[1]["counter"] == "30.000"
    assert {
        rows[1][key] for key in ("against replicated, counter", "against replicated, counted", "target", "holds")
    } == {"-"}


@pytest.mark.parametrize(
    "ratios, expected", [((1.02, 1.0), "yes"), ((1.03, 1.0), "as counted only"), ((1.0, 1.03), "no")]
)
def test_a_target_must_hold_for_counters_and_counted_bytes(ratios: tuple[float, float], expected: str) -> None:
    assert verdict(ratios, 1.02) == expected


def test_the_spread_between_nodes_is_reported() -> None:
    """A node sends 2.1 MB instead of 2.0 MB, while both together send 4.0 MB."""
    two_nodes = run(2, [node(2.6e6, mask=0.5e6, payload=1.95e6), node(2.4e6, mask=0.5e6, payload=1.9e6)])
    least, most, most_apart = spread({"2x1": {"local": LOCAL, "gather": two_nodes}})
    assert least == pytest.approx(5 / 4.9 - 1) and most == pytest.approx(5 / 4.85 - 1)
    assert most_apart == pytest.approx(0.05)


def test_the_stored_table_matches_the_stored_runs() -> None:
    stored = json.loads((STORED / "runs.json").read_text())
    assert (STORED / "table.md").read_text() == sharded_table(stored["runs"])
    assert list(stored["runs"]) == list(SHARDED.layouts)
    for cluster, forms in stored["runs"].items():
        assert list(forms) == list(SHARDED.variants)
        for name, one in forms.items():
            # With the option names of that time.
            ran_with = {option.replace("parameters=gather", "update=sharded") for option in one["options"]}
            ran_with = {option.replace("_dtype=", "=") for option in ran_with}
            assert (
                set(SHARDED.variants[name].options.split()) <= ran_with
                and one["replicas"] == SHARDED.layouts[cluster].replicas
            )
    holds = [row["holds"] for row in sharded_rows(stored["runs"], "network")]
    assert set(holds) == {"-", "yes"} and holds.count("-") == len(SHARDED.layouts)


def test_command_line(tmp_path: Path) -> None:
    command = ("scripts.benchmarks.bytes", "sharded", "--report", f"--output={tmp_path}")
    done = server.run(*command)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "runs.json" in done.stderr
    (tmp_path / "runs.json").write_bytes((STORED / "runs.json").read_bytes())
    assert server.run(*command).returncode == 0
    assert (tmp_path / "table.md").read_text() == (STORED / "table.md").read_text()

"""scripts/benchmarks/sharded_bytes.py: ratios and verdicts from runs that can be worked out by hand, stored table."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.sharded_bytes import FORMS, PLANS, rows_of, spread, table, verdict
from scripts.common import RESULTS
from tests import server

STORED = RESULTS / "gather_bytes"


def node(counter: float, **by_kind: float) -> dict[str, Any]:
    return {"interface": counter, "counted": sum(by_kind.values()), "by_kind": by_kind}


def run(replicas: int, network: list[dict[str, Any]], inside: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    sent = {"network": network, "node": inside or [node(177.0), node(0.0)]}
    return {"replicas": replicas, "options": [], "interfaces": {"steps": 4, "sent_per_step": sent}}


# Without masks the replicated form sends 2.00 MB a replica on the counter, 1.95 counted.
LOCAL = run(2, [node(2.5e6, mask=0.5e6, payload=1.95e6), node(2.5e6, mask=0.5e6, payload=1.95e6)])


def test_ratios_are_without_masks_and_per_replica() -> None:
    # Half the masks: 2.3 of 2.0 MB on the counter are left, and 1.989 of 1.95 counted.
    gather = run(2, [node(2.6e6, mask=0.25e6, payload=1.0e6, values=0.989e6), node(2.5e6, mask=0.25e6, values=1.989e6)])
    first, second = rows_of({"2x1": {"local": LOCAL, "gather": gather}}, "network")
    assert (first["counter"], first["counted"], first["masks"]) == ("2.500", "2.450", "0.500")
    assert (first["against replicated, counter"], first["target"], first["holds"]) == ("1.000", "-", "-")
    assert second["cluster"] == "2 nodes of 1 rank" and second["form"] == "sharded, FP32"
    assert (second["counter"], second["counter without masks"]) == ("2.550", "2.300")
    assert (second["against replicated, counter"], second["against replicated, counted"]) == ("1.150", "1.020")
    assert (second["target"], second["holds"]) == ("1.02", "as counted only")


def test_four_replicas_on_two_nodes_have_half_of_what_a_node_sends() -> None:
    both = [node(1.2e6, payload=1.0e6), node(1.2e6, payload=1.0e6)]
    (row,) = rows_of({"2x2": {"local": run(4, both, both)}}, "node")
    assert (row["counter"], row["counted"]) == ("0.600", "0.500")


def test_a_link_without_payload_is_not_judged() -> None:
    """The loopback of single ranks carries nothing, that of shards scalars and FSDP's own."""
    shards = run(2, LOCAL["interfaces"]["sent_per_step"]["network"], [node(3e7, flag=4.0), node(3e7, flag=4.0)])
    runs = {"2x1": {"local": LOCAL, "gather": LOCAL}, "2x2-shard": {"local": shards, "gather": shards}}
    rows = rows_of(runs, "node")
    assert [row["cluster"] for row in rows] == [PLANS["2x2-shard"].title] * 2
    assert rows[1]["counter"] == "30.000"
    assert {
        rows[1][key] for key in ("against replicated, counter", "against replicated, counted", "target", "holds")
    } == {"-"}


@pytest.mark.parametrize(
    "ratios, expected", [((1.02, 1.0), "yes"), ((1.03, 1.0), "as counted only"), ((1.0, 1.03), "no")]
)
def test_a_target_holds_where_it_does_on_the_counter_and_as_counted(ratios: tuple[float, float], expected: str) -> None:
    assert verdict(ratios, 1.02) == expected


def test_spread() -> None:
    """A node that sends 2.1 of 2.0 MB where both together send 4.0."""
    two_nodes = run(2, [node(2.6e6, mask=0.5e6, payload=1.95e6), node(2.4e6, mask=0.5e6, payload=1.9e6)])
    least, most, most_apart = spread({"2x1": {"local": LOCAL, "gather": two_nodes}})
    assert least == pytest.approx(5 / 4.9 - 1) and most == pytest.approx(5 / 4.85 - 1)
    assert most_apart == pytest.approx(0.05)


def test_the_stored_table_is_that_of_the_stored_runs() -> None:
    stored = json.loads((STORED / "runs.json").read_text())
    assert (STORED / "table.md").read_text() == table(stored)
    assert list(stored["runs"]) == list(PLANS)
    for cluster, forms in stored["runs"].items():
        assert list(forms) == list(FORMS)
        for name, one in forms.items():
            # By the names that options had then.
            ran_with = {option.replace("parameters=gather", "update=sharded") for option in one["options"]}
            ran_with = {option.replace("_dtype=", "=") for option in ran_with}
            assert set(FORMS[name].options) <= ran_with and one["replicas"] == PLANS[cluster].replicas
    holds = [row["holds"] for row in rows_of(stored["runs"], "network")]
    assert set(holds) == {"-", "yes"} and holds.count("-") == len(PLANS)


def test_command_line(tmp_path: Path) -> None:
    command = ("scripts.benchmarks.sharded_bytes", "report", f"--output={tmp_path}")
    done = server.run(*command)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "runs.json" in done.stderr
    (tmp_path / "runs.json").write_bytes((STORED / "runs.json").read_bytes())
    assert server.run(*command).returncode == 0
    assert (tmp_path / "table.md").read_text() == (STORED / "table.md").read_text()

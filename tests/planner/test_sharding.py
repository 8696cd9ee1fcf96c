"""Cost of the shard axis, compared with separate formulas, which neglect padding and norms."""

from dataclasses import replace

import pytest

from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import predict
from torchtitan_scape.sharding.cost import ShardPlan, flat_rows
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, get_machine

MODEL, M, P = get_workload("llama_1_8b"), 2, 8
LAYOUT = plan_layout(M * P, ranks_per_node=P, machine=get_machine("dgx-a100"), replicate=1, shard=M * P)
ALL = ShardPlan(weights="int8", secondary=True, gradients=("int8", "int4"), hops=2)
C8, C4 = 1 + 4 / 128, 0.5 + 4 / 128


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_equal_the_formulas(micro_batches: int) -> None:
    rows, n, ranks, a = flat_rows(MODEL, M * P), MODEL.parameters, M * P, micro_batches
    gathers = 2 * n - sum(row.entries for row in rows if row.gathers == 1) * ranks
    sent = ALL.sent(rows, LAYOUT, a)
    assert sent == pytest.approx(
        {
            ("network", "weights"): n * (1 + 4 / 256) * (M - 1) / ranks,
            ("node", "weights"): a * gathers * (1 + 4 / 256) * (P - 1) / P,
            ("node", "gradients"): a * n * C8 * (P - 1) / P,
            ("network", "gradients"): a * n * C4 * (M - 1) / ranks,
        },
        rel=2e-3,
    )
    dense = ShardPlan().sent(rows, LAYOUT, a)
    ring = a * (2 * gathers + 4 * n) * (ranks - 1) / ranks
    assert sum(dense.values()) == pytest.approx(ring, rel=1e-3)
    across = sum(dense["network", kind] for kind in ("weights", "gradients"))
    assert across == pytest.approx(ring / P, rel=1e-3)
    # The paper states 0.75 of 3.
    assert sent["network", "weights"] + sent["network", "gradients"] < {1: 0.14, 2: 0.10}[a] * across
    one_hop = replace(ALL, secondary=False, hops=1, gradients=("int4",)).sent(rows, LAYOUT, a)
    assert one_hop["network", "gradients"] == pytest.approx(a * n * C4 * (ranks - P) / ranks, rel=2e-3)
    assert one_hop["network", "weights"] == pytest.approx(
        a * gathers * (1 + 4 / 256) * (ranks - 1) / ranks / P, rel=2e-3
    )


def test_memory_and_time_of_the_shard_axis() -> None:
    rows = flat_rows(MODEL, M * P)
    kept = ALL.memory({}, rows, LAYOUT)
    assert kept["secondary weights"] == pytest.approx(MODEL.parameters * (1 + 4 / 256) / P, rel=1e-3)
    largest = max(row.entries for row in rows) * M * P
    assert 6 * largest < kept["shard messages"] < 8 * largest  # all rows in FP32, and messages
    assert ShardPlan().memory({}, rows, LAYOUT) == {}
    links = Links.from_machine(LAYOUT.machine).with_bandwidth("network", 1e9)
    sent = [
        predict(
            PlannedRun(DenseOptions(), "AdamW"), MODEL, LAYOUT, links, batch=16, micro_batch=1, shard_axis=plan
        ).shard
        for plan in (ShardPlan(), ALL)
    ]
    assert 0 < sent[1] < 0.6 * sent[0]


@pytest.mark.parametrize(("network", "slowest"), [(12.5e9, 50e9), (5e9, 8 * 5e9)])
def test_a_ring_over_nodes_has_the_network_of_all_ranks_of_a_node(network: float, slowest: float) -> None:
    """A node receives each byte once, over all of its adapters: the planner counted one rank's share of them alone."""
    layout = plan_layout(M * P, ranks_per_node=P, machine=get_machine("frontier"), replicate=1, shard=M * P)
    links = Links.from_machine(layout.machine).with_bandwidth("network", network)
    rows = flat_rows(MODEL, M * P)
    seconds, _ = ShardPlan().seconds(rows, layout, links, 1)
    latency = 3 * len(rows) * 15 * 5e-6
    assert seconds == pytest.approx(8 * MODEL.parameters * 15 / 16 / slowest + latency, rel=1e-3)

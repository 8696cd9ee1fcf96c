"""The shard axis in closed form, against SHARDING.md's formulas: what is left out there is padding and norms."""

import math
from dataclasses import replace

import pytest

from topology.layout import plan_layout
from topology.links import Links
from topology.machines import get_machine
from torchtitan_scape.planner.cost import predict
from torchtitan_scape.planner.sharding import ShardPlan, flat_rows, shard_bytes, shard_memory
from torchtitan_scape.planner.volumes import Method
from torchtitan_scape.planner.workloads import WORKLOADS, get_workload
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions

MODEL, M, P = get_workload("llama_1_8b"), 2, 8
LAYOUT = plan_layout(M * P, ranks_per_node=P, machine=get_machine("dgx-a100"), replicate=1, shard=M * P)
ALL = ShardPlan(weights="int8", secondary=True, gradients=("int8", "int4"), hops=2)
C8, C4 = 1 + 4 / 128, 0.5 + 4 / 128


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_are_those_of_the_formulas(micro_batches: int) -> None:
    rows, n, ranks, a = flat_rows(MODEL, M * P), MODEL.parameters, M * P, micro_batches
    gathers = 2 * n - sum(row.entries for row in rows if row.gathers == 1) * ranks
    sent = shard_bytes(ALL, rows, LAYOUT, a)
    assert sent == pytest.approx(
        {
            ("network", "weights"): n * (1 + 4 / 256) * (M - 1) / ranks,
            ("node", "weights"): a * gathers * (1 + 4 / 256) * (P - 1) / P,
            ("node", "gradients"): a * n * C8 * (P - 1) / P,
            ("network", "gradients"): a * n * C4 * (M - 1) / ranks,
        },
        rel=2e-3,
    )
    dense = shard_bytes(ShardPlan(), rows, LAYOUT, a)
    ring = a * (2 * gathers + 4 * n) * (ranks - 1) / ranks
    assert sum(dense.values()) == pytest.approx(ring, rel=1e-3)
    across = sum(dense["network", kind] for kind in ("weights", "gradients"))
    assert across == pytest.approx(ring / P, rel=1e-3)
    # The paper has 0.75 of 3.
    assert sent["network", "weights"] + sent["network", "gradients"] < {1: 0.14, 2: 0.10}[a] * across
    one_hop = shard_bytes(replace(ALL, secondary=False, hops=1, gradients=("int4",)), rows, LAYOUT, a)
    assert one_hop["network", "gradients"] == pytest.approx(a * n * C4 * (ranks - P) / ranks, rel=2e-3)
    assert one_hop["network", "weights"] == pytest.approx(
        a * gathers * (1 + 4 / 256) * (ranks - 1) / ranks / P, rel=2e-3
    )


def test_memory_and_time() -> None:
    rows = flat_rows(MODEL, M * P)
    kept = shard_memory(ALL, rows, LAYOUT)
    assert kept["secondary weights"] == pytest.approx(MODEL.parameters * (1 + 4 / 256) / P, rel=1e-3)
    largest = max(row.entries for row in rows) * M * P
    assert 2 * largest < kept["shard messages"] < 4 * largest
    assert shard_memory(ShardPlan(), rows, LAYOUT) == {}
    links = Links.from_machine(LAYOUT.machine).with_bandwidth("network", 1e9)
    told = [
        predict(Method("adamw"), MODEL, LAYOUT, links, batch=16, micro_batch=1, sharding=plan).shard
        for plan in (None, ALL)
    ]
    assert 0 < told[1] < 0.6 * told[0]


def test_names_are_those_of_the_shapes() -> None:
    """Of matrices outside attention GPT-2's and Llama's have as many as their formulas."""
    for workload in WORKLOADS.values():
        named = dict(zip(workload.names(), workload.shapes(), strict=True))
        feed = sum(math.prod(shape) for name, shape in named.items() if "feed" in name or name.endswith("c_fc.weight"))
        assert feed == workload.layers * workload.width * workload.ffn * (1 if workload.gpt2 else 3)
        assert all(shape[0] == workload.width for name, shape in named.items() if name.endswith("_norm.weight"))


def test_what_tagc_sends_and_keeps_on_the_shard_axis() -> None:
    """By hand, of GPT-2's 345 M parameters over two ranks; once in 20 micro-batches less than a 40th."""
    model = get_workload("gpt_345m")
    layout = plan_layout(2, ranks_per_node=1, machine=get_machine("local"), replicate=1, shard=2)
    rows, n = flat_rows(model, 2), model.parameters
    dense = shard_bytes(ShardPlan(), rows, layout, 20)["network", "gradients"]
    attention = model.layers * (4 * model.width**2)
    matrices = attention + model.layers * 2 * model.width * model.ffn + (model.vocab + model.sequence) * model.width
    blocks = (matrices - attention + model.width) / 1024  # the vocabulary is odd: a row more for each rank
    for each, times in ((False, 1), (True, 20)):
        options = TagcShardingOptions(micro="each" if each else "last")
        plan = ShardPlan(sparse=options.planned(2))
        sent = shard_bytes(plan, rows, layout, 20)
        assert sent["network", "index"] == pytest.approx(times * blocks * 67, rel=1e-3)
        values = 4 * (blocks * 204 + n - (matrices - attention)) / 2
        assert sent["network", "gradients"] == pytest.approx(times * values, rel=1e-3)
        assert shard_memory(plan, rows, layout)["shard residual"] == pytest.approx(4096 * blocks, rel=1e-3)
        if not each:
            assert dense / (sent["network", "index"] + sent["network", "gradients"]) > 40

"""Launches and temporary memory of the collectives that replace those of FSDP2, on meta tensors."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scripts.benchmarks.step_operators import StepCount, StepCounter, as_one_rank, triton_everywhere
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.sharding.base import (
    ParameterSlice,
    ShardedParamGroup,
    TrainPosition,
    entries,
)
from torchtitan_scape.sharding.cost import FlatRow, LevelsPlan, ShardPlan, coded
from torchtitan_scape.sharding.levels_hooks import RowLayout, SliceReduceScatter
from torchtitan_scape.sharding.row_codec import RowCodec
from torchtitan_scape.sharding.tagc import TagcReduce
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.sharding.zeropp import QuantizedAllGather, QuantizedReduceScatter
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.layout import Layout, RankGroup
from torchtitan_scape.topology.machines import get_machine

MOST, META = 40, torch.device("meta")
RANKS = (2, 4, 64)


def layer(ranks: int) -> ShardedParamGroup:
    """Return a layer of Llama-1.8B, divided among ranks."""
    slices, start, model = [], 0, get_workload("llama_1_8b").local(ranks)
    for name, shape, size in zip(model.names, model.shapes, model.sizes, strict=True):
        if ".0." in name:
            slices.append(ParameterSlice(name, start, size, len(shape)))
            start += size
    return ShardedParamGroup("layer", 0, tuple(slices), tuple(slices), ())


def groups_of(ranks: int, hops: int) -> list[RankGroup]:
    """Return the groups of a collective; with two hops a node has two ranks."""
    if hops == 1:
        return [RankGroup("node", ranks, 0)]
    return [RankGroup("node", 2, 0), RankGroup("network", max(2, ranks // 2), 0)]


def hook_of(kind: str, ranks: int, hops: int, backend: str, options: dict[str, Any]) -> Any:
    flat, ledger, position = layer(2 if kind == "slices" else ranks), SimpleNamespace(), TrainPosition()
    code, groups = block_code(backend, "int4", 256), groups_of(ranks, hops)
    rows = RowCodec(flat.gathered, code)
    if kind == "gather":
        return QuantizedAllGather(flat, groups, rows, ledger)  # type: ignore[arg-type]
    if kind == "reduce":
        return QuantizedReduceScatter(flat, groups, [rows] * hops, ledger)  # type: ignore[arg-type]
    if kind == "slices":
        sizes, matrices = [s.size for s in flat.reduced], [s.dims > 1 for s in flat.reduced]
        layout, code = RowLayout(sizes, matrices, 256, pairs=ranks // 2, nodes=2), None if options else code
        return SliceReduceScatter(flat, layout, 2, RankGroup("node", ranks, 0), code, ledger, META, code)  # type: ignore[arg-type]
    assert kind == "tagc"
    return TagcReduce(flat, groups[0], TagcShardingOptions(**options), ledger, position, backend, META)  # type: ignore[arg-type]


def counted(kind: str, ranks: int, hops: int, backend: str, options: dict[str, Any]) -> StepCount:
    """Return the launches and the temporary memory of one gather or reduce on a GPU."""
    counter = StepCounter()

    def exchange(*_: Tensor, **__: Any) -> None: ...

    with ExitStack() as stack:
        for context in (as_one_rank(counter), triton_everywhere(), torch.no_grad()):
            stack.enter_context(context)
        for name in ("all_gather", "all_to_all"):
            stack.enter_context(replaced(shard_collectives, name, exchange))
        stack.enter_context(replaced(dist, "get_backend", lambda *_: "nccl"))
        stack.enter_context(replaced(dist, "get_rank", lambda *_: 0))
        hook = hook_of(kind, ranks, hops, backend, options)
        whole_ranks, gathers = 2 if kind == "slices" else ranks, kind == "gather"
        row = entries(layer(whole_ranks).reduced)
        dtype = torch.bfloat16 if gathers else torch.float32
        own = torch.empty(row, dtype=dtype, device=META)
        whole = torch.empty(whole_ranks * row, dtype=dtype, device=META)
        group = SimpleNamespace(size=lambda: whole_ranks)
        with counter:
            hook(whole, own, group) if gathers else hook(own, whole, group, dist.ReduceOp.SUM)
    return counter.count


# Kind, hops, options of TAGC.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gather", 1, {}),
    ("gather", 2, {}),
    ("reduce", 1, {}),
    ("reduce", 2, {}),
    ("slices", 1, {}),
    ("tagc", 1, {}),  # offsets for two ranks, and bitmaps for more
    ("tagc", 1, {"sparsity": 0.5}),  # bitmaps
]


@pytest.mark.parametrize(("kind", "hops", "options"), CASES)
def test_launches_do_not_depend_on_the_ranks(kind: str, hops: int, options: dict[str, Any]) -> None:
    """At most 40 for a layer with nine parameters."""
    ranks = [ranks for ranks in RANKS if ranks >= 2 * hops]
    found = [counted(kind, number, hops, "triton", options).launches for number in ranks]
    assert max(found) <= MOST, found
    # TAGC combines the bitmaps of all ranks by halves.
    assert found[-1] - found[0] <= (5 if kind == "tagc" else 4), found


UNCODED = {"uncoded": True}


@pytest.mark.parametrize(
    ("kind", "hops", "options"), [("reduce", 1, {}), ("reduce", 2, {}), ("slices", 1, {}), ("slices", 1, UNCODED)]
)
def test_the_memory_report_has_the_temporary_buffers(kind: str, hops: int, options: dict[str, Any]) -> None:
    """Of a layer on eight ranks: eight in a node, or with two hops two per node."""
    ranks, code = 8, () if options else ("int4",)
    layout = Layout(ranks, ranks if hops == 1 else 2, get_machine("dgx-a100"), 1, ranks)
    model = get_workload("llama_1_8b").local(ranks)
    pairs = zip(model.names, model.shapes, strict=True)
    rows = [FlatRow(tuple(shape for name, shape in pairs if ".0." in name))]
    plan: ShardPlan | LevelsPlan = ShardPlan(gradients=code * hops, hops=hops)
    if kind == "slices":
        plan = LevelsPlan(2, ranks, 2, reduced=coded(4, 256) if code else 4.0)
    planned = plan.memory({"parameters": 0.0, "gradients": 0.0}, rows, layout)["shard messages"]
    peak = counted(kind, ranks, hops, "triton", options).peak
    assert peak == pytest.approx(planned, rel=0.02)  # the plan has larger scales


def cpu_operators(ranks: int) -> list[int]:
    """Return the operators of a quantized gather and of a quantized reduce on a CPU, for a group of 2^16 entries."""
    size, counts = (1 << 16) // ranks, []
    slices = (ParameterSlice("weight", 0, size - 8, 2), ParameterSlice("bias", size - 8, 8, 1))
    rows, generator = RowCodec(slices, block_code("torch", "int8", 256)), torch.Generator().manual_seed(0)
    values = torch.randn(ranks, size, generator=generator)
    messages = torch.empty(ranks, rows.message_bytes(torch.float32), dtype=torch.uint8)
    for work in (
        lambda: rows.unpack(messages, values),
        lambda: rows.decode_and_sum(messages),
    ):
        rows.encode(rows.split(values), messages)
        counter = StepCounter("cpu")
        with counter:
            rows.encode(rows.split(values), messages)
            work()
        counts.append(counter.count.operators)
    return counts


def test_a_cpu_has_no_operators_for_each_rank() -> None:
    few, *others = (cpu_operators(ranks) for ranks in RANKS)
    assert others == [few, few], (few, others)

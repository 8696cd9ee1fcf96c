"""Launches of the collectives that replace those of FSDP2, on meta tensors."""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import block_code
from scripts.benchmarks.step_operators import StepCounter, as_one_rank, triton_everywhere
from topology import shard_collectives
from topology.rank_group import RankGroup
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.sharding.base import ParameterSlice, ShardedParamGroup, TrainPosition, entries
from torchtitan_scape.sharding.messages import RowCodec
from torchtitan_scape.sharding.tagc import TagcReduce
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.sharding.zeropp import QuantizedAllGather, QuantizedReduceScatter

MOST, META = 40, torch.device("meta")


def layer(ranks: int) -> ShardedParamGroup:
    """Return a layer of Llama-1.8B, divided among ranks."""
    model, at, slices = get_workload("llama_1_8b").local(ranks), itertools.count(), []
    start = 0
    for name, shape, size in zip(model.names, model.shapes, model.sizes, strict=True):
        if ".0." in name:
            slices.append(ParameterSlice(name, start, size, len(shape)))
            start += size
    return ShardedParamGroup("layer", next(at), tuple(slices), tuple(slices), ())


def groups_of(ranks: int, hops: int) -> list[RankGroup]:
    return (
        [RankGroup("node", 8, 0), RankGroup("network", ranks // 8, 0)] if hops == 2 else [RankGroup("node", ranks, 0)]
    )


def launches(hook: Any, ranks: int, counter: StepCounter, gather: bool, dtype: torch.dtype) -> int:
    row, group = entries(layer(ranks).reduced), SimpleNamespace(size=lambda: ranks)
    whole, own = torch.empty(ranks * row, dtype=dtype, device=META), torch.empty(row, dtype=dtype, device=META)
    with counter:
        hook(whole, own, group) if gather else hook(own, whole, group, dist.ReduceOp.SUM)
    return counter.count.launches


def count(kind: str, ranks: int, hops: int) -> int:
    flat, counter, ledger = layer(ranks), StepCounter(), SimpleNamespace()

    def exchange(*_: Tensor, **__: Any) -> None: ...

    with ExitStack() as stack:
        for context in (as_one_rank(counter), triton_everywhere(), torch.no_grad()):
            stack.enter_context(context)
        for name in ("all_gather", "all_to_all"):
            stack.enter_context(replaced(shard_collectives, name, exchange))
        stack.enter_context(replaced(dist, "get_backend", lambda *_: "nccl"))
        stack.enter_context(replaced(dist, "get_rank", lambda *_: 0))
        rows, groups = RowCodec(flat.gathered, block_code("triton", "int8", 256)), groups_of(ranks, hops)
        if kind == "gather":
            hook: Any = QuantizedAllGather(flat, groups, rows, ledger)  # type: ignore[arg-type]
            return launches(hook, ranks, counter, True, torch.bfloat16)
        position = TrainPosition()
        if kind == "tagc":
            hook = TagcReduce(flat, groups[0], TagcShardingOptions(), ledger, position, "triton", META)  # type: ignore[arg-type]
        else:
            hook = QuantizedReduceScatter(flat, groups, [rows] * hops, ledger, position)  # type: ignore[arg-type]
        return launches(hook, ranks, counter, False, torch.float32)


@pytest.mark.parametrize(("kind", "hops"), [("gather", 1), ("gather", 2), ("reduce", 1), ("reduce", 2), ("tagc", 1)])
def test_launches_do_not_depend_on_the_ranks(kind: str, hops: int) -> None:
    """At most 40 for a layer with nine parameters. With stochastic rounding every message has its own key."""
    few, many = (count(kind, ranks, hops) for ranks in (16, 64))
    assert few <= MOST and many <= MOST
    assert many - few <= 4  # TAGC combines the bitmaps of all ranks by halves

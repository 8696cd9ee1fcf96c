"""Construction of the collective hooks that `[sharding]` selects."""

from datetime import timedelta

import torch
import torch.nn as nn

from torchtitan_scape.core.parameters import local
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.sharding.base import (
    CollectiveHook,
    CountedAllGather,
    CountedReduceScatter,
    ResidualStore,
    ShardedParamGroup,
    Sharding,
    WeightsCache,
    install,
    param_groups_of,
)
from torchtitan_scape.sharding.cost import GRADIENTS_BLOCK, WEIGHTS_BLOCK
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.sharding.row_codec import RowCodec
from torchtitan_scape.sharding.tagc import TagcReduce
from torchtitan_scape.sharding.zeropp import QuantizedAllGather, QuantizedReduceScatter
from torchtitan_scape.topology.groups import ShardGroups, build_shard_groups
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.traffic import TrafficLedger


def groups_for(options: ShardingOptions, layout: Layout, timeout: timedelta) -> ShardGroups:
    """Return the process groups that checked options need. Collective."""
    hops = options.hops_over(layout) if options.active else 0
    gathers = hops if options.weights_code != "dense" or options.secondary else 0
    reductions = 0 if options.gradients_code == "dense" else 1 if options.sparse else hops
    return build_shard_groups(layout, timeout, gathers, reductions)


def build_sharding(
    model: nn.Module, options: ShardingOptions, groups: ShardGroups, traffic: TrafficLedger, *, kernels: str
) -> Sharding:
    """Install the collective hooks on a model after `fully_shard`, before its first forward pass.

    Args:
        model: The sharded model.
        options: Section [sharding], checked.
        groups: Process groups from `groups_for`.
        traffic: Byte ledger of the run.
        kernels: "triton" or "torch".
    """
    sharding = Sharding(groups, traffic)
    ledger, device = sharding.ledger, local(next(model.parameters())).device

    def gather(flat: ShardedParamGroup) -> CollectiveHook:
        if not groups.gathers:
            return CountedAllGather(groups.whole, ledger)
        code = None if options.weights_code == "dense" else _code(kernels, options.weights_code, WEIGHTS_BLOCK)
        cache = WeightsCache(sharding.version) if options.secondary else None
        return QuantizedAllGather(flat, groups.gathers, RowCodec(flat.gathered, code), ledger, cache)

    def reduce(flat: ShardedParamGroup) -> CollectiveHook:
        if not groups.reductions:
            return CountedReduceScatter(groups.whole, ledger)
        if options.sparse:
            (rank_group,) = groups.reductions
            return TagcReduce(flat, rank_group, options.tagc, ledger, sharding.position, kernels, device)
        names = (*options.hop_codes, options.hop_codes[-1])[: len(groups.reductions)]
        codes = [_code(kernels, name, GRADIENTS_BLOCK) for name in names]
        rows = [RowCodec(flat.reduced, code, hadamard="int4" in options.hop_codes) for code in codes]
        return QuantizedReduceScatter(flat, groups.reductions, rows, ledger)

    reductions = []
    for flat in param_groups_of(model):
        reductions.append(reduce(flat))
        install(flat, gather(flat), reductions[-1])
    if options.sparse:
        sharding.unsent = ResidualStore(reductions)
    return sharding


def _code(kernels: str, name: str, block: int) -> BlockCode:
    return block_code(kernels, name, block, torch.float32)

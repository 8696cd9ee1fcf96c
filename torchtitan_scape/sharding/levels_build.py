"""Three levels as `[sharding]` and `[sharding.levels]` ask for them, installed on a model."""

from typing import Any

import torch
import torch.nn as nn

from kernels import block_code
from kernels.codec.codes import BlockCode
from topology.groups import LevelGroups, ReplicaGroups
from topology.layout import Layout
from topology.process_groups import collectives_of
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from topology.traffic import TrafficLedger
from torchtitan_scape.core.parameters import plain_name
from torchtitan_scape.sharding.base import (
    AllGatherHook,
    CountedAllGather,
    ShardedParamGroup,
    Sharding,
    flat_groups,
    install,
)
from torchtitan_scape.sharding.levels import LevelGroup, ThreeLevelState
from torchtitan_scape.sharding.levels_gather import SecondaryAllGather
from torchtitan_scape.sharding.levels_gradients import SliceReduceScatter
from torchtitan_scape.sharding.levels_layout import RowLayout
from torchtitan_scape.sharding.levels_options import STEP_BLOCK
from torchtitan_scape.sharding.levels_update import WeightAllGather
from torchtitan_scape.sharding.messages import RowCodec
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.sharding.zeropp import QuantizedAllGather

_DTYPES = {"int8": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}


def build_levels(
    model: nn.Module,
    options: ShardingOptions,
    layout: Layout,
    groups: LevelGroups,
    traffic: TrafficLedger,
    *,
    sums: bool,
    bf16: bool,
    kernels: str,
    seed: int,
) -> ThreeLevelState:
    """Of a model after `fully_shard` over the w ranks and initialisation, before its first forward pass.

    layout: the run's. sums: gradients are summed across nodes here, so that the optimizer gets sub-pieces; else it gets
    pieces. bf16: FSDP2 keeps weights in BF16, beside the FP32 masters. kernels: "triton" or "torch". seed: of rounding.

    Raises ValueError for uneven rows in BF16, and for parameters that are frozen.
    """
    sharding, update = Sharding(groups, ShardLedger(traffic), seed), options.levels.update
    ledger, moment = sharding.ledger, sharding.moment
    flats, nodes = flat_groups(model), groups.nodes.size if sums else 1
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    device = next(iter(parameters.values())).device
    if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        raise ValueError(
            f"[sharding.levels] weights = {groups.weights.size}: {frozen[0]!r} is frozen, and masters are of what is "
            "trained alone; train it, or leave [sharding.levels] out"
        )
    for name, parameter in parameters.items() if bf16 else ():
        if len(parameter) % groups.weights.size:
            raise ValueError(
                f"[sharding.levels] weights = {groups.weights.size}: {name!r} has {len(parameter)} rows, which as many "
                "ranks do not share evenly, and FSDP keeps weights in BF16 of even shards alone; take a degree that "
                "divides them, or [training] mixed_precision_param = 'float32'"
            )
    hops = _hops(options, groups, kernels)
    over = (groups.nodes, groups.pairs) if sums else (groups.pairs,)
    step_code = block_code(kernels, "int8", STEP_BLOCK, torch.float32)
    found = []
    for flat in flats:
        row = flat.reduced
        rows = RowLayout([s.size for s in row], [s.dims > 1 for s in row], options.cut_block, groups.pairs.size, nodes)
        summed, told = (step_code if of == "int8" else None for of in (options.levels.sum, update))
        found.append(
            LevelGroup(
                rows,
                [(s.name, parameters[s.name]) for s in row],
                cut=groups.pairs.group_rank * nodes + (groups.nodes.group_rank if sums else 0),
                place=groups.weights.group_rank,
                reduce=SliceReduceScatter(
                    flat,
                    rows,
                    groups.weights.size,
                    hops,
                    ledger,
                    moment,
                    device,
                    across=summed,
                    turned=options.turns,
                    stochastic=options.rounding == "stochastic",
                ),
                update=WeightAllGather(rows, over, told, _DTYPES[update], ledger),
                whole=WeightAllGather(rows, over, None, _DTYPES[update], ledger),
            )
        )
        install(flat, _gather(flat, options, groups, sharding, kernels), found[-1].reduce)
        if groups.weights.size == 1:  # nothing else is called then
            module: Any = flat.modules[0]
            module.set_all_reduce_hook(found[-1].reduce.hook)
    weight_peers = collectives_of(
        ReplicaGroups(groups.weight_peers, groups.weights.process_group, options.levels.inner(layout))
    )
    return ThreeLevelState(
        model, found, sharding, groups.nodes if sums else None, weight_peers, keeps_bits=update == "int8", bf16=bf16
    )


def _hops(options: ShardingOptions, groups: LevelGroups, kernels: str) -> list[tuple[RankGroup, BlockCode | None]]:
    """What gradients go over in the node, and the code of each hop."""
    codes: list[BlockCode | None] = [
        block_code(kernels, name, options.gradients_block, torch.float32) for name in options.gradient_codes
    ] or [None]
    inner, outer = groups.pair, groups.pairs
    if min(inner.size, outer.size) > 1:
        two = options.hops == 2 or len(codes) > 1
        return [(inner, codes[0]), (outer, codes[-1])] if two else [(groups.gradients, codes[0])]
    return [(rank_group, codes[0]) for rank_group in (inner, outer) if rank_group.size > 1]


def _gather(
    flat: ShardedParamGroup, options: ShardingOptions, groups: LevelGroups, sharding: Sharding, kernels: str
) -> AllGatherHook:
    coded = options.weights != "dense"
    code = block_code(kernels, options.weights, options.weights_block, torch.float32) if coded else None
    if options.levels.secondary:
        rows = RowCodec(flat.gathered, code)
        return SecondaryAllGather(flat, groups.weights, rows, groups.secondary, sharding.ledger, sharding.version)
    if code is None:
        return CountedAllGather(groups.weights, sharding.ledger)
    return QuantizedAllGather(flat, [groups.weights], RowCodec(flat.gathered, code), sharding.ledger)


def check_levels(options: ShardingOptions, layout: Layout) -> None:
    """What three levels and the rest of [sharding] leave no room for. Raises ValueError with value and fix."""
    levels = options.levels
    levels.check(layout)
    if levels.weights == 1 and options.weights != "dense":
        options.require(False, "weights", "with [sharding.levels] weights = 1 nothing is gathered; set it to 'dense'")
    if options.secondary:
        options.require(
            False, "secondary", "weights stay in the node; that of three levels is [sharding.levels] secondary"
        )
    two = levels.weights > 1 and levels.gradients > levels.weights
    if not two and (options.hops == 2 or len(options.gradient_codes) > 1):
        key = "hops" if options.hops == 2 else "gradients"
        rule = (
            f"two hops need pairs of several ranks and several pairs, and [sharding.levels] has weights = "
            f"{levels.weights}, gradients = {levels.gradients}; set hops = 'auto' and one code"
        )
        options.require(False, key, rule)
    if options.hops == 1 and len(options.gradient_codes) > 1:
        options.require(False, "gradients", "two codes need two hops; set hops = 'auto', or one code")

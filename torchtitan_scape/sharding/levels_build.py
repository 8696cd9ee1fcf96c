"""Construction of three-level sharding from the sections `[sharding]` and `[sharding.levels]`."""

from typing import Any

import torch
import torch.nn as nn

from torchtitan_scape.core.parameters import plain_name
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.sharding.base import (
    AllGatherHook,
    CountedAllGather,
    ShardedParamGroup,
    Sharding,
    install,
    param_groups_of,
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
from torchtitan_scape.topology.groups import LevelGroups, ReplicaGroups
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.process_groups import collectives_of
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger
from torchtitan_scape.topology.traffic import TrafficLedger

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
    """Install three-level sharding on a model after `fully_shard` over the w ranks and initialization.

    Call it before the model's first forward pass.

    Args:
        model: The sharded model.
        options: Section [sharding], checked.
        layout: Layout of the run.
        groups: Process groups of the levels.
        traffic: Byte ledger of the run.
        sums: Sum gradients between nodes here, so that the optimizer receives row slices; else it receives node slices.
        bf16: FSDP2 stores weights in BF16, next to the FP32 masters.
        kernels: "triton" or "torch".
        seed: Seed of stochastic rounding.

    Raises:
        ValueError: Rows cannot be divided evenly in BF16, or a parameter is frozen.
    """
    sharding, update = Sharding(groups, ShardLedger(traffic), seed), options.levels.update_code
    ledger, position = sharding.ledger, sharding.position
    flats, nodes = param_groups_of(model), groups.nodes.size if sums else 1
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    device = next(iter(parameters.values())).device
    if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        raise ValueError(
            f"[sharding.levels] weights = {groups.weights.size}: {frozen[0]!r} is frozen, but only trained parameters "
            "have masters; train it, or omit [sharding.levels]"
        )
    for name, parameter in parameters.items() if bf16 else ():
        if len(parameter) % groups.weights.size:
            raise ValueError(
                f"[sharding.levels] weights = {groups.weights.size}: {name!r} has {len(parameter)} rows, which the "
                "degree does not divide, and BF16 weights need even shards; set a degree that divides the rows, or "
                "[training] mixed_precision_param = 'float32'"
            )
    hops = _hops(options, groups, kernels)
    over = (groups.nodes, groups.pairs) if sums else (groups.pairs,)
    step_code = block_code(kernels, "int8", STEP_BLOCK, torch.float32)
    level_groups = []
    for flat in flats:
        row = flat.reduced
        rows = RowLayout([s.size for s in row], [s.dims > 1 for s in row], options.cut_block, groups.pairs.size, nodes)
        sum_code, update_code = (step_code if name == "int8" else None for name in (options.levels.sum_code, update))
        level_groups.append(
            LevelGroup(
                rows,
                [(s.name, parameters[s.name]) for s in row],
                slice_index=groups.pairs.group_rank * nodes + (groups.nodes.group_rank if sums else 0),
                group_rank=groups.weights.group_rank,
                reduce=SliceReduceScatter(
                    flat,
                    rows,
                    groups.weights.size,
                    hops,
                    ledger,
                    position,
                    device,
                    node_code=sum_code,
                    hadamard=options.applies_hadamard,
                    stochastic=options.rounding == "stochastic",
                ),
                update=WeightAllGather(rows, over, update_code, _DTYPES[update], ledger),
                full_update=WeightAllGather(rows, over, None, _DTYPES[update], ledger),
            )
        )
        install(flat, _gather(flat, options, groups, sharding, kernels), level_groups[-1].reduce)
        if groups.weights.size == 1:  # FSDP2 then calls no reduce-scatter, only this hook.
            module: Any = flat.modules[0]
            module.set_all_reduce_hook(level_groups[-1].reduce.hook)
    weight_peers = collectives_of(
        ReplicaGroups(groups.weight_peers, groups.weights.process_group, options.levels.inner(layout))
    )
    return ThreeLevelState(
        model,
        level_groups,
        sharding,
        groups.nodes if sums else None,
        weight_peers,
        keeps_bits=update == "int8",
        bf16=bf16,
    )


def _hops(options: ShardingOptions, groups: LevelGroups, kernels: str) -> list[tuple[RankGroup, BlockCode | None]]:
    """Return the rank group and the code of each hop of the gradients within the node."""
    codes: list[BlockCode | None] = [
        block_code(kernels, name, options.gradients_block, torch.float32) for name in options.hop_codes
    ] or [None]
    inner, outer = groups.pair, groups.pairs
    if min(inner.size, outer.size) > 1:
        two_hops = options.hops == 2 or len(codes) > 1
        return [(inner, codes[0]), (outer, codes[-1])] if two_hops else [(groups.gradients, codes[0])]
    return [(rank_group, codes[0]) for rank_group in (inner, outer) if rank_group.size > 1]


def _gather(
    flat: ShardedParamGroup, options: ShardingOptions, groups: LevelGroups, sharding: Sharding, kernels: str
) -> AllGatherHook:
    coded = options.weights_code != "dense"
    code = block_code(kernels, options.weights_code, options.weights_block, torch.float32) if coded else None
    if options.levels.secondary:
        rows = RowCodec(flat.gathered, code)
        return SecondaryAllGather(flat, groups.weights, rows, groups.secondary, sharding.ledger, sharding.version)
    if code is None:
        return CountedAllGather(groups.weights, sharding.ledger)
    return QuantizedAllGather(flat, [groups.weights], RowCodec(flat.gathered, code), sharding.ledger)


def check_levels(options: ShardingOptions, layout: Layout) -> None:
    """Check [sharding.levels] against the other options of [sharding].

    Raises:
        ValueError: The options do not go together; the message contains the value and the fix.
    """
    levels = options.levels
    levels.check(layout)
    if levels.weights == 1 and options.weights_code != "dense":
        options.require(
            False, "weights_code", "with [sharding.levels] weights = 1 nothing is gathered; set it to 'dense'"
        )
    if options.secondary:
        options.require(
            False, "secondary", "weights stay within the node; set it to false, or use [sharding.levels] secondary"
        )
    two_hops = levels.weights > 1 and levels.gradients > levels.weights
    if not two_hops and (options.hops == 2 or len(options.hop_codes) > 1):
        key = "hops" if options.hops == 2 else "gradients_code"
        rule = (
            f"two hops need pairs of several ranks and several pairs, and [sharding.levels] has weights = "
            f"{levels.weights}, gradients = {levels.gradients}; set hops = 'auto' and one code"
        )
        options.require(False, key, rule)
    if options.hops == 1 and len(options.hop_codes) > 1:
        options.require(False, "gradients_code", "two codes need two hops; set hops = 'auto', or one code")

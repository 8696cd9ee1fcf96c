"""Three-level sharding of a model: weights over w ranks, gradients over g, masters and optimizer states over all.

FSDP2 shards over the innermost w ranks only. The optimizer receives slices of the FP32 masters as its parameters, under
the names of the model's parameters. If gradients are summed between nodes here, each rank owns one row slice. If a
method of the replicate axis exchanges between nodes, each rank owns a node slice (see `levels_hooks`). A step consists
of `before_step`, the optimizer's own step, and `after_step`.

Source: arXiv 2501.04266, Section V.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.consistency import ReplicatedTensors, check_replicas_equal
from torchtitan_scape.core.parameters import SliceParameter, plain_name, stored
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.sharding.base import (
    CollectiveHook,
    CountedAllGather,
    ShardedParamGroup,
    Sharding,
    WeightsCache,
    install,
    param_groups_of,
)
from torchtitan_scape.sharding.cost import GRADIENTS_BLOCK, WEIGHTS_BLOCK
from torchtitan_scape.sharding.levels_hooks import RowLayout, SliceReduceScatter, WeightAllGather
from torchtitan_scape.sharding.options import STEP_BLOCK, ShardingOptions
from torchtitan_scape.sharding.row_codec import RowCodec
from torchtitan_scape.sharding.zeropp import QuantizedAllGather
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import LevelGroups, ReplicaGroups
from torchtitan_scape.topology.in_process import collectives_of
from torchtitan_scape.topology.layout import Layout, RankGroup
from torchtitan_scape.topology.traffic import TrafficLedger

_DTYPES = {"int8": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}


class LevelGroup:
    """One parameter group, and the FP32 master of this rank's slice of its row.

    Args:
        layout: Layout of the row.
        parameters: Trained parameters of the model with their names.
        slice_index: Index of this rank's slice of the row.
        group_rank: Position of this rank's row among the w rows.
        reduce: Reduce-scatter hook.
        update: Updates the weights after a step.

    Attributes:
        parts: Each parameter's part of the row slice.
        master: FP32 (slice_size,).
        slices: Views of `master` as parameters of the optimizer, in the order of `parameters`.
    """

    def __init__(
        self,
        layout: RowLayout,
        parameters: Sequence[tuple[str, nn.Parameter]],
        slice_index: int,
        group_rank: int,
        reduce: SliceReduceScatter,
        update: WeightAllGather,
    ) -> None:
        self.layout, self.parameters, self.reduce, self._update = layout, parameters, reduce, update
        self.parts = layout.slices(slice_index, [weight.numel() for weight in self.weights()])
        self.master = layout.row_slice(self.weights(), self.parts)
        self.slices = [
            SliceParameter(values, tuple(parameter.shape), group_rank * size + part.start)
            for values, (_, parameter), size, part in zip(
                self.views(self.master), parameters, layout.sizes, self.parts, strict=True
            )
        ]

    def weights(self) -> list[Tensor]:
        """Return the local shards that FSDP2 stores, flat."""
        return [stored(parameter).view(-1) for _, parameter in self.parameters]

    def views(self, row_slice: Tensor) -> list[Tensor]:
        """Return each parameter's entries of a row slice (slice_size,), with the parameter's number of dimensions."""
        return [
            row_slice[part.at : part.at + part.stop - part.start].view(
                *(1,) * (parameter.ndim - 1), part.stop - part.start
            )
            for part, (_, parameter) in zip(self.parts, self.parameters, strict=True)
        ]

    def update_weights(self, applied: Tensor | None, by_values: bool = False) -> None:
        """Update the weights from the masters, as `WeightAllGather` does. Collective."""
        self._update(self.master, self.parts, self.weights(), applied, by_values)


class ThreeLevelState:
    """State of three-level sharding of a model.

    Args:
        model: The sharded model.
        groups: Parameter groups; ranks with the same weights have initialized them with the same bits.
        sharding: Hooks installed on the model.
        nodes: Rank group over which gradients are summed here; None if a method of the replicate axis exchanges them.
        weight_peers: Collectives over the ranks that hold the same weights.
        keeps_bits: The weights cannot be derived from the masters, so a checkpoint contains both.

    Attributes:
        parameters: The optimizer's parameters, with the names and in the order of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[LevelGroup],
        sharding: Sharding,
        nodes: RankGroup | None,
        weight_peers: ReplicaCollectives,
        keeps_bits: bool,
    ) -> None:
        self.groups, self.sharding, self._nodes, self._weight_peers = groups, sharding, nodes, weight_peers
        self._keeps_bits = keeps_bits
        self._model = {name: parameter for group in groups for name, parameter in group.parameters}
        by_name = {
            name: part for group in groups for (name, _), part in zip(group.parameters, group.slices, strict=True)
        }
        name_of = {id(parameter): name for name, parameter in self._model.items()}
        self.parameters = [(name := name_of[id(parameter)], by_name[name]) for parameter in model.parameters()]
        for parameter in self._model.values():
            parameter.register_post_accumulate_grad_hook(_drop)

    # ------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def before_step(self) -> None:
        """Set the gradients of the optimizer's parameters. Collective."""
        for group in self.groups:
            total = group.reduce.buffer[0] if self._nodes is None else group.reduce.across_nodes(self._nodes)
            for part, gradient in zip(group.slices, group.views(total), strict=True):
                part.grad = gradient

    @torch.no_grad()
    def after_step(self, applied: Tensor | None) -> None:
        """Update the weights, unless `applied` is false, and clear the gradients. Collective."""
        for group in self.groups:
            group.update_weights(applied)
            group.reduce.buffer.zero_()  # Also after a skipped step: the buffer may contain its NaN.
            for part in group.slices:
                part.grad = None
        self.sharding.version.changed()

    # -------------------------------------------------------------------- checkpoints and consistency

    def model_saved(self) -> dict[str, Tensor]:
        """Return the model that is saved and exported: slices of the FP32 masters, by name."""
        return {name: part.detach() for name, part in self.parameters}

    @torch.no_grad()
    def masters_loaded(self) -> None:
        """Recompute the weights from loaded masters. Collective; its bytes are not counted."""
        with self.sharding.uncounted():
            for group in self.groups:
                group.update_weights(None, by_values=True)
        self.sharding.version.changed()

    def bits(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return (parameter, FSDP2's local shard) by name if the weights cannot be derived from the masters, for
        checkpoints.
        """
        return {name: (p, stored(p)) for name, p in self._model.items()} if self._keeps_bits else {}

    def check_consistency(self, device: torch.device, step: int, repair: bool) -> None:
        """Compare the weights of all ranks that hold the same ones. Raises ReplicasDifferError as
        `check_replicas_equal` does.
        """
        if self._weight_peers.replicas == 1 or self._weight_peers.is_fake:
            return
        shared = [ReplicatedTensors(name, [(None, stored(parameter))]) for name, parameter in self._model.items()]
        if not check_replicas_equal(self._weight_peers, shared, device, step, repair):
            self.sharding.version.changed()


def _drop(parameter: Tensor) -> None:
    """Free a gradient as soon as FSDP2 has set it; the reduce-scatter hook has already added it to the buffer."""
    parameter.grad = None


def holder_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> nn.Module:
    """Return a module whose named parameters are `parameters`, for functions that expect a model."""
    root = nn.Module()
    for name, parameter in parameters:
        *path, last = name.split(".")
        owner: Any = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, parameter)
    return root


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

    Raises:
        ValueError: Rows cannot be divided evenly in BF16, or a parameter is frozen.
    """
    parameters, sharding = {plain_name(n): p for n, p in model.named_parameters()}, Sharding(groups, traffic)
    degree = groups.weights.size
    _check_parameters(parameters, degree, bf16)
    peers = ReplicaGroups(groups.weight_peers, groups.weights.process_group, options.levels.inner(layout))
    weight_peers = collectives_of(peers)
    weight_peers.broadcast_from_first([stored(parameter) for parameter in parameters.values()])
    nodes, over = (groups.nodes.size, (groups.nodes, groups.pairs)) if sums else (1, (groups.pairs,))
    slice_index = groups.pairs.group_rank * nodes + (groups.nodes.group_rank if sums else 0)
    step_code, levels = block_code(kernels, "int8", STEP_BLOCK, torch.float32), options.levels
    sum_code, update_code = (step_code if name == "int8" else None for name in (levels.sum_code, levels.update_code))
    code = next((block_code(kernels, name, GRADIENTS_BLOCK, torch.float32) for name in options.hop_codes), None)
    device, built = next(iter(parameters.values())).device, []
    for flat in param_groups_of(model):
        row = flat.reduced
        rows = RowLayout([s.size for s in row], [s.dims > 1 for s in row], options.cut_block, groups.pairs.size, nodes)
        reduce = SliceReduceScatter(flat, rows, degree, groups.gradients, code, sharding.ledger, device, sum_code)
        update = WeightAllGather(rows, over, update_code, _DTYPES[levels.update_code], sharding.ledger)
        own = [(s.name, parameters[s.name]) for s in row]
        built.append(LevelGroup(rows, own, slice_index, groups.weights.group_rank, reduce, update))
        install(flat, _gather(flat, options, groups, sharding, kernels), reduce)
        if degree == 1:  # FSDP2 then calls no reduce-scatter, only this hook.
            module: Any = flat.modules[0]
            module.set_all_reduce_hook(reduce.hook)
    if bf16:  # The masters have been initialized from the FP32 weights.
        hold_in_bfloat16(model, scaled=False)
    keeps_bits = levels.update_code == "int8"
    return ThreeLevelState(model, built, sharding, groups.nodes if sums else None, weight_peers, keeps_bits)


def _check_parameters(parameters: dict[str, nn.Parameter], degree: int, bf16: bool) -> None:
    """Raise ValueError if a parameter is frozen, or has rows that the degree does not divide in BF16."""
    if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        raise ValueError(
            f"[sharding.levels] weights = {degree}: {frozen[0]!r} is frozen, but only trained parameters have "
            "masters; train it, or omit [sharding.levels]"
        )
    for name, parameter in parameters.items() if bf16 else ():
        if len(parameter) % degree:
            raise ValueError(
                f"[sharding.levels] weights = {degree}: {name!r} has {len(parameter)} rows, which the degree does not "
                "divide, and BF16 weights need even shards; set a degree that divides the rows, or [training] "
                "mixed_precision_param = 'float32'"
            )


def _gather(
    flat: ShardedParamGroup, options: ShardingOptions, groups: LevelGroups, sharding: Sharding, kernels: str
) -> CollectiveHook:
    coded = options.weights_code != "dense"
    code = block_code(kernels, options.weights_code, WEIGHTS_BLOCK, torch.float32) if coded else None
    rows = RowCodec(flat.gathered, code)
    if options.levels.secondary:
        # With an outermost hop of one rank, the cache has this rank's own message: the partition over the w ranks.
        hops, cache = [groups.weights, RankGroup("", 1, 0)], WeightsCache(sharding.version)
        return QuantizedAllGather(flat, hops, rows, sharding.ledger, cache)
    if code is None:
        return CountedAllGather(groups.weights, sharding.ledger)
    return QuantizedAllGather(flat, [groups.weights], rows, sharding.ledger)

"""Three-level sharding of a model: weights over w ranks, gradients over g, masters and optimizer states over all.

FSDP2 shards over the innermost w ranks only. The optimizer receives slices of the FP32 masters as its parameters, under
the names of the model's parameters. If gradients are summed between nodes here, each rank owns one row slice. If a
method of the replicate axis exchanges between nodes, each rank owns a node slice (see `levels_layout`). A step consists
of `before_step`, the optimizer's own step, and `after_step`.

Source: arXiv 2501.04266, Section V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.consistency import ReplicatedTensors, check_replicas_equal
from torchtitan_scape.core.parameters import SliceParameter, stored
from torchtitan_scape.sharding.base import Sharding
from torchtitan_scape.sharding.levels_gradients import SliceReduceScatter
from torchtitan_scape.sharding.levels_layout import MasterSlice, RowLayout
from torchtitan_scape.sharding.levels_update import WeightAllGather
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.rank_group import RankGroup

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class LevelGroup:
    """One parameter group.

    Attributes:
        layout: Layout of the row.
        parameters: Trained parameters of the model with their names.
        slice_index: Index of this rank's slice of the row.
        group_rank: Position of this rank's row among the w rows.
        reduce: Reduce-scatter hook.
        update: Updates the weights after a step.
        full_update: Updates the weights by values, whatever they contained before.
    """

    layout: RowLayout
    parameters: Named
    slice_index: int
    group_rank: int
    reduce: SliceReduceScatter
    update: WeightAllGather
    full_update: WeightAllGather

    def weights(self) -> list[Tensor]:
        """Return the local shards that FSDP2 stores, flat."""
        return [stored(parameter).view(-1) for _, parameter in self.parameters]

    def slices(self) -> list[MasterSlice]:
        """Return each parameter's part of this rank's row slice."""
        return self.layout.slices(self.slice_index, [weight.numel() for weight in self.weights()])


class Master:
    """FP32 master of this rank's row slice of one parameter group.

    Attributes:
        group: The parameter group.
        parts: Each parameter's part of the row slice.
        values: FP32 (slice_size,).
        slices: Views of `values` as parameters of the optimizer, in the order of the group's parameters.
    """

    def __init__(self, group: LevelGroup) -> None:
        self.group, self.parts = group, group.slices()
        weights = group.weights()
        self.values = torch.zeros(group.layout.slice_size, dtype=torch.float32, device=weights[0].device)
        for part, weight in zip(self.parts, weights, strict=True):
            self.values[part.at : part.at + part.stop - part.start] = weight[part.start : part.stop]
        self.slices = [
            SliceParameter(values, tuple(parameter.shape), group.group_rank * size + part.start)
            for values, (_, parameter), size, part in zip(
                self.views(self.values), group.parameters, group.layout.sizes, self.parts, strict=True
            )
        ]

    def views(self, row_slice: Tensor) -> list[Tensor]:
        """Return each parameter's entries of a row slice (slice_size,), with the parameter's number of dimensions."""
        return [
            row_slice[part.at : part.at + part.stop - part.start].view(
                *(1,) * (parameter.ndim - 1), part.stop - part.start
            )
            for part, (_, parameter) in zip(self.parts, self.group.parameters, strict=True)
        ]


class ThreeLevelState:
    """State of three-level sharding of a model.

    Args:
        model: The sharded model.
        groups: Parameter groups.
        sharding: Hooks installed on the model.
        nodes: Rank group over which gradients are summed here; None if a method of the replicate axis exchanges them.
        weight_peers: Collectives over the ranks that hold the same weights.
        keeps_bits: The weights cannot be derived from the masters, so a checkpoint contains both.
        bf16: Convert FSDP2's weights to BF16. Masters are initialized from the weights before the conversion.

    Attributes:
        groups, masters: One entry per parameter group.
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
        bf16: bool,
    ) -> None:
        self.groups, self.sharding, self._nodes, self._weight_peers = groups, sharding, nodes, weight_peers
        self._keeps_bits = keeps_bits
        self._model = {name: parameter for group in groups for name, parameter in group.parameters}
        weight_peers.broadcast_from_first([stored(parameter) for parameter in self._model.values()])
        self.masters = [Master(group) for group in groups]
        if bf16:
            hold_in_bfloat16(model, scaled=False)
        by_name = {
            name: part
            for master in self.masters
            for (name, _), part in zip(master.group.parameters, master.slices, strict=True)
        }
        order = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        self.parameters = [
            (name, by_name[name]) for name in sorted(by_name, key=lambda name: order[id(self._model[name])])
        ]
        for parameter in self._model.values():
            parameter.register_post_accumulate_grad_hook(_drop)

    # ------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def before_step(self) -> None:
        """Set the gradients of the optimizer's parameters. Collective."""
        for group, master in zip(self.groups, self.masters, strict=True):
            total = group.reduce.buffer[0] if self._nodes is None else group.reduce.across_nodes(self._nodes)
            for part, gradient in zip(master.slices, master.views(total), strict=True):
                part.grad = gradient

    @torch.no_grad()
    def after_step(self, applied: Tensor | None) -> None:
        """Update the weights, unless `applied` is false, and clear the gradients. Collective."""
        for group, master in zip(self.groups, self.masters, strict=True):
            group.update(master.values, master.parts, group.weights(), applied)
            group.reduce.buffer.zero_()  # Also after a skipped step: the buffer may contain its NaN.
            for part in master.slices:
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
            for group, master in zip(self.groups, self.masters, strict=True):
                group.full_update(master.values, master.parts, group.weights(), None)
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

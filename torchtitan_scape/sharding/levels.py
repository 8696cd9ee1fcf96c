"""Three levels on a model: weights on w ranks, gradients on g, masters and the optimizer's states on all.

FSDP2 shards over the innermost w ranks and knows nothing of the rest. The optimizer gets slices of FP32 masters as its
parameters, by the names of the model's: of a sub-piece, whose gradient has been summed over all ranks, or of a piece,
where a method of the replicate axis exchanges what nodes have. A step is: `before_step`, the optimizer's own step,
`after_step`.

Source: arXiv 2501.04266, Section V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from topology.collectives import ReplicaCollectives
from topology.rank_group import RankGroup
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.consistency import ReplicatedTensors, check_replicas_equal
from torchtitan_scape.core.parameters import SliceParameter, stored
from torchtitan_scape.sharding.base import Sharding
from torchtitan_scape.sharding.levels_gradients import SliceReduceScatter
from torchtitan_scape.sharding.levels_layout import MasterSlice, RowLayout
from torchtitan_scape.sharding.levels_update import WeightAllGather

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class LevelGroup:
    """One parameter group.

    parameters: the model's, those that are trained. cut: of the row, this rank's; place: of its row among the w.
    update: brings the weights up to date after a step. whole: the same by values, whatever the weights were.
    """

    layout: RowLayout
    parameters: Named
    cut: int
    place: int
    reduce: SliceReduceScatter
    update: WeightAllGather
    whole: WeightAllGather

    def weights(self) -> list[Tensor]:
        """Flat, of what FSDP2 keeps."""
        return [stored(parameter).view(-1) for _, parameter in self.parameters]

    def slices(self) -> list[MasterSlice]:
        return self.layout.slices(self.cut, [weight.numel() for weight in self.weights()])


class Master:
    """Of one parameter group: this rank's cut in FP32, and its slices as the optimizer's parameters.

    values: (sub_piece,), of a piece where a cut is one. slices: of the parameters, in their order.
    """

    def __init__(self, group: LevelGroup) -> None:
        self.group, self.places = group, group.slices()
        weights = group.weights()
        self.values = torch.zeros(group.layout.sub_piece, dtype=torch.float32, device=weights[0].device)
        for one, weight in zip(self.places, weights, strict=True):
            self.values[one.at : one.at + one.stop - one.start] = weight[one.start : one.stop]
        self.slices = [
            SliceParameter(values, tuple(parameter.shape), group.place * size + one.start)
            for values, (_, parameter), size, one in zip(
                self.views(self.values), group.parameters, group.layout.sizes, self.places, strict=True
            )
        ]

    def views(self, of: Tensor) -> list[Tensor]:
        """Each parameter's entries in a cut (sub_piece,), with as many dimensions as the parameter."""
        return [
            of[one.at : one.at + one.stop - one.start].view(*(1,) * (parameter.ndim - 1), one.stop - one.start)
            for one, (_, parameter) in zip(self.places, self.group.parameters, strict=True)
        ]


class ThreeLevelState:
    """All groups of a model.

    Args:
        sharding: what is installed on the model.
        nodes: over which gradients are summed here; None where a method of the replicate axis does it.
        holders: the ranks that hold the same weights, as replicas.
        keeps_bits: whether weights do not follow from the masters, so that a checkpoint needs both.
        bf16: FSDP2 is to keep weights in BF16. Masters start from what was before.

    Attributes:
        groups, masters: of the parameter groups.
        parameters: of the optimizer, by the names and in the order of the model's.
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
        found = {
            name: part
            for master in self.masters
            for (name, _), part in zip(master.group.parameters, master.slices, strict=True)
        }
        order = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        self.parameters = [(name, found[name]) for name in sorted(found, key=lambda name: order[id(self._model[name])])]
        for parameter in self._model.values():
            parameter.register_post_accumulate_grad_hook(_drop)

    # ------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def before_step(self) -> None:
        """Gives the optimizer's parameters their gradients. A collective call."""
        for group, master in zip(self.groups, self.masters, strict=True):
            total = group.reduce.buffer[0] if self._nodes is None else group.reduce.across_nodes(self._nodes)
            for part, gradient in zip(master.slices, master.views(total), strict=True):
                part.grad = gradient

    @torch.no_grad()
    def after_step(self, applied: Tensor | None) -> None:
        """Brings the weights up to date, unless not `applied`, and clears the gradients. A collective call."""
        for group, master in zip(self.groups, self.masters, strict=True):
            group.update(master.values, master.places, group.weights(), applied)
            group.reduce.buffer.zero_()  # of a skipped step too: it may hold its NaN
            for part in master.slices:
                part.grad = None
        self.sharding.version.changed()

    # -------------------------------------------------------------------- checkpoints and consistency

    def model_saved(self) -> dict[str, Tensor]:
        """The model as it is saved and exported: slices of FP32 masters, by name."""
        return {name: part.detach() for name, part in self.parameters}

    @torch.no_grad()
    def masters_loaded(self) -> None:
        """Makes the weights of the masters anew. A collective call; not counted."""
        with self.sharding.uncounted():
            for group, master in zip(self.groups, self.masters, strict=True):
                group.whole(master.values, master.places, group.weights(), None)
        self.sharding.version.changed()

    def bits(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """(a parameter, what FSDP2 keeps of it), where that is no function of the masters: for a checkpoint besides."""
        return {name: (p, stored(p)) for name, p in self._model.items()} if self._keeps_bits else {}

    def check_consistency(self, device: torch.device, step: int, repair: bool) -> None:
        """Compares weights over all ranks that hold the same. Raises ReplicasDifferError as `check_replicas_equal`."""
        if self._weight_peers.replicas == 1 or self._weight_peers.is_fake:
            return
        shared = [ReplicatedTensors(name, [(None, stored(parameter))]) for name, parameter in self._model.items()]
        if not check_replicas_equal(self._weight_peers, shared, device, step, repair):
            self.sharding.version.changed()


def _drop(parameter: Tensor) -> None:
    """FSDP2 calls it as soon as it has set a gradient, which has gone into a buffer: what it holds is freed."""
    parameter.grad = None


def holder_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> nn.Module:
    """A module whose named parameters these are: for who asks a model for its own."""
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

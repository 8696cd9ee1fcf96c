"""The owners of the entries of all parameters, and the broadcast of their state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.quantized_update.layout import ExchangeGroup
from torchtitan_scape.topology.collectives import ReplicaCollectives


class Owners:
    """The slices of each shard with their owners.

    Args:
        shards: All parameters of this rank.
        groups: The division of their entries among the replicas.
        collectives: Communication with the other replicas.
        device: The device of messages.

    Attributes:
        saved: The names of the shards whose state this replica saves: those that it owns as a whole, and all divided
            ones. Simulated replicas are saved together.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[ExchangeGroup],
        collectives: ReplicaCollectives,
        device: torch.device,
    ) -> None:
        self._collectives, self._device = collectives, device
        rows = [(owner, s) for group in groups for owner, row in enumerate(group.rows) for s in row]
        self._slices = [[(owner, s) for owner, s in rows if s.tensor == i] for i in range(len(shards))]
        self.saved = {
            shard.name
            for i, shard in enumerate(shards)
            if not self.is_saved_by_owner(i) or self.of_whole(i) == collectives.replica
        }

    def of_whole(self, number: int) -> int | None:
        """Return the owner of a shard that one replica owns; None if several do."""
        owners = {owner for owner, _ in self._slices[number]}
        return owners.pop() if len(owners) == 1 else None

    def is_saved_by_owner(self, number: int) -> bool:
        """Return whether the owner alone saves the state of a shard; else all replicas must have it to save it."""
        return not self._collectives.is_simulated and self.of_whole(number) is not None

    def broadcast(self, number: int, tensor: Tensor) -> None:
        """Replace a tensor of a shard, which may be on the host, by the values of the owners. Collective.

        It has the shape of the shard, or any shape if one replica owns the whole shard.
        """
        if (owner := self.of_whole(number)) is not None:
            self._broadcast(tensor, owner)
        else:
            for owner, s in self._slices[number]:
                self._broadcast(tensor.view(-1)[s.first : s.first + s.length], owner)

    def _broadcast(self, tensor: Tensor, owner: int) -> None:
        values = tensor.to(self._device).contiguous()
        self._collectives.broadcast_from(values, owner)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

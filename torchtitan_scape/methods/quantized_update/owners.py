"""The owners of the entries of all parameters."""

from collections.abc import Sequence

from torch import Tensor

from torchtitan_scape.methods.quantized_update.layout import ExchangeGroup
from torchtitan_scape.topology.collectives import ReplicaCollectives


class Owners:
    """The slices of each shard with their owners.

    Args:
        count: Number of shards.
        groups: The division of their entries among the replicas.
        collectives: Communication with the other replicas.
    """

    def __init__(self, count: int, groups: Sequence[ExchangeGroup], collectives: ReplicaCollectives) -> None:
        self._collectives = collectives
        rows = [(owner, s) for group in groups for owner, row in enumerate(group.rows) for s in row]
        self._slices = [[(owner, s) for owner, s in rows if s.tensor == i] for i in range(count)]

    def of_whole(self, number: int) -> int:
        """Return the owner of a shard that is not divided."""
        ((owner, _),) = self._slices[number]
        return owner

    def broadcast(self, number: int, tensor: Tensor) -> None:
        """Replace a contiguous tensor of a shard's shape by the values of the owners. Collective."""
        for owner, s in self._slices[number]:
            self._collectives.broadcast_from(tensor.view(-1)[s.first : s.first + s.length], owner)

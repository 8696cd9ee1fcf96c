"""`ReplicaCollectives` without communication between replicas: bytes are counted, tensors keep their values.

It serves dry runs of many ranks in one process, and code that acts for all simulated replicas of a process at once: its
inputs have been summed already, or are equal on all replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.groups import ReplicaGroups, gather_lists
from torchtitan_scape.topology.rank_group import RankGroup


class DryRunCollectives(ReplicaCollectives):
    """`ReplicaCollectives` of this replica, where the other replicas do not exist.

    Args:
        groups: Groups of the process; `model` holds the shards. Unless `replicas` is given, the number of replicas is
            that of `levels` or of the (fake) replicate group.
        replicas: Number of replicas, each on a separate node, in one group over the network.
    """

    def __init__(self, groups: ReplicaGroups | None = None, replicas: int = 0) -> None:
        super().__init__(groups or ReplicaGroups(None, None), RankGroup("network", replicas, 0) if replicas else None)

    def _start(self, exchange: Callable[[tuple[RankGroup, ...]], None], device: torch.device) -> Handle:
        return Handle()

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        for each in (each for each in (error, carried_error) if each is not None):
            each.zero_()
        return Handle()

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        means.copy_(sent)
        if error is not None:
            error.zero_()
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        return self._all_reduce(tensor, divisor, codec, error, None)

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        if self.replica in owners:
            received.copy_(messages[owners.index(self.replica)].expand_as(received))
        return Handle()

    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        if self.replica in owners:
            gathered.copy_(message.expand_as(gathered))
        else:
            gathered.zero_()
        return Handle()

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        output.view(self.replicas, -1).copy_(input.expand(self.replicas, -1))
        return Handle()

    @property
    def peers(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_peers(self, values: Tensor) -> Tensor:
        return values.expand(self.replicas, -1)

    @property
    def _peers_by_replica(self) -> list[int]:  # type: ignore[override]
        return list(range(self.replicas))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Do nothing: the values are equal on all replicas."""

    def sum_over_replicas(self, values: Tensor) -> None:
        values.mul_(self.replicas)

    def sum_over_all(self, values: Tensor) -> Tensor:
        values = values * self.replicas
        if self.groups.model is not None:
            dist.all_reduce(values, group=self.groups.model)
        return values

    def gather_objects(self, item: Any) -> list[Any]:
        """Gather from the ranks of this replica, which exist unless the backend is fake."""
        return [item] if self.is_fake else gather_lists(self.groups.model, [item])

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return [item] * self.replicas

    @property
    def _scalars(self) -> None:
        return None

    def _minimum(self, values: Tensor) -> Tensor:
        return self._minimum_over_model(values)

    def sum_over_owners(self, value: Tensor) -> Tensor:
        return self.sum_over_model(value)

    def _gather_scalar(self, value: Tensor) -> Tensor:
        return value.expand(self.replicas)

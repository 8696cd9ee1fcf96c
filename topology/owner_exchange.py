"""The part of `ReplicaCollectives` that exchanges with single replicas, for methods in which a tensor has one owner."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.ring_bytes import gather_bytes


class OwnerExchange(ABC):
    """Reductions to some replicas, and gathers and broadcasts from them. Replicas are numbered as by `replica`."""

    levels: tuple[RankGroup, ...]
    replicas: int
    replica: int

    def send_to_owners(self, messages: Tensor, owners: Sequence[int], kind: str = "payload") -> tuple[Handle, Tensor]:
        """Start sending a message to every owner, on one level.

        Args:
            messages: uint8 (owners, bytes); unchanged until `Handle.wait`.
            owners: Replicas in increasing order.
            kind: Kind of message in the ledger.

        Returns:
            The handle, and uint8 (replicas, bytes), the messages of all replicas for this one, complete after
            `Handle.wait`; (0, bytes) if it owns none.
        """
        assert len(messages) == len(owners)
        if self.replicas == 1:
            return Handle(), messages
        (level,), size = self.levels, messages.shape[1]
        others = len(owners) - (self.replica in owners)
        self._count(kind, [(level.level, len(owners) * size, float(others * size))])
        received = messages.new_empty(self.replicas if self.replica in owners else 0, size)
        return self._send_to_owners(received, messages, owners), received

    def gather_from_owners(
        self, message: Tensor, size: int, owners: Sequence[int], kind: str = "payload"
    ) -> tuple[Handle, Tensor]:
        """Start gathering the messages of some replicas on all.

        Args:
            message: uint8 (size,), that of this replica; (0,) if it is no owner.
            size: Bytes of a message.
            owners: Replicas in increasing order; all of them if there are several levels.
            kind: Kind of message in the ledger.

        Returns:
            The handle, and uint8 (owners, size), complete after `Handle.wait`.
        """
        gathered = torch.empty(len(owners), size, dtype=torch.uint8, device=message.device)
        if len(owners) == self.replicas:
            return self.all_gather(gathered.view(-1), message, kind), gathered
        (level,) = self.levels
        passed_on = len(owners) * size * (self.replicas - 1) / self.replicas  # by each rank of a ring
        self._count(kind, [(level.level, message.numel(), passed_on)])
        return self._gather_from_owners(gathered, message, owners), gathered

    def broadcast_from(self, tensor: Tensor, replica: int, kind: str = "") -> None:
        """Broadcast the contiguous `tensor` of a replica to all, in place. Counted if it has a `kind` in the ledger."""
        if self.replicas == 1:
            return
        if kind:
            share = 1.0 / self.replicas  # of an all-gather, in which every rank broadcasts its input
            stages = gather_bytes(tensor.nbytes, self.levels)
            self._count(kind, [(level, input_bytes, share * sent) for level, input_bytes, sent in stages])
        self.broadcast(tensor, self._peers_by_replica[replica])

    @cached_property
    def _peers_by_replica(self) -> list[int]:
        """The position among `peers` of every replica: with several levels it is another one."""
        if len(self.levels) == 1:
            return list(range(self.replicas))
        found = self.gather_from_replicas(self.replica)
        return [found.index(replica) for replica in range(self.replicas)]

    @abstractmethod
    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        """Start received[r] = the message of replica r for this one; there is one level."""

    @abstractmethod
    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        """Start gathered[i] = `message` of replica owners[i], which is (0,) on replicas that own nothing."""

    # ------------------------------------------------------------------------ defined by `ReplicaCollectives`

    @abstractmethod
    def all_gather(self, output: Tensor, input: Tensor, kind: str = "mask") -> Handle: ...

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None: ...

    @abstractmethod
    def gather_from_replicas(self, item: Any) -> list[Any]: ...

    @abstractmethod
    def _count(self, kind: str, stages: Iterable[tuple[str, int, float]]) -> None: ...

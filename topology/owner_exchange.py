"""The part of `ReplicaCollectives` that exchanges with single replicas, for methods in which a tensor has one owner."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.topology.codecs import Codec, entries_together, message_bytes
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.ring_bytes import gather_bytes


class OwnerExchange(ABC):
    """Reductions to some replicas, and gathers and broadcasts from them. Replicas are numbered as by `replica`."""

    levels: tuple[RankGroup, ...]
    replicas: int
    replica: int

    def reduce_to_owners(
        self,
        rows: Tensor,
        owners: Sequence[int],
        codec: Codec | None = None,
        error: Tensor | None = None,
        kind: str = "payload",
    ) -> Handle:
        """Start computing the mean of each row on its owner: `reduce_scatter` with owners that need not be all.

        Args:
            rows: FP32 (owners, n), contiguous; n is a multiple of 4, or of the block size of the codec. Row i becomes
                its mean on replica owners[i], and undefined on the others.
            owners: Replicas in increasing order; all of them if there are several levels.
            codec, error, kind: As in `reduce_scatter`.
        """
        assert rows.shape[1] % entries_together(codec) == 0 and len(rows) == len(owners)
        if len(owners) == self.replicas:
            return self.reduce_scatter(rows.view(-1), kind, codec, None if error is None else error.view(-1))
        self._count_to_owners(message_bytes(rows.shape[1], codec), owners, kind)
        return self._reduce_to_owners(rows, owners, codec, error)

    def reduce_messages_to_owners(
        self, messages: Tensor, mean: Tensor, owners: Sequence[int], codec: Codec, kind: str = "payload"
    ) -> Handle:
        """Start `reduce_to_owners`, on one level, of rows that the caller has encoded.

        Args:
            messages: uint8 (owners, bytes), the rows; unchanged until `Handle.wait`.
            mean: FP32 (n,), receives the mean of the row that this replica owns; (0,) if it owns none.
            owners: Replicas in increasing order.
            codec: Code of the messages.
            kind: Kind of message in the ledger.
        """
        assert len(messages) == len(owners) and bool(mean.numel()) == (self.replica in owners)
        self._count_to_owners(messages.shape[1], owners, kind)
        return self._reduce_messages_to_owners(messages, mean, owners, codec)

    def _count_to_owners(self, message_size: int, owners: Sequence[int], kind: str) -> None:
        (level,) = self.levels
        others = len(owners) - (self.replica in owners)
        self._count(kind, [(level.level, len(owners) * message_size, float(others * message_size))])

    def gather_from_owners(
        self, row: Tensor, count: int, owners: Sequence[int], codec: Codec | None = None, kind: str = "payload"
    ) -> tuple[Handle, Tensor]:
        """Start gathering the rows of some replicas on all, encoded.

        Args:
            row: FP32 (count,), that of this replica; (0,) if it is no owner.
            count: Entries of a row.
            owners: As in `reduce_to_owners`.
            codec: Encodes the row; None for FP32.

        Returns:
            The handle, and uint8 (owners, bytes), complete after `Handle.wait`: messages of the codec, or FP32 bytes.
        """
        size = message_bytes(count, codec)
        message = row.new_empty(0, dtype=torch.uint8)
        if self.replica in owners:
            message = row.view(torch.uint8) if codec is None else codec.encode(row.view(1, -1)).view(-1)
        gathered = torch.empty(len(owners), size, dtype=torch.uint8, device=row.device)
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
    def _reduce_to_owners(
        self, rows: Tensor, owners: Sequence[int], codec: Codec | None, error: Tensor | None
    ) -> Handle:
        """Start row i of rows = (sum over replicas) / replicas on replica owners[i]; there is one level."""

    @abstractmethod
    def _reduce_messages_to_owners(self, messages: Tensor, mean: Tensor, owners: Sequence[int], codec: Codec) -> Handle:
        """Start mean = (sum of the decoded messages for this replica) / replicas; there is one level."""

    @abstractmethod
    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        """Start gathered[i] = `message` of replica owners[i], which is (0,) on replicas that own nothing."""

    # ------------------------------------------------------------------------ defined by `ReplicaCollectives`

    @abstractmethod
    def reduce_scatter(
        self, tensor: Tensor, kind: str = "payload", codec: Codec | None = None, error: Tensor | None = None
    ) -> Handle: ...

    @abstractmethod
    def all_gather(self, output: Tensor, input: Tensor, kind: str = "mask") -> Handle: ...

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None: ...

    @abstractmethod
    def gather_from_replicas(self, item: Any) -> list[Any]: ...

    @abstractmethod
    def _count(self, kind: str, stages: Iterable[tuple[str, int, float]]) -> None: ...

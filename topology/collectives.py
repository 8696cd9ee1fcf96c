"""What replicas say to each other: one protocol, and what its three endpoints have in common.

`process_groups` has the endpoint of a rank among ranks, `in_process` that of a replica among replicas of one process,
`dry_run` that of a run in which nothing moves. Whoever talks through `ReplicaCollectives` is written for one replica
and does not know which of them it has. Bytes are counted here, by the same arithmetic for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology import calls
from topology.chunks import ConcatSource, Source, all_reduce_chunked
from topology.codecs import Codec
from topology.comm_stream import Handle
from topology.groups import ReplicaGroups, Ring
from topology.partition import ALIGNED, CHUNK_ENTRIES
from topology.primitives import all_gather_into
from topology.ring_bytes import MessageBytes, gather_bytes, reduce_bytes, scatter_bytes
from topology.stages import replica_index
from topology.traffic import REPLICATE, SHARD, TrafficLedger


class ReplicaCollectives(ABC):
    """An endpoint: one replica's side (or one of its shards') of everything that is exchanged.

    Attributes:
        replicas, replica: how many there are, and which of them this one is.
        rings: what exchanges go over, from the inside out.
        model_ranks, model_rank: ranks that hold one replica together, and which of them this one is.
        writes: whether this replica writes what it shares with others of its process: its parameters.
        traffic: bytes of this endpoint.
    """

    is_writer = True
    label = ""  # what tells this replica's parameters from those of others, in messages
    chunk_entries = CHUNK_ENTRIES
    # Of a chunk that has a row a replica: the host fills each row on its own. With 1,024 replicas it has 256 MiB.
    min_columns = 1 << 16

    def __init__(self, groups: ReplicaGroups, ring: Ring | None = None) -> None:
        """ring: the one over which all replicas meet, where it is not the groups that say so."""
        self.groups = groups
        self.rings = (ring,) if ring else rings_of(groups)
        self.replicas, self.replica = prod(ring.size for ring in self.rings), replica_index(self.rings)
        self.model_ranks, self.model_rank = size_and_rank(groups.model)
        self.traffic = TrafficLedger()

    @property
    def is_fake(self) -> bool:
        """True in a dry run of ranks, whose collectives move nothing, so that received values mean nothing."""
        return dist.is_initialized() and dist.get_backend() == "fake"

    def run_once(self, work: Callable[[], Tensor]) -> Tensor:
        """What `work` makes of what all replicas have alike, to be read only. Of simulated ones one does it for all."""
        return work()

    # ------------------------------------------------------------------------------ the replicate axis

    def size_multiple(self, codec: Codec | None = None) -> int:
        """What the entries of an all-reduce must be a multiple of, so that every level can divide them, and every part
        of them begins at whole 16 bytes."""
        return calls.size_multiple(self.rings, None if codec is None else codec.block_size)

    def padded_size(self, entries: int, codec: Codec | None = None) -> int:
        """So many entries, and the zeros that make them a multiple of `size_multiple`."""
        return calls.padded_size(entries, self.rings, None if codec is None else codec.block_size)

    def all_reduce(
        self,
        tensor: Tensor,
        mean: bool = True,
        kind: str = "payload",
        codec: Codec | None = None,
        error: Tensor | None = None,
        carried_error: Tensor | None = None,
    ) -> Handle:
        """Starts the mean (or sum) over replicas of FP32 (n,), in place, level by level.

        n: a multiple of `size_multiple`. codec: its messages cross the outermost level, both ways; None for FP32.
        error: FP32 (n,), receives what this replica has to carry over for the coding: of the sum over replicas of
        (tensor - error) nothing is lost. None to let it go.
        carried: with a codec, FP32 (n / replicas,), of the part of the result that this replica owns, the `replica`-th:
        is added to it before it is coded, and becomes what that loses. None: this is in `error`, times the divisor.
        """
        assert carried_error is None or codec is not None
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        assert tensor.numel() % self.size_multiple(codec) == 0
        self._count(kind, reduce_bytes(tensor.numel(), self.rings, _message_bytes(codec)))
        return self._reduce(tensor, float(self.replicas) if mean else 1.0, codec, error, carried_error)

    def all_reduce_chunked(
        self, source: "Sequence[Tensor] | Source", mean: bool = True, codec: Codec | None = None
    ) -> None:
        """The mean (or sum) over replicas of FP32 entries, in place, through two buffers of `chunk_entries`.

        While one chunk is on the wire the next is filled. `source`: flat tensors, or a `Source`. codec: as of
        `all_reduce`; what it loses is let go.
        """
        pieces = ConcatSource(source) if isinstance(source, Sequence) else source
        all_reduce_chunked(self, pieces, mean, self.chunk_entries, codec)

    def reduce_scatter(
        self, tensor: Tensor, kind: str = "payload", codec: Codec | None = None, error: Tensor | None = None
    ) -> Handle:
        """Starts the mean over replicas of FP32 (n,) for the owners of its parts: of `replicas` equal ones each
        replica receives the `replica`-th, in place. The others are undefined afterwards.

        n: a multiple of `replicas` times 4, or times the codec's unit. codec, error: as of `all_reduce`; the mean
        itself is not coded.
        """
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        assert tensor.numel() % (self.replicas * _unit(codec)) == 0
        self._count(kind, scatter_bytes(tensor.numel(), self.rings, _message_bytes(codec)))
        return self._reduce_scatter(tensor, float(self.replicas), codec, error)

    def all_gather(self, output: Tensor, own: Tensor, kind: str = "mask") -> Handle:
        """Starts gathering `own` (b,) of every replica into `output` (replicas * b,), in the order of `replica`.

        b: so many as have a multiple of 16 bytes.
        """
        if self.replicas == 1:
            output.copy_(own)
            return Handle()
        assert own.nbytes % (4 * ALIGNED) == 0
        self._count(kind, gather_bytes(own.nbytes, self.rings))
        return self._gather(output, own)

    def all_gather_coded(self, own: Tensor, codec: Codec, kind: str) -> tuple[Handle, Tensor]:
        """Starts gathering the message of `own`, FP32 (m,), of every replica: (its handle, uint8 (replicas, bytes))."""
        message = codec.encode(own.view(1, -1)).view(-1)
        messages = torch.empty(self.replicas, message.numel(), dtype=torch.uint8, device=own.device)
        return self.all_gather(messages.view(-1), message, kind), messages

    def all_reduce_or(self, bits: Tensor, kind: str = "mask") -> Handle:
        """Starts the union over replicas of packed bits, uint8 (b,), in place, level by level.

        b: a multiple of 16 * replicas. It sends what an all-reduce of b / 4 FP32 entries does.
        """
        if self.replicas == 1 or bits.numel() == 0:
            return Handle()
        assert bits.numel() % (4 * ALIGNED * self.replicas) == 0
        self._count(kind, reduce_bytes(bits.numel() // 4, self.rings))
        return self._union(bits)

    def reduced_bytes(self, entries: int, codec: Codec | None = None) -> float:
        """Bytes that this rank sends in an all-reduce of FP32 `entries`."""
        if self.replicas == 1:
            return 0.0
        return sum(sent for _, _, sent in reduce_bytes(entries, self.rings, _message_bytes(codec)))

    def scattered_bytes(self, entries: int, codec: Codec | None = None) -> float:
        """The same in a reduce-scatter."""
        return sum(sent for _, _, sent in scatter_bytes(entries, self.rings, _message_bytes(codec)))

    def gathered_bytes(self, own: int) -> float:
        """Bytes that this rank sends in an all-gather to which it brings `own` bytes."""
        return sum(sent for _, _, sent in gather_bytes(own, self.rings))

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives every replica the values of replica 0, in place; not counted, it happens once."""
        for tensor in tensors if self.replicas > 1 else ():
            values = tensor if tensor.is_contiguous() else tensor.contiguous()
            self.broadcast(values, 0)
            if values is not tensor:
                tensor.copy_(values)

    @abstractmethod
    def _reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        """tensor = (sum over replicas) / divisor."""

    @abstractmethod
    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        """This replica's part of tensor = (sum over replicas) / divisor."""

    @abstractmethod
    def _gather(self, output: Tensor, own: Tensor) -> Handle:
        """output = `own` of all replicas."""

    @abstractmethod
    def _union(self, bits: Tensor) -> Handle:
        """bits = what any replica has set."""

    # ------------------------------------------------- whether replicas are what they should be; not counted

    @property
    @abstractmethod
    def peers(self) -> tuple[list[int], int]:
        """(ranks that hold the same parameters, which of them this one is), in the order of the replicate group."""

    @abstractmethod
    def gather_from_peers(self, values: Tensor) -> Tensor:
        """`values` (n,) of all `peers`, (replicas, n): a few numbers, now and then."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives all `peers` the contiguous `tensor` of the `source`-th of them, in place."""

    @abstractmethod
    def sum_over_replicas(self, values: Tensor) -> None:
        """The sum of `values`, of any dtype, over the replicas, in place; for checkpoints."""

    @abstractmethod
    def sum_over_all(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks of all replicas, for reports."""

    @abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """Every rank's `item`, for set-up and for error messages."""

    @abstractmethod
    def gather_from_replicas(self, item: Any) -> list[Any]:
        """The `item` of every one of the `peers`, in their order; for set-up."""

    # ------------------------------------------------------------------------- scalars, over all axes

    @abstractmethod
    def all_true(self, flag: Tensor) -> Tensor:
        """bool, of the shape of `flag`: whether it is true on every rank of every replica, entry by entry."""

    @abstractmethod
    def sum_over_owners(self, value: Tensor) -> Tensor:
        """FP32 (): the sum over all ranks: of a replica, then over the replicas.

        All have the same summands and add them alike, in FP64, which gives all the same bits.
        """

    def sum_over_model(self, value: Tensor) -> Tensor:
        """FP32 (): the sum over the ranks of this replica, added in rank order.

        An all-reduce may add in another order in each node; this sum is the same to the last bit on every
        replica.
        """
        group = self.groups.model
        if group is None:
            return value
        values = gathered_scalars(value, group)
        self._count_scalar(SHARD, group, "norm", value.nbytes, float(group.size() - 1))
        total = values[0]
        for i in range(1, group.size()):
            total = total + values[i]
        return total

    def _true_in_model(self, flag: Tensor) -> Tensor:
        """FP32 of the shape of `flag`: 1 where it is true on all ranks of this replica. Not counted."""
        value = flag.float()
        if self.groups.model is not None:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=self.groups.model)
        return value

    def _count_flag(self, value: Tensor) -> None:
        """Of the ranks of this replica."""
        group = self.groups.model
        if group is not None:
            self._count_scalar(SHARD, group, "flag", value.nbytes, 2.0 * (group.size() - 1) / group.size())

    def _count(self, kind: str, stages: Iterable[tuple[str, int, float]]) -> None:
        for level, input_bytes, sent in stages:
            self.traffic.add(REPLICATE, level, kind, input_bytes, sent)

    def _count_scalar(self, axis: str, group: ProcessGroup, kind: str, input_bytes: int, factor: float) -> None:
        self.traffic.add(axis, own_level(self.groups, group), kind, input_bytes, factor * input_bytes)


def _unit(codec: Codec | None) -> int:
    """Entries that no part may divide."""
    return ALIGNED if codec is None else codec.block_size


def _message_bytes(codec: Codec | None) -> MessageBytes | None:
    return None if codec is None else codec.message_bytes


def gathered_scalars(value: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's scalar, in rank order."""
    values = torch.empty(group.size(), dtype=value.dtype, device=value.device)
    all_gather_into(values, value.view(1), group=group)
    return values


def size_and_rank(group: ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def rings_of(groups: ReplicaGroups) -> tuple[Ring, ...]:
    """What exchanges go over: the groups' own rings, else one over all replicas; none for a single one."""
    if groups.rings or groups.replicate is None:
        return groups.rings
    return (Ring(own_level(groups, groups.replicate), *size_and_rank(groups.replicate)),)


def own_level(groups: ReplicaGroups, group: ProcessGroup) -> str:
    """The level of the link from this rank to its successor in the ring of `group`."""
    if groups.layout is None:
        return "network"
    return groups.layout.ring_level(dist.get_rank(), tuple(dist.get_process_group_ranks(group)))


def objects_of(group: ProcessGroup | None, items: list[Any]) -> list[Any]:
    """The items of all ranks of the group, in one list."""
    if group is None:
        return items
    lists: list[Any] = [None] * group.size()
    dist.all_gather_object(lists, items, group=group)
    return [item for entries in lists for item in entries]

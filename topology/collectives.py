"""Communication between replicas on process groups: the interface that methods use.

Code that uses `ReplicaCollectives` is written for one replica. It also works with the two subclasses in
`topology.in_process`: simulated replicas of one process, and a dry run without communication. Bytes are counted here,
with the same formulas for all three. The methods that begin with an underscore run the exchanges of `topology.stages`;
the subclasses replace those that they run in another way.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology import stages, traffic
from torchtitan_scape.topology.chunks import ConcatSource, Source, exchange_chunked
from torchtitan_scape.topology.groups import ReplicaGroups, gather_lists, gather_scalars, size_and_rank
from torchtitan_scape.topology.layout import RankGroup, partners, replica_index
from torchtitan_scape.topology.partition import ALIGNED_BYTES, CHUNK_ENTRIES, chunk_limit
from torchtitan_scape.topology.stages import (
    Codec,
    CommStream,
    Handle,
    divide_,
    entries_together,
    message_size,
    start_pair_mean,
)
from torchtitan_scape.topology.torch_version import all_gather_into, all_reduce_tensors, reduce_scatter_into
from torchtitan_scape.topology.traffic import (
    REPLICATE,
    SHARD,
    Stage,
    TrafficLedger,
    all_gather_stages,
    all_reduce_stages,
    pair_mean_stages,
    reduce_scatter_stages,
)

PAYLOAD = "payload"  # kind of a message in the ledger

T = TypeVar("T")


class ReplicaCollectives:
    """Endpoint of one replica (or of one of its shards) for all communication between replicas.

    Args:
        replicas: `ReplicaGroups`, or the process group of the ranks that hold the same parameters, or None for one
            replica.
        model: Group of the shards of one replica, if `replicas` is a process group and parameters are DTensors.
        level: The group of all replicas, if it is not determined by `replicas`.

    Raises:
        ValueError: Two ranks of `replicas` hold different shards of one replica.

    Attributes:
        levels: Groups of a hierarchical exchange, innermost first; () for one replica.
        replicas, replica: Number of replicas, and the index of this one.
        model_ranks, model_rank: Number of ranks that together hold one replica, and the index of this one.
        is_writer: True if this replica updates the state that it shares with other replicas of its process.
        label: Suffix that identifies the replica's parameters in messages; "" for real replicas.
        ledger: Bytes that this endpoint sent.
        chunk_entries: Maximum entries of a chunk; 0 for those of `topology.partition.chunk_limit`.
        min_columns: Minimum row length of chunks with one row per replica, which the host fills row by row. With 1,024
            replicas such a chunk has 256 MiB.
    """

    is_writer = True
    label = ""
    chunk_entries = 0
    min_columns = 1 << 16

    def __init__(
        self,
        replicas: ProcessGroup | ReplicaGroups | None,
        model: ProcessGroup | None = None,
        level: RankGroup | None = None,
    ) -> None:
        groups = replicas if isinstance(replicas, ReplicaGroups) else ReplicaGroups(replicas, model)
        _check_disjoint(groups)
        self.groups = groups
        self.levels = (level,) if level else groups.all_levels()
        self.replicas, self.replica = prod(each.size for each in self.levels), replica_index(self.levels)
        self.model_ranks, self.model_rank = size_and_rank(groups.model)
        self.ledger = TrafficLedger()
        self._comm_streams = [CommStream() for _ in groups.comm_streams]
        self._next_stream = 0

    @property
    def is_fake(self) -> bool:
        """True if the backend is fake: collectives then move nothing, and received values are meaningless."""
        return dist.is_initialized() and dist.get_backend() == "fake"

    def write_once(self, outputs: Sequence[Tensor], function: Callable[[Sequence[Tensor]], None]) -> None:
        """Write a function of replicated data to tensors; the function is evaluated once per process."""
        function(outputs)

    # ------------------------------------------------------------------------------ the replicate axis

    def size_multiple(self, codec: Codec | None = None) -> int:
        """Return the number that the size of an all-reduce must be a multiple of.

        Every level can then divide the tensor into equal slices that are aligned to 16 bytes.
        """
        return traffic.size_multiple(self.levels, None if codec is None else codec.block_size)

    def padded_size(self, count: int, codec: Codec | None = None) -> int:
        """Return `count`, rounded up to a multiple of `size_multiple`."""
        return traffic.padded_size(count, self.levels, None if codec is None else codec.block_size)

    def chunk_limit(self, entries: int, codec: Codec | None = None, in_place: bool = False) -> int:
        """Return the maximum entries of a chunk of an exchange; see `topology.partition.chunk_limit`."""
        return self.chunk_entries or chunk_limit(entries, self.replicas, message_size(codec), in_place)

    def all_reduce(
        self,
        tensor: Tensor,
        mean: bool = True,
        codec: Codec | None = None,
        error: Tensor | None = None,
        carried_error: Tensor | None = None,
    ) -> Handle:
        """Start an all-reduce over the replicas, in place, level by level.

        Args:
            tensor: FP32 (n,); n is a multiple of `size_multiple(codec)`.
            mean: Compute the mean; otherwise the sum.
            codec: Encodes the messages of the outermost level in both directions; None for FP32.
            error: FP32 (n,), receives the quantization error that this replica has to feed back: summed over replicas,
                (tensor - error) is transmitted exactly. None to discard it.
            carried_error: With a codec, FP32 (n / replicas,), of slice `replica` of the result. It is added to the
                slice before it is encoded, and becomes the quantization error of the slice. If None, that error is
                added to `error`, multiplied by the number of replicas.
        """
        assert carried_error is None or codec is not None
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        assert tensor.numel() % self.size_multiple(codec) == 0
        self._count(PAYLOAD, all_reduce_stages(tensor.numel(), self.levels, message_size(codec)))
        return self._all_reduce(tensor, float(self.replicas) if mean else 1.0, codec, error, carried_error)

    def reduces_together(self, device: torch.device) -> bool:
        """Return whether `all_reduce_together` is available for tensors on this device."""
        if self.groups.replicate is None or self.is_fake:
            return False
        return len(self.levels) == 1 and device.type == "cuda"  # gloo would copy them into a buffer of their size

    def all_reduce_together(self, tensors: Sequence[Tensor], mean: bool = True) -> Handle:
        """Start an all-reduce of several FP32 tensors over the replicas, in place and without a buffer, in one call."""
        if self.replicas == 1 or not tensors:
            return Handle()
        self._count(PAYLOAD, all_reduce_stages(sum(tensor.numel() for tensor in tensors), self.levels))
        return self._all_reduce_together(list(tensors), mean)

    def all_reduce_messages(
        self,
        sent: Tensor,
        means: Tensor,
        count: int,
        codec: Codec,
        error: Tensor | None = None,
        adds_error: bool = False,
        kind: str = PAYLOAD,
    ) -> Handle:
        """Start an all-reduce over the replicas, which are on one level, of values that the caller has encoded.

        Args:
            sent: uint8 (replicas, message bytes), slice i of the values for replica i; unchanged until `Handle.wait`.
            means: uint8 (replicas, message bytes), receives the encoded mean of every slice.
            count: FP32 entries of a slice.
            codec: Code of the messages.
            error: FP32 (count,), becomes the quantization error of the mean of slice `replica`.
            adds_error: Add `error` to that mean before it is encoded.
            kind: Kind of message in the ledger.
        """
        assert len(self.levels) == 1 and sent.shape == means.shape
        self._count(kind, all_reduce_stages(self.replicas * count, self.levels, codec.message_bytes))
        return self._all_reduce_messages(sent, means, count, codec, error, adds_error)

    def all_reduce_chunked(
        self,
        source: "Sequence[Tensor] | Source",
        mean: bool = True,
        codec: Codec | None = None,
        chunk_entries: int = 0,
    ) -> None:
        """All-reduce FP32 entries over the replicas, in place, through two buffers of `chunk_limit` entries.

        One chunk is filled while the previous one is in flight. Quantization errors are discarded.

        Args:
            source: Flat FP32 tensors, or a `Source`.
            mean: Compute the mean; otherwise the sum.
            codec: As in `all_reduce`.
            chunk_entries: Entries of a chunk if they are more than `chunk_limit`, unless the user has set their number.
        """
        if self.replicas == 1:
            return
        entries = ConcatSource(source) if isinstance(source, Sequence) else source
        limit = self.chunk_limit(entries.entries, codec)
        if not self.chunk_entries:
            limit = max(limit, chunk_entries)
        exchange_chunked(self, entries, limit, lambda buffer: self.all_reduce(buffer, mean, codec=codec), codec)

    def pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        """Start the mean over pairs of replicas that are drawn at random, in place.

        With several levels the replicas of a node, or of another unit of the outermost level, are averaged as well, and
        units form the pairs. A unit without a partner is averaged alone. The result is bitwise equal on all replicas of
        a pair.

        Args:
            tensor: FP32 (n,); n is a multiple of `size_multiple()`.
            draw: Number that determines the pairs, see `topology.layout.partners`; equal on all replicas.
        """
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        assert tensor.numel() % self.size_multiple() == 0
        outermost, partner = self.levels[-1], self.partner(draw)
        if partner is not None and outermost.link_levels:  # a ring's next rank may be on another link
            outermost = replace(outermost, level=outermost.link_levels[partner])
        self._count(
            PAYLOAD, pair_mean_stages(tensor.numel(), (*self.levels[:-1], outermost), float(partner is not None))
        )
        return self._pair_mean(tensor, draw)

    def partner(self, draw: int) -> int | None:
        """Return the position of this replica's partner on the outermost level; None if it has no partner."""
        return partners(self.levels[-1].size, draw)[self.levels[-1].group_rank] if self.levels else None

    def pair_mean_chunked(self, source: Source, draw: int) -> None:
        """Average FP32 entries over pairs as `pair_mean`, in place, through two buffers of at most 16 MiB.

        A single replica receives its own entries.
        """
        exchange_chunked(self, source, self.chunk_entries or CHUNK_ENTRIES, lambda buffer: self.pair_mean(buffer, draw))

    def reduce_scatter(self, tensor: Tensor, codec: Codec | None = None, error: Tensor | None = None) -> Handle:
        """Start a reduce-scatter over the replicas: slice `replica` of `replicas` equal slices becomes its mean.

        The other slices become undefined.

        Args:
            tensor: FP32 (n,); n is a multiple of `replicas` times 4, or times the block size of the codec.
            codec: Encodes the messages of the outermost level; the mean is not encoded. None for FP32.
            error: FP32 (n,), receives the quantization error; None to discard it.
        """
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        assert tensor.numel() % (self.replicas * entries_together(codec)) == 0
        self._count(PAYLOAD, reduce_scatter_stages(tensor.numel(), self.levels, message_size(codec)))
        return self._reduce_scatter(tensor, float(self.replicas), codec, error)

    def all_gather(self, output: Tensor, input: Tensor, kind: str = "mask") -> Handle:
        """Start an all-gather of `input` (b,) into `output` (replicas * b,), in replica order.

        `input` must have a multiple of 16 bytes. kind: kind of message in the ledger.
        """
        if self.replicas == 1:
            output.copy_(input)
            return Handle()
        assert input.nbytes % ALIGNED_BYTES == 0
        self._count(kind, all_gather_stages(input.nbytes, self.levels))
        return self._all_gather(output, input)

    def all_reduce_or(self, bits: Tensor, kind: str = "mask") -> Handle:
        """Start a bitwise OR of packed bits, uint8 (b,), over the replicas, in place, level by level.

        b: a multiple of 16 * replicas. It sends as many bytes as an all-reduce of b / 4 FP32 entries.
        """
        if self.replicas == 1 or bits.numel() == 0:
            return Handle()
        assert bits.numel() % (ALIGNED_BYTES * self.replicas) == 0
        self._count(kind, all_reduce_stages(bits.numel() // 4, self.levels))
        return self._all_reduce_or(bits)

    def reduced_bytes(self, count: int, codec: Codec | None = None) -> float:
        """Return the bytes that this rank sends in an all-reduce of `count` FP32 entries."""
        return sum(stage.sent for stage in all_reduce_stages(count, self.levels, message_size(codec)))

    def gathered_bytes(self, input_bytes: int) -> float:
        """Return the bytes that this rank sends in an all-gather of `input_bytes` per rank."""
        return sum(stage.sent for stage in all_gather_stages(input_bytes, self.levels))

    def send_to_owners(self, messages: Tensor, owners: Sequence[int], kind: str = PAYLOAD) -> tuple[Handle, Tensor]:
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
        self._count(kind, [Stage(level.level, others, float(others * size), len(owners) * size)])
        received = messages.new_empty(self.replicas if self.replica in owners else 0, size)
        return self._send_to_owners(received, messages, owners), received

    def gather_from_owners(
        self, message: Tensor, size: int, owners: Sequence[int], kind: str = PAYLOAD
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
        self._count(kind, [Stage(level.level, self.replicas - 1, passed_on, message.numel())])
        return self._gather_from_owners(gathered, message, owners), gathered

    def broadcast_from(self, tensor: Tensor, replica: int, kind: str = "") -> None:
        """Broadcast the contiguous `tensor` of a replica to all, in place. Counted if it has a `kind` in the ledger."""
        if self.replicas == 1:
            return
        if kind:
            share = 1.0 / self.replicas  # of an all-gather, in which every rank broadcasts its input
            gather = all_gather_stages(tensor.nbytes, self.levels)
            self._count(kind, [replace(stage, sent=share * stage.sent) for stage in gather])
        self.broadcast(tensor, self._peers_by_replica[replica])

    @cached_property
    def _peers_by_replica(self) -> list[int]:
        """The position among `peers` of every replica: with several levels it is another one."""
        if len(self.levels) == 1:
            return list(range(self.replicas))
        by_peer = self.gather_from_replicas(self.replica)
        return [by_peer.index(replica) for replica in range(self.replicas)]

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors of replica 0 to all replicas, in place. Not counted: it happens once per run."""
        for tensor in tensors if self.replicas > 1 else ():
            values = tensor if tensor.is_contiguous() else tensor.contiguous()
            self.broadcast(values, 0)
            if values is not tensor:
                tensor.copy_(values)

    # ------------------------------------------------------------------- exchanges, without counting

    def _start(self, exchange: Callable[[tuple[RankGroup, ...]], None], device: torch.device) -> Handle:
        """Run `exchange(levels)` on the next stream, or in the calling thread if there are no streams."""
        if not self._comm_streams:
            exchange((self._level,))
            return Handle()
        stream, levels = self._comm_streams[self._next_stream], self.groups.comm_streams[self._next_stream]
        self._next_stream = (self._next_stream + 1) % len(self._comm_streams)
        return stream.start(lambda: exchange(levels), device)

    @property
    def _level(self) -> RankGroup:
        """The only level, on the group of the replicas."""
        (level,) = self.levels
        return replace(level, process_group=self.groups.replicate)

    # On one level, FP32 exchanges are single collectives, which need no stream.

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        if codec is None and len(self.levels) == 1:
            work = dist.all_reduce(tensor, group=self.groups.replicate, async_op=True)
            return Handle(work.wait, partial(divide_, tensor, divisor))  # gloo has no ReduceOp.AVG

        def exchange(levels: tuple[RankGroup, ...]) -> None:
            if codec is None:
                stages.all_reduce_(tensor, levels, divisor)
            else:
                stages.all_reduce_encoded(tensor, levels, divisor, codec, error, carried_error)

        return self._start(exchange, tensor.device)

    def _all_reduce_together(self, tensors: list[Tensor], mean: bool) -> Handle:
        return Handle(all_reduce_tensors(tensors, mean, self.groups.replicate))

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        def exchange(levels: tuple[RankGroup, ...]) -> None:
            divisor = float(self.replicas)
            stages.all_reduce_messages(sent, means, count, levels[0], divisor, codec, error, adds_error)

        return self._start(exchange, sent.device)

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        if codec is None and len(self.levels) == 1:
            own, group = tensor.view(self.replicas, -1)[self.replica], self.groups.replicate
            if tensor.is_cuda:
                work = reduce_scatter_into(own, tensor, group=group, async_op=True)
                return Handle(work.wait, partial(divide_, own, divisor))
            parts = torch.empty_like(tensor)  # gloo: an all-to-all moves fewer bytes, see `topology.stages`
            work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
            return Handle(work.wait, lambda: divide_(torch.sum(parts.view(self.replicas, -1), 0, out=own), divisor))
        return self._start(lambda levels: stages.reduce_scatter_(tensor, levels, divisor, codec, error), tensor.device)

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        return self._start(lambda levels: stages.send_to_owners(received, messages, owners, levels[0]), messages.device)

    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        return self._start(
            lambda levels: stages.gather_from_owners(gathered, message, owners, levels[0]), gathered.device
        )

    def _pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        partner = self.partner(draw)
        if len(self.levels) == 1:
            return start_pair_mean(tensor, self._level, partner)
        return self._start(lambda levels: stages.pair_mean_(tensor, levels, partner), tensor.device)

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        if len(self.levels) == 1:
            return Handle(all_gather_into(output, input, group=self.groups.replicate, async_op=True).wait)
        return self._start(lambda levels: stages.all_gather_(output, input, levels), output.device)

    def _all_reduce_or(self, bits: Tensor) -> Handle:
        return self._start(lambda levels: stages.all_reduce_or_(bits, levels), bits.device)

    # ---------------------------------------------------- set-up, checks, reports and checkpoints; not counted

    @property
    def peers(self) -> tuple[list[int], int]:
        """(ranks that hold the same parameters, in the order of the replicate group; index of this rank)."""
        group = self.groups.replicate
        if group is None:
            return [dist.get_rank() if dist.is_initialized() else 0], 0
        return dist.get_process_group_ranks(group), group.rank()

    def gather_from_peers(self, values: Tensor) -> Tensor:
        """Gather `values` (n,) of all `peers` as (replicas, n). For small tensors that are compared occasionally."""
        if self.groups.replicate is None:
            return values[None]
        gathered = torch.empty(self.replicas * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_into(gathered, values, group=self.groups.replicate)
        return gathered.view(self.replicas, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast the contiguous `tensor` of peer number `source` to all `peers`, in place."""
        if self.groups.replicate is not None:
            dist.broadcast(tensor, dist.get_process_group_ranks(self.groups.replicate)[source], self.groups.replicate)

    def sum_over_replicas(self, values: Tensor) -> None:
        """Sum `values`, of any dtype, over the replicas, in place. For checkpoints."""
        if self.groups.replicate is not None:
            dist.all_reduce(values, group=self.groups.replicate)

    def sum_over_all(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks of all replicas. For reports."""
        values = values.clone()
        for group in (self.groups.model, self.groups.replicate):
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

    def gather_objects(self, item: Any) -> list[Any]:
        """Gather the `item` of every rank of every replica. For set-up and error messages."""
        return gather_lists(self.groups.replicate, gather_lists(self.groups.model, [item]))

    def gather_from_replicas(self, item: Any) -> list[Any]:
        """Gather the `item` of all `peers`, in their order. For set-up."""
        return gather_lists(self.groups.replicate, [item])

    # ----------------------------------------------------------------------- scalars, over all axes; counted

    def minimum_over_all(self, values: Tensor) -> Tensor:
        """Return the smallest of each entry over every rank of every replica, FP32 of the shape of `values`."""
        smallest = self._minimum(values)
        for axis, ranks in ((SHARD, self.model_ranks), (REPLICATE, self.replicas)):
            self._count_scalar(axis, "flag", smallest.nbytes, 2.0 * (ranks - 1) / ranks)
        return smallest

    def _minimum(self, values: Tensor) -> Tensor:
        smallest = self._minimum_over_model(values)
        if self._scalars is not None:
            dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._scalars)
        return smallest

    def sum_over_owners(self, value: Tensor) -> Tensor:
        """Return the sum of an FP32 () value over all ranks of all replicas, bitwise equal on all of them.

        The ranks of a replica are added in rank order, then the replicas in FP64.
        """
        own = self.sum_over_model(value)
        if self.replicas == 1:
            return own
        self._count_scalar(REPLICATE, "norm", own.nbytes, float(self.replicas - 1))
        return self._gather_scalar(own).double().sum().to(own.dtype)

    def _gather_scalar(self, value: Tensor) -> Tensor:
        """Gather a () value of all replicas as (replicas,)."""
        assert self._scalars is not None
        return gather_scalars(value, self._scalars)

    def sum_over_model(self, value: Tensor) -> Tensor:
        """Return the sum of an FP32 () value over the ranks of this replica.

        Ranks are added in rank order. An all-reduce may use a different order on each node; this sum is bitwise equal
        on every replica.
        """
        group = self.groups.model
        if group is None:
            return value
        values = gather_scalars(value, group)
        self._count_scalar(SHARD, "norm", value.nbytes, float(self.model_ranks - 1))
        total = values[0]
        for i in range(1, group.size()):
            total = total + values[i]
        return total

    def gather_from_stages(self, item: Any) -> tuple[list[Any], int]:
        """Return (the `item` of every pipeline stage, from the ranks with this rank's other coordinates; own stage).

        ([item], 0) without a pipeline, and in a dry run. For set-up; not counted.
        """
        layout = self.groups.layout
        if layout is None or layout.pipeline == 1 or self.is_fake:
            return [item], 0
        rank, by_stage = dist.get_rank(), dict[int, Any]()
        own = layout.coordinates(rank)
        for other, value in gather_lists(self.groups.model, [(rank, item)]):
            place = layout.coordinates(other)
            if place | {"pipeline": own["pipeline"]} == own:
                by_stage[place["pipeline"]] = value
        return [by_stage[stage] for stage in range(layout.pipeline)], own["pipeline"]

    def _minimum_over_model(self, values: Tensor) -> Tensor:
        """Return the smallest of each entry over the ranks of this replica, FP32, not `values` itself. Not counted."""
        value = values.to(torch.float32, copy=True)
        if self.groups.model is not None:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=self.groups.model)
        return value

    def _count(self, kind: str, counted: Iterable[Stage]) -> None:
        for stage in counted:
            self.ledger.add(REPLICATE, stage.level, kind, stage.input_bytes, stage.sent)

    def _count_scalar(self, axis: str, kind: str, input_bytes: int, factor: float) -> None:
        group = self.groups.model if axis == SHARD else self._scalars
        if group is not None:
            self.ledger.add(axis, self.groups.successor_level(group), kind, input_bytes, factor * input_bytes)
        elif axis == REPLICATE and self.replicas > 1:
            self.ledger.add(axis, self.levels[-1].level, kind, input_bytes, factor * input_bytes)

    @property
    def _scalars(self) -> ProcessGroup | None:
        """Group of flags and norms; None without other replicas in other processes."""
        return self.groups.scalars or self.groups.replicate


class OneReplica:
    """The single replica of this process, with the interface of `SimulatedReplicas`."""

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self.endpoints, self.all = [collectives], collectives

    def run(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]


def _check_disjoint(groups: ReplicaGroups) -> None:
    """Check that no other rank is both a peer, which holds the same shard, and a rank of the same replica."""
    if groups.replicate is None or groups.model is None:
        return
    common = set(dist.get_process_group_ranks(groups.replicate)) & set(dist.get_process_group_ranks(groups.model))
    if len(common) > 1:
        raise ValueError(
            f"ranks {sorted(common)} are given as replicas of each other, but hold different shards of one replica; "
            "`replicas` must be the ranks that hold the same shard, such as the replicate axis of a 2-D mesh"
        )

"""Collectives over the replicas as data, which a method plans and the planner prices. Plain arithmetic: no torch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torchtitan_scape.topology.pairs import paired_share
from torchtitan_scape.topology.partition import ALIGNED_BYTES, CHUNK_ENTRIES, chunk_limit, chunk_sizes
from torchtitan_scape.topology.ring_bytes import (
    Levels,
    MessageBytes,
    Stage,
    all_gather_stages,
    all_reduce_stages,
    pair_mean_stages,
    reduce_scatter_stages,
    spanned,
)


@dataclass(frozen=True)
class CollectiveCall:
    """One collective over the replicas.

    The method plans it, the planner prices it, and the contract test compares it with the byte ledger. A collective
    whose data travel in several chunks, of which one is in flight while the next is filled, is a single call; the
    latency of every chunk is priced.

    Attributes:
        kind: The collective.
        count: FP32 elements of a reduction, padding included; bytes per rank of an all-gather.
        message_bytes: Encoded size of n elements on the outermost level; None for FP32.
        share: Fraction of the steps that contain the call.
        hidden: The call overlaps with the next forward and backward pass.
        chunks: Number of chunks, each a collective of its own; 0 for one that the caller may divide.
        largest_chunk: FP32 elements of the largest chunk, padding included.
        active: Fraction of the replicas that receive a share of a reduction, or whose input an all-gather broadcasts; 1
            unless shares differ. Bytes are averaged over replicas.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "pair_mean"]
    count: int
    message_bytes: Callable[[int], int] | None = None
    share: float = 1.0
    hidden: bool = False
    chunks: int = 0
    largest_chunk: int = 0
    active: float = 1.0

    def slowest_stages(self, levels: Levels) -> list[Stage]:
        """Return `stages` of the replicas that send or receive most, which determine the time.

        A replica that receives a share of a reduction receives it from all others. Broadcasts load all equally.
        """
        call = self if self.kind == "all_gather" else replace(self, active=1.0)
        return call.stages(levels)

    def stages(self, levels: Levels) -> list[Stage]:
        """Return the stages of the call on each level, averaged over steps and replicas.

        levels: Levels that the replicas span, innermost first. Levels of one rank send nothing.
        """
        levels = spanned(levels)
        if not self.count or not levels:
            return []
        match self.kind:
            case "all_reduce":
                stages = all_reduce_stages(self.count, levels, self.message_bytes)
            case "reduce_scatter":
                stages = reduce_scatter_stages(self.count, levels, self.message_bytes)
            case "all_gather":
                stages = all_gather_stages(self.count, levels)
            case "pair_mean":
                stages = pair_mean_stages(self.count, levels, paired_share(levels[-1].size))
        rounds, sent = self.share * max(1, self.chunks), self.share * self.active
        return [replace(stage, rounds=rounds * stage.rounds, sent=sent * stage.sent) for stage in stages]

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensor that this rank passes to the collective; FP32 for a reduction."""
        return self.count if self.kind == "all_gather" else 4 * self.count


@dataclass(frozen=True)
class ChunkedMessages:
    """Encoded size of a share of a collective whose elements travel in several chunks.

    Chunks are padded separately, so that their messages are longer than one message of all elements.

    Attributes:
        message_bytes: Encoded size of n elements of one chunk.
        chunks: (elements of a chunk, number of such chunks).
    """

    message_bytes: Callable[[int], int]
    chunks: tuple[tuple[int, int], ...]

    def __call__(self, count: int) -> int:
        total = sum(size * times for size, times in self.chunks)
        return sum(times * self.message_bytes(size * count // total) for size, times in self.chunks)


def replicas_of(levels: Levels) -> int:
    """Return the number of replicas that the levels span."""
    return prod(one.size for one in levels)


def size_multiple(levels: Levels, block_size: int | None = None) -> int:
    """Return the number of which the size of an all-reduce must be a multiple.

    Every level can then divide the tensor, and every share of it begins at a multiple of 16 bytes.

    Args:
        levels: Levels that the replicas span, innermost first.
        block_size: Elements that the codec encodes together; None for FP32.
    """
    replicas, step = replicas_of(levels), ALIGNED_BYTES // 4 if block_size is None else block_size
    if replicas == 1:
        return 1
    return step if len(levels) < 2 and block_size is None else replicas * step


def padded_size(count: int, levels: Levels, block_size: int | None = None) -> int:
    """Return `count` rounded up to a multiple of `size_multiple`."""
    step = size_multiple(levels, block_size)
    return -(-count // step) * step


def chunked_size(count: int, levels: Levels, chunk_entries: int) -> int:
    """Return the FP32 elements that `ReplicaCollectives.all_reduce_chunked` sends: each chunk is padded."""
    full, rest = divmod(count, chunk_entries)
    return full * padded_size(chunk_entries, levels) + padded_size(rest, levels)


def all_reduce_chunked(entries: int, levels: Levels, chunk_entries: int = 0, share: float = 1.0) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.all_reduce_chunked` on FP32 entries."""
    limit = chunk_entries or chunk_limit(entries, replicas_of(levels))
    chunks = -(-entries // limit)
    largest = padded_size(min(entries, limit), levels)
    size = chunked_size(entries, levels, limit)
    return CollectiveCall("all_reduce", size, share=share, chunks=chunks, largest_chunk=largest)


def pair_mean_chunked(entries: int, levels: Levels, chunk_entries: int = 0, share: float = 1.0) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.pair_mean_chunked` on FP32 entries."""
    return replace(all_reduce_chunked(entries, levels, chunk_entries or CHUNK_ENTRIES, share), kind="pair_mean")


def all_reduce_stream(
    sizes: Sequence[int],
    levels: Levels,
    chunk_entries: int = 0,
    block: int = 1,
    message_bytes: MessageBytes | None = None,
    share: float = 1.0,
    entries: int = 0,
    in_place: bool = False,
) -> CollectiveCall:
    """Return the all-reduce of tensors that are sent in the chunks of `topology.partition.chunks_of`.

    Args:
        sizes: Entries of the tensors.
        block: Each tensor starts at a multiple of this size, and no chunk divides a block.
        message_bytes: Encoded size of n elements of one chunk; None for FP32.
        entries: Entries that the size of the chunks depends on; 0 for those of the tensors.
        in_place: Entries are encoded without a buffer if there is one level.
    """
    one_level, replicas = in_place and len(levels) == 1, replicas_of(levels)
    limit = chunk_entries or chunk_limit(entries or sum(sizes), replicas, message_bytes, one_level)
    size = None if message_bytes is None else block
    chunks = Counter(padded_size(n, levels, size) for n in chunk_sizes(sizes, limit, block))
    count = sum(n * times for n, times in chunks.items())
    encoded = None if message_bytes is None else ChunkedMessages(message_bytes, tuple(chunks.items()))
    largest = max(chunks, default=0)
    return CollectiveCall("all_reduce", count, encoded, share, chunks=chunks.total(), largest_chunk=largest)


def scaled(calls: Sequence[CollectiveCall], share: float, hidden: bool = False) -> list[CollectiveCall]:
    """Return the calls of an exchange that runs in only a share of the steps."""
    return [replace(call, share=share * call.share, hidden=hidden) for call in calls]


def entries_in_flight(calls: Sequence[CollectiveCall]) -> int:
    """Return the entries of the two largest chunks that a step has in flight at once. Hidden calls do not count."""
    reductions = [call for call in calls if call.kind != "all_gather" and not call.hidden]
    chunks = [
        call.largest_chunk if call.chunks else call.count
        for call in reductions
        for _ in range(min(2, call.chunks or 1))
    ]
    return sum(sorted(chunks)[-2:])

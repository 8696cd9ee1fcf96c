"""Collectives over the replicas as data, which a method plans and the planner prices. Plain arithmetic: no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torchtitan_scape.topology.pairs import paired_share
from torchtitan_scape.topology.partition import ALIGNED_ENTRIES
from torchtitan_scape.topology.ring_bytes import (
    Levels,
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
    replicas = replicas_of(levels)
    if replicas == 1:
        return 1
    if len(levels) < 2 and block_size is None:
        return ALIGNED_ENTRIES
    return replicas * (ALIGNED_ENTRIES if block_size is None else block_size)


def padded_size(count: int, levels: Levels, block_size: int | None = None) -> int:
    """Return `count` rounded up to a multiple of `size_multiple`."""
    step = size_multiple(levels, block_size)
    return -(-count // step) * step


def chunked_size(count: int, levels: Levels, chunk_entries: int) -> int:
    """Return the FP32 elements that `ReplicaCollectives.all_reduce_chunked` sends: each chunk is padded."""
    full, rest = divmod(count, chunk_entries)
    return full * padded_size(chunk_entries, levels) + padded_size(rest, levels)

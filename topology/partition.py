"""Division of tensors into chunks, each of which is exchanged separately. Plain arithmetic: no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# NCCL transfers 16 bytes at a time if a buffer begins and ends at multiples of 16, and less otherwise.
ALIGNED_BYTES = 16
# 16 MiB of FP32: large enough for full bandwidth on every link in machines.toml, small compared to any model.
CHUNK_ENTRIES = 1 << 22
# With more replicas a chunk grows, so that each pair of ranks exchanges this many encoded bytes of it. The latency of a
# message is then 8 % of its transfer time on the fastest network in machines.toml, 50 GB/s with 5 us.
PAIR_BYTES = 3 << 20
# Kernels that encode tensors in place need no FP32 buffers: a chunk of so many times as many entries has about the same
# memory, as recorded in `methods/recorded.json`, and a step has fewer launches and collectives.
IN_PLACE_FACTOR = 4
# Two chunks are in flight at once. This limits their memory to two fifths of that of all entries.
LARGEST_SHARE = 5
_ROUNDING = 1 << 20
# Entries of a chunk of whole tensors that is exchanged in place. It needs no buffer, and its tensors are one call.
_TOGETHER = 1 << 26
# A small model is divided into about eight chunks, so that the first one is sent long before the last one is ready.
_CHUNKS, _MIN_ENTRIES = 8, 1 << 16


class Slice(NamedTuple):
    """Entries [first, first + length) of a tensor, stored in a chunk from entry `at` on."""

    tensor: int
    first: int
    length: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Slices of tensors that are exchanged together.

    Attributes:
        entries: Size of the chunk, gaps included.
        slices: In order; gaps between them are padding.
    """

    entries: int
    slices: tuple[Slice, ...]


def chunk_limit(
    entries: int, replicas: int, message_bytes: Callable[[int], int] | None = None, in_place: bool = False
) -> int:
    """Return the maximum entries of a chunk: `CHUNK_ENTRIES`, or more with many replicas or a short code.

    Args:
        entries: Entries of the whole exchange, or of the model if an exchange is a part of it.
        replicas: Number of replicas; each sends a slice of a chunk to every other.
        message_bytes: Encoded size of n entries; None for FP32.
        in_place: The entries are encoded without a buffer.
    """
    encoded = 4 * _ROUNDING if message_bytes is None else message_bytes(_ROUNDING)
    wanted = -(-replicas * PAIR_BYTES // encoded) * (IN_PLACE_FACTOR if in_place else 1)
    allowed = -(-entries // (LARGEST_SHARE * _ROUNDING))
    return max(CHUNK_ENTRIES, min(wanted, allowed) * _ROUNDING)


def chunk_of_payload(entries: int) -> int:
    """Return the entries of a chunk of a sparse payload that kernels fill and store, with a few launches for each.

    Two chunks are a quarter of the payload, which is a fraction of the model.
    """
    return -(-entries // (_CHUNKS * _ROUNDING)) * _ROUNDING


def chunk_sizes(sizes: Sequence[int], most: int = CHUNK_ENTRIES, block: int = 1) -> list[int]:
    """Return the entries of each chunk. All chunks have the same size, apart from a shorter last one.

    Args:
        sizes: Entries of each tensor.
        most: Maximum entries of a chunk, unless one block is larger; see `chunk_limit`.
        block: Each tensor begins at a multiple of it, and no block is divided between chunks.
    """
    total = sum(-(-size // block) * block for size in sizes)
    each = max(block, entries_of_chunk(total, most) // block * block)
    return [min(each, total - first) for first in range(0, total, each)]


def entries_of_chunk(total: int, most: int) -> int:
    """Return the entries of a chunk of `total` ones: `most`, or less for a small model."""
    small = max(_MIN_ENTRIES, -(-total // _CHUNKS))
    return most if small > CHUNK_ENTRIES else min(most, small)


def chunks_of(sizes: Sequence[int], most: int = CHUNK_ENTRIES, block: int = 1) -> list[Chunk]:
    """Divide tensors into chunks of `chunk_sizes`. The last tensor comes first, as in a backward pass."""
    lengths = chunk_sizes(sizes, most, block)
    slices: list[list[Slice]] = [[] for _ in lengths]
    begin = 0
    for tensor in reversed(range(len(sizes))):
        first = 0
        while first < sizes[tensor]:
            number, at = divmod(begin + first, lengths[0])
            length = min(sizes[tensor] - first, lengths[0] - at)
            slices[number].append(Slice(tensor, first, length, at))
            first += length
        begin += -(-sizes[tensor] // block) * block
    return [Chunk(entries, tuple(parts)) for entries, parts in zip(lengths, slices, strict=True)]


def whole_chunks(sizes: Sequence[int], least: int = _TOGETHER) -> list[Chunk]:
    """Divide tensors into chunks of whole ones, of `least` entries or more. The last tensor comes first."""
    chunks: list[Chunk] = []
    slices: list[Slice] = []
    for tensor in reversed(range(len(sizes))):
        at = slices[-1].at + slices[-1].length if slices else 0
        slices.append(Slice(tensor, 0, sizes[tensor], at))
        if at + sizes[tensor] >= least or tensor == 0:
            chunks.append(Chunk(at + sizes[tensor], tuple(slices)))
            slices = []
    return chunks

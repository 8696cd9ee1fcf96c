"""How tensors are cut into chunks, each of which is an exchange of its own. Plain arithmetic: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# FP32 entries in 16 bytes. NCCL moves so much at a time where stretches begin and end at multiples of it.
ALIGNED = 4
# 16 MiB of FP32: large enough for full bandwidth on every link in machines.py, small beside any model.
CHUNK_ENTRIES = 1 << 22
# Of a small model a chunk is an eighth: the first can go out long before the last is there.
_CHUNKS, _LEAST = 8, 1 << 16


class Slice(NamedTuple):
    """Entries [first, first + length) of a tensor; in the chunk they begin at `at`."""

    tensor: int
    first: int
    length: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """entries: of it, gaps included. slices: what lies in it, in order; between them is nothing."""

    entries: int
    slices: tuple[Slice, ...]


def chunk_sizes(sizes: Sequence[int], most: int = CHUNK_ENTRIES, unit: int = 1) -> list[int]:
    """Entries of the chunks of tensors of `sizes` entries: all alike, but for a shorter last one.

    unit: each tensor begins at a multiple of it, and no chunk divides one. most: of a chunk's entries, but a unit.
    """
    total = sum(-(-size // unit) * unit for size in sizes)
    each = min(most, max(_LEAST, -(-total // _CHUNKS)))
    each = max(unit, each // unit * unit)
    return [min(each, total - first) for first in range(0, total, each)]


def chunks_of(sizes: Sequence[int], most: int = CHUNK_ENTRIES, unit: int = 1) -> list[Chunk]:
    """The chunks of `chunk_sizes`. The last tensor comes first, as a backward pass leaves gradients."""
    lengths = chunk_sizes(sizes, most, unit)
    slices: list[list[Slice]] = [[] for _ in lengths]
    begin = 0
    for tensor in reversed(range(len(sizes))):
        first = 0
        while first < sizes[tensor]:
            number, at = divmod(begin + first, lengths[0])
            length = min(sizes[tensor] - first, lengths[0] - at)
            slices[number].append(Slice(tensor, first, length, at))
            first += length
        begin += -(-sizes[tensor] // unit) * unit
    return [Chunk(entries, tuple(parts)) for entries, parts in zip(lengths, slices, strict=True)]

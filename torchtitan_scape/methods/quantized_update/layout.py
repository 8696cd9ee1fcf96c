"""Which replica owns what, and the columns in which it is exchanged. Plain arithmetic: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from topology.partition import Slice

Row = list[Slice]  # what a replica owns, in order; `at` is a position in its row


class Column(NamedTuple):
    """The part of the exchange that one collective moves: `width` entries of the row of every owner.

    Attributes:
        owners: The replicas whose rows reach into the column, in order.
        slices: The parts of tensors in it, by owner; `at` is a position in the column, the rest is padding.
    """

    width: int
    owners: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]


@dataclass(frozen=True)
class Division:
    """Owners of all tensors of a rank.

    Attributes:
        rows: By replica.
        columns: The exchange.
    """

    rows: tuple[tuple[Slice, ...], ...]
    columns: tuple[Column, ...]


def divide(
    sizes: Sequence[int],
    whole: Sequence[int],
    replicas: int,
    *,
    block: int,
    limit: int,
    equal_rows: bool = False,
) -> Division:
    """Divide tensors among replicas.

    Tensors that must not be divided are assigned first, each to the replica with the fewest entries, the largest first.
    Blocks of the others then fill the shorter rows.

    Args:
        sizes: Entries of the tensors on this rank.
        whole: Entries of the tensor over all ranks of a replica if it must not be divided, so that these ranks choose
            the same owner; 0 if it may be divided.
        replicas: Number of replicas.
        block: Every slice starts at a multiple of it, in its tensor and in its row.
        limit: Maximum entries of a column, all rows together, unless one block of each row is more.
        equal_rows: Let every row reach into all columns, for collectives that need all replicas.
    """
    rows: list[Row] = [[] for _ in range(replicas)]
    ends, held = [0] * replicas, [0] * replicas
    for i in sorted((i for i, entries in enumerate(whole) if entries), key=lambda i: -whole[i]):
        owner = min(range(replicas), key=held.__getitem__)
        held[owner] += whole[i]
        rows[owner].append(Slice(i, 0, sizes[i], ends[owner]))  # empty on a rank without rows of the tensor
        ends[owner] += _rounded(sizes[i], block)
    divisible = [i for i, entries in enumerate(whole) if not entries and sizes[i]]
    level = block * _fill_level([end // block for end in ends], sum(-(-sizes[i] // block) for i in divisible))
    owner = 0
    for i in divisible:
        first = 0
        while first < sizes[i]:
            while ends[owner] >= level:
                owner += 1
            length = min(sizes[i] - first, level - ends[owner])
            rows[owner].append(Slice(i, first, length, ends[owner]))
            ends[owner] += _rounded(length, block)
            first += length
    # A shorter row is padded to the level: otherwise the last block of the others would need a column of its own.
    ends = [max(ends)] * replicas if equal_rows else [max(end, level) for end in ends]
    columns = _columns(rows, ends, limit, block)
    return Division(tuple(map(tuple, rows)), tuple(columns))


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block


def _fill_level(loads: Sequence[int], blocks: int) -> int:
    """Return the lowest level up to which `blocks` more blocks fill the rows."""
    ordered = sorted(loads)
    for count in range(1, len(ordered)):
        level = -(-(sum(ordered[:count]) + blocks) // count)
        if level <= ordered[count]:
            return level
    return -(-(sum(ordered) + blocks) // len(ordered))


def _columns(rows: Sequence[Row], ends: Sequence[int], limit: int, block: int) -> list[Column]:
    """Return the columns of at most `limit` entries, all rows together. A column ends where a row ends."""
    columns = []
    for begin, end in pairwise(sorted({0, *ends})):
        owners = tuple(i for i, last in enumerate(ends) if last > begin)
        width = max(1, limit // (len(owners) * block)) * block
        for first in range(begin, end, width):
            last = min(first + width, end)
            columns.append(Column(last - first, owners, tuple(tuple(_within(rows[i], first, last)) for i in owners)))
    return columns


def _within(row: Row, first: int, last: int) -> Row:
    """Return the parts of a row between two positions, relative to the first one."""
    found = []
    for s in row:
        begin, end = max(s.at, first), min(s.at + s.length, last)
        if begin < end:
            found.append(Slice(s.tensor, s.first + begin - s.at, end - begin, begin - first))
    return found

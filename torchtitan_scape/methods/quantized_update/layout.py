"""Owners of the entries, and the steps and columns of their exchange. Plain arithmetic: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchtitan_scape.topology.partition import Slice

Row = list[Slice]  # the slices of a replica, in order; `at` is a position in its row


class Column(NamedTuple):
    """The part of the exchange that one collective moves: `width` entries of the row of every owner.

    Attributes:
        owners: The replicas whose rows reach into the column, in order.
        slices: The parts of tensors in it, by owner; `at` is a position in the column, the rest is padding.
    """

    width: int
    owners: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]


class OwnPart(NamedTuple):
    """The tensors of a group that one replica updates.

    Attributes:
        tensors: Those with entries that it owns, or with an empty slice of it.
        others: The slices of these tensors that other replicas own.
    """

    tensors: tuple[int, ...]
    others: tuple[Slice, ...]


@dataclass(frozen=True)
class ExchangeGroup:
    """The tensors that are exchanged in the same steps.

    Attributes:
        tensors: Their numbers, in order.
        rows: By replica; a tensor that may be divided has slices in several rows.
        columns: The exchange.
    """

    tensors: tuple[int, ...]
    rows: tuple[tuple[Slice, ...], ...]
    columns: tuple[Column, ...]

    def part_of(self, replica: int) -> OwnPart:
        """Return the part that a replica updates."""
        tensors = {s.tensor for s in self.rows[replica]}
        others = [s for i, row in enumerate(self.rows) if i != replica for s in row if s.tensor in tensors]
        return OwnPart(tuple(sorted(tensors)), tuple(others))


def divide(
    sizes: Sequence[int],
    whole: Sequence[int],
    replicas: int,
    *,
    block: int,
    limit: int,
    equal_rows: bool = False,
    groups: int = 1,
    entries: Sequence[int] = (),
) -> tuple[ExchangeGroup, ...]:
    """Divide tensors into groups, and those of each group among replicas.

    Tensors that must not be divided are assigned first, each to the replica with the fewest entries, the largest first.
    Blocks of the others then fill the shorter rows of the group.

    Args:
        sizes: Entries of the tensors on this rank.
        whole: Entries of the tensor over all ranks of a replica if it must not be divided, so that these ranks choose
            the same owner; 0 if it may be divided.
        replicas: Number of replicas.
        block: Every slice starts at a multiple of it, in its tensor and in its row.
        limit: Maximum entries of a column, all rows together, unless one block of each row is more.
        equal_rows: Let every row reach into all columns, for collectives that need all replicas.
        groups: Number of groups, of about equally many entries; some are empty if there are more than tensors.
        entries: Entries of the tensors over all ranks of a replica, so that these ranks choose the same groups; `sizes`
            if empty.
    """
    held = [0] * replicas  # entries of the tensors that are not divided, in all groups
    found = []
    for tensors in assign_groups(entries or sizes, groups):
        rows = _rows_of_group(tensors, sizes, whole, held, block)
        ends = [_rounded(row[-1].at + row[-1].length, block) if row else 0 for row in rows]
        _fill_rows(rows, ends, [(i, sizes[i]) for i in tensors if not whole[i] and sizes[i]], block)
        if equal_rows:
            ends = [max(ends)] * replicas
        found.append(ExchangeGroup(tuple(tensors), tuple(map(tuple, rows)), tuple(_columns(rows, ends, limit, block))))
    return tuple(found)


def assign_groups(entries: Sequence[int], groups: int) -> list[list[int]]:
    """Return the tensors of each group: the largest first, each in the group with the fewest entries."""
    found: list[list[int]] = [[] for _ in range(groups)]
    loads = [0] * groups
    for i in sorted(range(len(entries)), key=lambda i: -entries[i]):
        group = min(range(groups), key=loads.__getitem__)
        loads[group] += entries[i]
        found[group].append(i)
    return [sorted(each) for each in found]


def _rows_of_group(
    tensors: Sequence[int], sizes: Sequence[int], whole: Sequence[int], held: list[int], block: int
) -> list[Row]:
    """Return the rows of the tensors that are not divided, and add their entries to `held`, by replica."""
    rows: list[Row] = [[] for _ in held]
    ends = [0] * len(held)
    for i in sorted((i for i in tensors if whole[i]), key=lambda i: -whole[i]):
        owner = min(range(len(held)), key=held.__getitem__)
        held[owner] += whole[i]
        rows[owner].append(Slice(i, 0, sizes[i], ends[owner]))  # empty on a rank without rows of the tensor
        ends[owner] += _rounded(sizes[i], block)
    return rows


def _fill_rows(rows: Sequence[Row], ends: list[int], tensors: Sequence[tuple[int, int]], block: int) -> None:
    """Divide tensors, (number, entries), among the shorter rows, and let all rows end at the same position or later.

    A shorter row is padded: otherwise the last block of the others would need a column of its own.
    """
    level = block * _fill_level([end // block for end in ends], sum(-(-size // block) for _, size in tensors))
    owner = 0
    for i, size in tensors:
        first = 0
        while first < size:
            while ends[owner] >= level:
                owner += 1
            length = min(size - first, level - ends[owner])
            rows[owner].append(Slice(i, first, length, ends[owner]))
            ends[owner] += _rounded(length, block)
            first += length
    ends[:] = [max(end, level) for end in ends]


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

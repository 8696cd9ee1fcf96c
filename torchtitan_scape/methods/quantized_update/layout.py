"""Owners of the entries, and the steps and columns of their exchange. Plain arithmetic: no torch."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from torchtitan_scape.topology.partition import Slice, entries_of_chunk

_PARTS = 4  # of a row: a tensor with fewer entries than one of them is not divided, if it fits

Row = list[Slice]  # the slices of a replica, in order; `at` is a position in its row


@dataclass(frozen=True, eq=False)
class Column:
    """The part of the exchange that one collective moves: `width` entries of the row of every owner.

    Attributes:
        owners: The replicas whose rows reach into the column, in order.
        rows: Their rows.
        first: The position in a row at which the column begins.
    """

    width: int
    owners: tuple[int, ...]
    rows: tuple[Row, ...]
    first: int

    @cached_property
    def slices(self) -> tuple[tuple[Slice, ...], ...]:
        """The parts of tensors in it, by owner; `at` is a position in the column, the rest is padding."""
        return tuple(tuple(_within(row, self.first, self.first + self.width)) for row in self.rows)

    def tensors(self) -> frozenset[int]:
        """Return the numbers of the tensors in it."""
        return frozenset(s.tensor for slices in self.slices for s in slices)


@dataclass(frozen=True)
class ExchangeGroup:
    """The tensors that are exchanged in the same steps.

    Attributes:
        number: The position of the group.
        tensors: Their numbers, in order.
        rows: By replica; a tensor that may be divided has slices in several rows.
        columns: The exchange in a code.
        in_fp32: The exchange without a code, or through buffers, in columns with fewer entries.
    """

    number: int
    tensors: tuple[int, ...]
    rows: tuple[tuple[Slice, ...], ...]
    columns: tuple[Column, ...]
    in_fp32: tuple[Column, ...]


def divide(
    sizes: Sequence[int],
    whole: Sequence[int],
    replicas: int,
    *,
    block: int,
    limit: int,
    limit_in_fp32: int = 0,
    equal_rows: bool = False,
    groups: int = 1,
    entries: Sequence[int] = (),
) -> tuple[ExchangeGroup, ...]:
    """Divide tensors into groups, and those of each group among replicas.

    Tensors that must not be divided are assigned first, each to the replica with the fewest entries, the largest first.
    Blocks of the others then fill the shorter rows of the group. A row begins with the last tensor, so that the
    backward pass completes the columns one after the other, and the next forward pass needs them in the opposite order.

    Args:
        sizes: Entries of the tensors on this rank.
        whole: Entries of the tensor over all ranks of a replica if it must not be divided, so that these ranks choose
            the same owner; 0 if it may be divided.
        replicas: Number of replicas.
        block: Every slice starts at a multiple of it, in its tensor and in its row.
        limit: Maximum entries of a column, all rows together, unless one block of each row is more. A small model has
            about eight columns, see `topology.partition.entries_of_chunk`.
        limit_in_fp32: The same for the columns of an exchange in FP32; 0 for `limit`.
        equal_rows: Let every row reach into all columns, for collectives that need all replicas.
        groups: Number of groups, of about equally many entries; some are empty if there are more than tensors.
        entries: Entries of the tensors over all ranks of a replica, so that these ranks choose the same groups; `sizes`
            if empty.
    """
    held = [0] * replicas  # entries of the tensors that are not divided, in all groups
    divided = []
    for number, tensors in enumerate(assign_groups(entries or sizes, groups)):
        rows = _rows_of_group(tensors, sizes, whole, held, block)
        ends = [sum(_rounded(s.length, block) for s in row) for row in rows]
        _fill_rows(rows, ends, [(i, sizes[i]) for i in tensors if not whole[i] and sizes[i]], block)
        rows = [_last_first(row, block) for row in rows]
        if equal_rows:
            ends = [max(ends)] * replicas
        total = sum(sizes[i] for i in tensors)
        limits = [entries_of_chunk(total, most) for most in (limit, limit_in_fp32 or limit)]
        columns, in_fp32 = (tuple(_columns(rows, ends, most, block)) for most in limits)
        divided.append(ExchangeGroup(number, tuple(tensors), tuple(map(tuple, rows)), columns, in_fp32))
    return tuple(divided)


def slices_with_owners(groups: Sequence[ExchangeGroup], count: int) -> list[list[tuple[int, Slice]]]:
    """Return (owner, slice) of all slices of each of `count` tensors."""
    slices: list[list[tuple[int, Slice]]] = [[] for _ in range(count)]
    for owner, s in ((owner, s) for group in groups for owner, row in enumerate(group.rows) for s in row):
        slices[s.tensor].append((owner, s))
    return slices


def assign_groups(entries: Sequence[int], groups: int) -> list[list[int]]:
    """Return the tensors of each group: the largest first, each in the group with the fewest entries."""
    assigned: list[list[int]] = [[] for _ in range(groups)]
    loads = [0] * groups
    for i in sorted(range(len(entries)), key=lambda i: -entries[i]):
        group = min(range(groups), key=loads.__getitem__)
        loads[group] += entries[i]
        assigned[group].append(i)
    return [sorted(each) for each in assigned]


def _rows_of_group(
    tensors: Sequence[int], sizes: Sequence[int], whole: Sequence[int], held: list[int], block: int
) -> list[Row]:
    """Return the slices of the tensors that are not divided, and add their entries to `held`, by replica."""
    rows: list[Row] = [[] for _ in held]
    for i in sorted((i for i in tensors if whole[i]), key=lambda i: -whole[i]):
        owner = min(range(len(held)), key=held.__getitem__)
        held[owner] += whole[i]
        rows[owner].append(Slice(i, 0, sizes[i], 0))  # empty on a rank without rows of the tensor
    return rows


def _fill_rows(rows: Sequence[Row], ends: list[int], tensors: Sequence[tuple[int, int]], block: int) -> None:
    """Divide tensors, (number, entries), among the shorter rows, and let all rows end at the same position or later.

    A shorter row is padded: otherwise the last block of the others would need a column of its own. A small tensor goes
    to the row with most room. Others are divided in proportion to the room, one slice for each row: their gradients are
    complete at one time, and a row of one tensor would delay the columns of the others.
    """
    level = block * _fill_level([end // block for end in ends], sum(-(-size // block) for _, size in tensors))
    room = [max(0, level - end) // block for end in ends]
    small = level // (_PARTS * block)
    for i, size in tensors:
        blocks, widest = -(-size // block), max(range(len(rows)), key=room.__getitem__)
        shares = [0] * len(rows)
        if blocks <= min(small, room[widest]):
            shares[widest] = blocks
        else:
            below = list(accumulate(room, initial=0))
            bounds = [blocks * each // below[-1] for each in below]
            shares = [end - begin for begin, end in pairwise(bounds)]
        first = 0
        for row, share in ((row, share) for row, share in enumerate(shares) if share):
            length = min(size - first, share * block)
            rows[row].append(Slice(i, first, length, 0))
            room[row] -= share
            first += length
    ends[:] = [max(end, level) for end in ends]


def _last_first(row: Row, block: int) -> Row:
    """Place the slices of a row one after the other, those of the last tensor first."""
    ordered = sorted(row, key=lambda s: -s.tensor)
    starts = accumulate((_rounded(s.length, block) for s in ordered), initial=0)
    return [s._replace(at=start) for s, start in zip(ordered, starts, strict=False)]


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block


def _fill_level(loads: Sequence[int], blocks: int) -> int:
    """Return the lowest level up to which `blocks` more blocks fill the rows."""
    ordered = sorted(loads)
    for count, filled in enumerate(accumulate(ordered), start=1):
        level = -(-(filled + blocks) // count)
        if count == len(ordered) or level <= ordered[count]:
            break
    return level


def _columns(rows: Sequence[Row], ends: Sequence[int], limit: int, block: int) -> list[Column]:
    """Return the columns of at most `limit` entries, all rows together. A column ends where a row ends."""
    columns = []
    for begin, end in pairwise(sorted({0, *ends})):
        owners = tuple(i for i, last in enumerate(ends) if last > begin)
        rows_of_owners = tuple(rows[i] for i in owners)
        width = max(1, limit // (len(owners) * block)) * block
        for first in range(begin, end, width):
            last = min(first + width, end)
            columns.append(Column(last - first, owners, rows_of_owners, first))
    return columns


def _within(row: Row, first: int, last: int) -> Row:
    """Return the parts of a row between two positions, relative to the first one."""
    slices = []
    # Slices are in order of their position: the search starts at the last one that begins at or before `first`.
    for s in row[max(0, bisect_right(row, first, key=lambda s: s.at) - 1) :]:
        if s.at >= last:
            break
        begin, end = max(s.at, first), min(s.at + s.length, last)
        if begin < end:
            slices.append(Slice(s.tensor, s.first + begin - s.at, end - begin, begin - first))
    return slices

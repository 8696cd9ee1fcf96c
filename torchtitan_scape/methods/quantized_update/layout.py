"""Owners of the entries, and the steps and columns of their exchange. Plain arithmetic: no torch."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from torchtitan_scape.topology.partition import Slice, entries_of_chunk

_PARTS = 4  # of a row: a tensor with fewer entries than one of them is not divided, if it fits

Row = list[Slice]  # the slices of a replica, in order; `at` is a position in its row


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts into which a tensor is divided, by owner: one of a tensor that is not divided."""

    tensor: int
    owners: np.ndarray
    first: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class Column:
    """The part of the exchange that one collective moves: `width` entries of the row of every owner.

    Attributes:
        owners: The replicas whose rows reach into the column, in order.
        first: The position in a row at which the column begins.
        group: The group whose rows these are.
    """

    width: int
    owners: tuple[int, ...]
    first: int
    group: "ExchangeGroup"

    @cached_property
    def slices(self) -> tuple[tuple[Slice, ...], ...]:
        """The parts of tensors in it, by owner; `at` is a position in the column, the rest is padding."""
        rows, last = self.group.rows, self.first + self.width
        return tuple(tuple(_within(rows[owner], self.first, last)) for owner in self.owners)

    def tensors(self) -> frozenset[int]:
        """Return the numbers of the tensors in it."""
        return frozenset(s.tensor for slices in self.slices for s in slices)


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """The tensors that are exchanged in the same steps.

    Attributes:
        number: The position of the group.
        tensors: Their numbers, in order.
        parts: Those of each tensor, the last tensor first.
        ends: By replica, the position at which its row ends.
        block: Every slice starts at a multiple of it.
        limit: Maximum entries of a column, all rows together.
        limit_in_fp32: The same for the columns of an exchange in FP32.
    """

    number: int
    tensors: tuple[int, ...]
    parts: tuple[Parts, ...]
    ends: np.ndarray
    block: int
    limit: int
    limit_in_fp32: int

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """By replica; a tensor that may be divided has slices in several rows."""
        rows: tuple[Row, ...] = tuple([] for _ in self.ends)
        starts = [0] * len(rows)
        for each in self.parts:
            parts = zip(each.owners.tolist(), each.first.tolist(), each.lengths.tolist(), strict=True)
            for owner, first, length in parts:
                rows[owner].append(Slice(each.tensor, first, length, starts[owner]))
                starts[owner] += _rounded(length, self.block)
        return rows

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The exchange in a code."""
        return tuple(self._columns(self.limit))

    @cached_property
    def in_fp32(self) -> tuple[Column, ...]:
        """The exchange without a code, or through buffers, in columns with fewer entries."""
        return tuple(self._columns(self.limit_in_fp32))

    def _columns(self, limit: int) -> Iterator[Column]:
        """Yield the columns of at most `limit` entries, all rows together. A column ends where a row ends."""
        for begin, end in pairwise(sorted({0, *self.ends.tolist()})):
            owners = tuple(np.flatnonzero(self.ends > begin).tolist())
            width = max(1, limit // (len(owners) * self.block)) * self.block
            for first in range(begin, end, width):
                yield Column(min(width, end - first), owners, first, self)


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
    held = np.zeros(replicas, np.int64)  # entries of the tensors that are not divided, in all groups
    divided = []
    for number, tensors in enumerate(assign_groups(entries or sizes, groups)):
        ends = np.zeros(replicas, np.int64)
        parts = _whole_parts(tensors, sizes, whole, held, ends, block)
        parts += _divided_parts(ends, [(i, sizes[i]) for i in tensors if not whole[i] and sizes[i]], block)
        if equal_rows:
            ends[:] = ends.max()
        total = sum(sizes[i] for i in tensors)
        limits = [entries_of_chunk(total, most) for most in (limit, limit_in_fp32 or limit)]
        last_first = tuple(sorted(parts, key=lambda each: -each.tensor))
        divided.append(ExchangeGroup(number, tuple(tensors), last_first, ends, block, *limits))
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


def _whole_parts(
    tensors: Sequence[int],
    sizes: Sequence[int],
    whole: Sequence[int],
    held: np.ndarray,
    ends: np.ndarray,
    block: int,
) -> list[Parts]:
    """Return the tensors that are not divided, and add their entries to `held`, and to the ends of their rows."""
    parts = []
    for i in sorted((i for i in tensors if whole[i]), key=lambda i: -whole[i]):
        owner = held.argmin()
        held[owner] += whole[i]
        ends[owner] += _rounded(sizes[i], block)
        parts.append(Parts(i, *map(np.array, ([owner], [0], [sizes[i]]))))  # empty on a rank without rows of the tensor
    return parts


def _divided_parts(ends: np.ndarray, tensors: Sequence[tuple[int, int]], block: int) -> list[Parts]:
    """Divide tensors, (number, entries), among the shorter rows, and let all rows end at the same position or later.

    A shorter row is padded: otherwise the last block of the others would need a column of its own. A small tensor goes
    to the row with most room. Others are divided in proportion to the room, one slice for each row: their gradients are
    complete at one time, and a row of one tensor would delay the columns of the others.
    """
    level = _fill_level(ends // block, sum(-(-size // block) for _, size in tensors))
    room, small, parts = np.maximum(0, level - ends // block), level // _PARTS, []
    for i, size in tensors:
        blocks, widest = -(-size // block), room.argmax()
        if blocks <= min(small, room[widest]):
            owners, first, shares = (np.array([each]) for each in (widest, 0, blocks))
        else:
            below = np.concatenate(([0], room.cumsum()))
            bounds = blocks * below // below[-1]
            shares = np.diff(bounds)
            owners = np.flatnonzero(shares)
            first, shares = bounds[owners] * block, shares[owners]
        room[owners] -= shares
        parts.append(Parts(i, owners, first, np.minimum(size - first, shares * block)))
    np.maximum(ends, level * block, out=ends)
    return parts


def _rounded(size: int, block: int) -> int:
    return -(-size // block) * block


def _fill_level(loads: np.ndarray, blocks: int) -> int:
    """Return the lowest level up to which `blocks` more blocks fill the rows."""
    ordered = np.sort(loads)
    levels = -(-(ordered.cumsum() + blocks) // np.arange(1, len(ordered) + 1))
    fits = np.append(levels[:-1] <= ordered[1:], True)
    return int(levels[fits.argmax()])


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

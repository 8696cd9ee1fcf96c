"""Tiles of a tensor, and messages with the selected entries of several tensors. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.scape.blocks import entries_per_block, offset_bytes

MEANS = {"2bit": 4, "1bit": 1}  # FP32 means of each tensor, at the head of a message
PER_BYTE = {"2bit": 4, "1bit": 8}  # values
TILE = 64  # side of a tile; a tensor of one dimension is divided into slices of up to TILE * TILE entries


@dataclass(frozen=True)
class BlockGrid:
    """A tensor viewed as a matrix and divided into tiles of equal size; those at the end may be shorter.

    Attributes:
        rows, columns: Sides of the matrix.
        height, width: Sides of a tile.
        coded: Offsets within a tile are encoded; otherwise they take 32 bits each.
    """

    rows: int
    columns: int
    height: int
    width: int
    coded: bool = True

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        return self.down * self.across

    @property
    def size(self) -> int:
        """Number of entries of a tile."""
        return self.height * self.width

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def padded(self) -> bool:
        """Whether tiles at the end are shorter."""
        return self.tiles * self.size != self.entries

    @property
    def fewest(self) -> int:
        """Number of entries of the last tile, the shortest one."""
        return (self.rows - (self.down - 1) * self.height) * (self.columns - (self.across - 1) * self.width)

    def count(self, k: int) -> int:
        """Return the number of entries of a message with k per tile, including the padding of shorter tiles."""
        return self.tiles * k

    def offset_bytes(self, k: int) -> int:
        """Return the bytes of the offsets of k entries per tile."""
        return offset_bytes(self.tiles, k, self.size) if self.coded else 4 * self.count(k)


def block_grid(shape: Sequence[int], selection: str, block: int) -> BlockGrid:
    """Return the grid of a non-empty tensor for top-k.

    Args:
        selection: "block" for slices of `block` entries; "tensor" for a single one; "tile" for tiles of at most `TILE`
            x `TILE` entries, or slices of as many for one dimension. Tiles are as equal as possible: a side that is not
            a multiple of 64 would otherwise end in a narrow tile with a higher density.
    """
    entries = math.prod(shape)
    if selection == "tensor":
        return BlockGrid(1, entries, 1, entries, coded=False)
    if selection == "block":
        return BlockGrid(1, entries, 1, block)
    if len(shape) < 2:
        return BlockGrid(1, entries, 1, _even(entries, TILE * TILE))
    rows, columns = shape[0], entries // shape[0]
    return BlockGrid(rows, columns, _even(rows, TILE), _even(columns, TILE))


def divisor_grid(shape: Sequence[int], most: int) -> BlockGrid:
    """Return the grid of a non-empty tensor for DeMo.

    The sides of a tile are the largest divisors up to `most`, so that no tile is shorter. A tensor of one dimension is
    treated as one row.
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    height, width = (max(n for n in range(1, most + 1) if side % n == 0) for side in (rows, columns))
    return BlockGrid(rows, columns, height, width)


def selected_per_block(grids: Sequence[BlockGrid], density: float) -> list[int]:
    """Return the number of entries that are sent per tile, for each tensor."""
    return [entries_per_block(density, grid.size) for grid in grids]


def _even(length: int, most: int) -> int:
    """Return the length of the fewest equal slices of at most `most` entries."""
    return -(-length // -(-length // most))


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """Positions in a message with the selected entries of several tensors: all values, then all offsets.

    Attributes:
        grids: Division of each tensor into tiles.
        selected: Number of entries per tile, for each tensor.
        code: "float32"; "2bit", four means per tensor; or "1bit", signs and one mean magnitude per tensor.
    """

    grids: Sequence[BlockGrid]
    selected: Sequence[int]
    code: str = "float32"

    @cached_property
    def counts(self) -> list[int]:
        """Number of values of each tensor."""
        return [grid.count(k) for grid, k in zip(self.grids, self.selected, strict=True)]

    @cached_property
    def first_values(self) -> list[int]:
        """Position of each tensor's first value among all values, and their number."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def first_codes(self) -> list[int]:
        """Position of each tensor's first byte of packed values, and their end. Empty if they are not packed."""
        if self.code not in MEANS:
            return []
        sizes = (-(-count // PER_BYTE[self.code]) for count in self.counts)
        return list(accumulate(sizes, initial=4 * MEANS[self.code] * len(self.grids)))

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of the encoded values, means included."""
        return self.first_codes[-1] if self.code in MEANS else 4 * sum(self.counts)

    @cached_property
    def first_offsets(self) -> list[int]:
        """Position of each tensor's first byte of offsets, and their end."""
        sizes = (grid.offset_bytes(k) for grid, k in zip(self.grids, self.selected, strict=True))
        return list(accumulate(sizes, initial=self.value_bytes))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message, padded by `padded_bytes`."""
        return padded_bytes(self.first_offsets[-1])

"""Division of tensors into blocks for top-k and DeMo, and the size of their messages. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_scape.core.workloads import Shape
from torchtitan_scape.kernels.codec.formats import BLOCK, message_bytes
from torchtitan_scape.kernels.common.alignment import padded_bytes
from torchtitan_scape.kernels.scape.blocks import entries_per_block, offset_bytes

TILE = 64  # side of a tile; a tensor of one dimension is divided into slices of up to TILE * TILE entries
MEANS = 4  # FP32 reconstruction values per tensor of the two-bit code


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

    def count(self, k: int) -> int:
        """Return the number of entries of a message with k per tile, including the padding of shorter tiles."""
        return self.tiles * k

    def offset_bytes(self, k: int) -> int:
        """Return the bytes of the offsets of k entries per tile."""
        return offset_bytes(self.tiles, k, self.size) if self.coded else 4 * self.count(k)


def block_grid(shape: Shape, selection: str, block: int) -> BlockGrid:
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


def divisor_grid(shape: Shape, most: int) -> BlockGrid:
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


def topk_value_bytes(counts: Sequence[int], code: str) -> int:
    """Return the bytes of the encoded values.

    Args:
        counts: Number of values of each tensor.
        code: "float32", "2bit" (codes and means), "1bit" (signs and one mean), or a block code.
    """
    if code == "float32":
        return 4 * sum(counts)
    if code == "2bit":
        return sum(4 * MEANS + -(-count // 4) for count in counts)
    if code == "1bit":
        return sum(4 + -(-count // 8) for count in counts)
    return message_bytes(code, -(-sum(counts) // BLOCK) * BLOCK)


def topk_message_bytes(grids: Sequence[BlockGrid], selected: Sequence[int], code: str = "float32") -> int:
    """Return the bytes of one replica's message: values and offsets, padded by `padded_bytes`.

    Args:
        selected: Number of entries that are sent per tile, for each tensor.
        code: See `topk_value_bytes`.
    """
    size = topk_value_bytes([one.count(k) for one, k in zip(grids, selected, strict=True)], code)
    size += sum(one.offset_bytes(k) for one, k in zip(grids, selected, strict=True))
    return padded_bytes(size)

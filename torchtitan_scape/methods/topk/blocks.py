"""Division of tensors into blocks for top-k and DeMo. Imports no torch."""

import math
from collections.abc import Sequence

from torchtitan_scape.core.workloads import Shape
from torchtitan_scape.kernels.scape.blocks import entries_per_block
from torchtitan_scape.kernels.topk.layout import BlockGrid

TILE = 64  # side of a tile; a tensor of one dimension is divided into slices of up to TILE * TILE entries


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

"""DeMo's passes as Triton kernels; specified by `cosine.py`. One program transforms one tile.

The products are FP32 in another order than PyTorch's, so that results are close but not bitwise equal: of two
components that are equal up to rounding, either may be selected. Memory traffic per entry: `components_kernel` reads
and writes 4 bytes, `inverse_kernel` as much.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import as_flag
from kernels.scape.triton_select import select_in_blocks
from kernels.topk import cosine
from kernels.topk.cosine import Basis
from kernels.topk.layout import Grid

_LARGEST = 64  # side of a tile; larger ones use PyTorch


@triton.jit
def basis_of(basis, size, SIDE: tl.constexpr):
    """Load a DCT matrix, padded with zeros."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    return tl.load(basis + row * size + column, mask=(row < size) & (column < size), other=0.0)


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def entries_of(columns, across, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the entries of this program's tile, int64 [HEIGHT, WIDTH], and which of them exist."""
    tile = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    at = ((tile // across) * height + row) * columns + (tile % across) * width + column
    return at, (row < height) & (column < width)


@triton.jit(do_not_specialize=["k", "columns", "across", "height", "width"])
def components_kernel(
    momentum,
    x,
    row_basis,
    column_basis,
    values,
    offsets,
    applied,
    k,
    columns,
    across,
    height,
    width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the k largest components of a tile, and the tile without them as the momentum, if `applied`."""
    at, inside = entries_of(columns, across, height, width, HEIGHT, WIDTH)
    tile = tl.load(x + at, mask=inside, other=0.0)
    rows, cols = basis_of(row_basis, height, HEIGHT), basis_of(column_basis, width, WIDTH)
    components = product(product(rows, tile), tl.trans(cols))
    bits = tl.minimum(components.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    keys = tl.reshape(tl.where(inside, bits, -1), (1, HEIGHT * WIDTH))
    chosen = select_in_blocks(keys, k)
    slot = tl.program_id(0).to(tl.int64) * k + tl.cumsum(chosen.to(tl.int32), 1) - 1
    number = tl.arange(0, HEIGHT * WIDTH)[None, :]
    offset = (number // WIDTH) * width + number % WIDTH
    tl.store(offsets + slot, offset.to(tl.int64), mask=chosen)
    tl.store(values + slot, tl.reshape(components, (1, HEIGHT * WIDTH)), mask=chosen)
    sent = tl.where(tl.reshape(chosen.to(tl.int32), (HEIGHT, WIDTH)) != 0, components, 0.0)
    rest = tile - product(product(tl.trans(rows), sent), cols)
    if tl.load(applied) != 0:
        tl.store(momentum + at, rest, mask=inside)


@triton.jit(do_not_specialize=["columns", "across", "height", "width"])
def inverse_kernel(
    x, row_basis, column_basis, columns, across, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Replace the components in a tile by their inverse transform."""
    at, inside = entries_of(columns, across, height, width, HEIGHT, WIDTH)
    components = tl.load(x + at, mask=inside, other=0.0)
    rows, cols = basis_of(row_basis, height, HEIGHT), basis_of(column_basis, width, WIDTH)
    tl.store(x + at, product(product(tl.trans(rows), components), cols), mask=inside)


def largest_components(
    momentum: Tensor, x: Tensor, grid: Grid, basis: Basis, k: int, applied: Tensor
) -> tuple[Tensor, Tensor]:
    """Select as `cosine.largest_components`; tensors are contiguous."""
    if max(grid.height, grid.width) > _LARGEST:
        return cosine.largest_components(momentum, x, grid, basis, k, applied)
    values = torch.empty(grid.tiles, k, dtype=torch.float32, device=x.device)
    offsets = torch.empty(grid.tiles, k, dtype=torch.int64, device=x.device)
    tensors = momentum, x, basis.rows, basis.columns, values, offsets, as_flag(applied)
    launching.launch(components_kernel, (grid.tiles,), *tensors, k, *_sizes(grid), warps=8, **_constants(grid))
    return values, offsets


def inverse_(x: Tensor, grid: Grid, basis: Basis) -> None:
    """Transform as `cosine.inverse_`; x is contiguous."""
    if max(grid.height, grid.width) > _LARGEST:
        cosine.inverse_(x, grid, basis)
        return
    tensors = x, basis.rows, basis.columns
    launching.launch(inverse_kernel, (grid.tiles,), *tensors, *_sizes(grid), warps=8, **_constants(grid))


def _sizes(grid: Grid) -> tuple[int, int, int, int]:
    return grid.columns, grid.across, grid.height, grid.width


def _constants(grid: Grid) -> dict[str, int]:
    """Return the sides rounded up to a power of two; a matrix product needs 16 or more."""
    return {
        name: max(16, 1 << (side - 1).bit_length()) for name, side in (("HEIGHT", grid.height), ("WIDTH", grid.width))
    }

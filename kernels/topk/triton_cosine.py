"""DeMo's passes as Triton kernels; specified by `cosine.py`. One program transforms one tile.

The products are FP32 in another order than PyTorch's, so that results are close but not bitwise equal: of two
components that are equal up to rounding, either may be selected. A matrix product adds one outer product after the
other, whose vectors come from memory: `tl.dot` in FP32 keeps whole operands in registers, and they do not fit. Memory
traffic per entry: `components_kernel` reads 8 bytes and writes 4, `inverse_kernel` reads and writes 4; intermediate
tiles of 16 KiB stay in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import as_flag
from torchtitan_scape.kernels.scape.triton_select import select_in_blocks
from torchtitan_scape.kernels.topk import cosine
from torchtitan_scape.kernels.topk.cosine import Basis
from torchtitan_scape.kernels.topk.layout import TileGrid

_LARGEST = 64  # side of a tile; larger ones use PyTorch


@triton.jit
def product(a, a_row, a_column, b, b_row, b_column, count, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the product of (height, count) at `a` and (count, width) at `b`, padded; `*_row`, `*_column`: strides."""
    row, column = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for k in range(count):
        left = tl.load(a + row * a_row + k * a_column, mask=row < height, other=0.0)
        right = tl.load(b + k * b_row + column * b_column, mask=column < width, other=0.0)
        total += left[:, None] * right[None, :]
    return total


@triton.jit
def inverse_of(
    tile, rows, columns, stride, height, width, row, column, inside, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the inverse transform of the components at `tile`, which are overwritten by an intermediate result."""
    half = product(rows, 1, height, tile, stride, 1, height, height, width, HEIGHT, WIDTH)  # transposed
    tl.debug_barrier()
    tl.store(tile + row * stride + column, half, mask=inside)
    tl.debug_barrier()
    return product(tile, stride, 1, columns, width, 1, width, height, width, HEIGHT, WIDTH)


@triton.jit(do_not_specialize=["k", "stride", "across", "height", "width"])
def components_kernel(
    momentum,
    x,
    scratch,
    rows,
    columns,
    values,
    offsets,
    applied,
    k,
    stride,
    across,
    height,
    width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the k largest components of a tile, and the tile without them as the momentum, if `applied`.

    rows, columns: the DCT matrices. stride: entries of a row of x. scratch: as many entries as x.
    """
    tile = tl.program_id(0).to(tl.int64)
    first = (tile // across) * height * stride + (tile % across) * width
    row, column = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside, at = (row < height) & (column < width), first + row * stride + column
    half = product(rows, height, 1, x + first, stride, 1, height, height, width, HEIGHT, WIDTH)
    tl.store(scratch + at, half, mask=inside)
    tl.debug_barrier()
    components = product(scratch + first, stride, 1, columns, 1, width, width, height, width, HEIGHT, WIDTH)
    bits = tl.minimum(components.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    chosen = select_in_blocks(tl.reshape(tl.where(inside, bits, -1), (1, HEIGHT * WIDTH)), k)
    slot = tile * k + tl.cumsum(chosen.to(tl.int32), 1) - 1
    number = tl.arange(0, HEIGHT * WIDTH)[None, :]
    tl.store(offsets + slot, ((number // WIDTH) * width + number % WIDTH).to(tl.int64), mask=chosen)
    tl.store(values + slot, tl.reshape(components, (1, HEIGHT * WIDTH)), mask=chosen)
    sent = tl.where(tl.reshape(chosen.to(tl.int32), (HEIGHT, WIDTH)) != 0, components, 0.0)
    tl.debug_barrier()
    tl.store(scratch + at, sent, mask=inside)
    tl.debug_barrier()
    represented = inverse_of(scratch + first, rows, columns, stride, height, width, row, column, inside, HEIGHT, WIDTH)
    if tl.load(applied) != 0:
        tl.store(momentum + at, tl.load(x + at, mask=inside, other=0.0) - represented, mask=inside)


@triton.jit(do_not_specialize=["stride", "across", "height", "width"])
def inverse_kernel(x, rows, columns, stride, across, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Replace the components in a tile by their inverse transform."""
    tile = tl.program_id(0).to(tl.int64)
    here = x + (tile // across) * height * stride + (tile % across) * width
    row, column = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < height) & (column < width)
    values = inverse_of(here, rows, columns, stride, height, width, row, column, inside, HEIGHT, WIDTH)
    tl.debug_barrier()
    tl.store(here + row * stride + column, values, mask=inside)


def largest_components(
    momentum: Tensor, x: Tensor, grid: TileGrid, basis: Basis, k: int, applied: Tensor
) -> tuple[Tensor, Tensor]:
    """Select as `cosine.largest_components`; tensors are contiguous."""
    if max(grid.height, grid.width) > _LARGEST:
        return cosine.largest_components(momentum, x, grid, basis, k, applied)
    values = torch.empty(grid.tiles, k, dtype=torch.float32, device=x.device)
    offsets = torch.empty(grid.tiles, k, dtype=torch.int64, device=x.device)
    tensors = momentum, x, torch.empty_like(x), basis.rows, basis.columns, values, offsets, as_flag(applied)
    launching.launch(components_kernel, (grid.tiles,), *tensors, k, *_sizes(grid), warps=8, **_constants(grid))
    return values, offsets


def inverse_(x: Tensor, grid: TileGrid, basis: Basis) -> None:
    """Transform as `cosine.inverse_`; x is contiguous."""
    if max(grid.height, grid.width) > _LARGEST:
        cosine.inverse_(x, grid, basis)
        return
    tensors = x, basis.rows, basis.columns
    launching.launch(inverse_kernel, (grid.tiles,), *tensors, *_sizes(grid), warps=8, **_constants(grid))


def _sizes(grid: TileGrid) -> tuple[int, int, int, int]:
    return grid.columns, grid.across, grid.height, grid.width


def _constants(grid: TileGrid) -> dict[str, int]:
    """Return the sides rounded up to a power of two."""
    return {name: 1 << (side - 1).bit_length() for name, side in (("HEIGHT", grid.height), ("WIDTH", grid.width))}

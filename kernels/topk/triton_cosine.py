"""DeMo's passes as Triton kernels; specified by `reference.TorchCosine`. One program transforms one tile.

The products are FP32 in another order than PyTorch's, so that results are close but not bitwise equal: of two
components that are equal up to rounding, either may be selected. A matrix product adds one outer product after the
other, whose vectors come from memory: `tl.dot` in FP32 keeps whole operands in registers, and they do not fit. Memory
traffic per entry: `components_kernel` reads gradient and momentum and writes both, `inverse_kernel` reads and writes 4
bytes. The gradient's memory holds the intermediate tiles of 16 KiB, which stay in the cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.scape.triton_tiles import select_in_blocks
from torchtitan_scape.kernels.topk.layout import BlockGrid, MessageLayout
from torchtitan_scape.kernels.topk.reference import Basis, bases
from torchtitan_scape.kernels.topk.triton_passes import (
    Form,
    TiledTensors,
    power,
    store_selected,
    tensor_at,
    tile_starts,
    tiles_of,
)

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


@triton.jit
def tile_at(programs, table, height, width):
    """Return the number of the tensor of a program, its tile, int64 [1, 1], its first entry, and the stride of rows."""
    tensor, tile, _ = tiles_of(programs, tl.program_id(0), table, 1)
    start, stride, _, _ = tile_starts(table, tensor, tile, height, width, False)
    return tensor, tile, tl.sum(tl.sum(start, 1), 0), stride


@triton.jit(do_not_specialize=["beta", "factor", "k", "code_bytes", "unary", "low", "height", "width"])
def components_kernel(
    programs,
    table,
    momenta,
    gradients,
    rows,
    columns,
    message,
    values,
    applied,
    beta,
    factor,
    k,
    code_bytes,
    unary,
    low,
    height,
    width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the k largest components of a tile of x = factor * gradient + beta * momentum.

    The momentum becomes x without them if `applied`; the gradient is overwritten. rows, columns: the DCT matrices.
    """
    tensor, tile, first, stride = tile_at(programs, table, height, width)
    scratch, momentum = tensor_at(gradients, tensor, False) + first, tensor_at(momenta, tensor, False) + first
    row, column_in_tile = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside, at = (row < height) & (column_in_tile < width), row * stride + column_in_tile
    before = tl.load(momentum + at, mask=inside, other=0.0)
    x = tl.fma(before, tl.zeros_like(before) + beta, tl.load(scratch + at, mask=inside, other=0.0) * factor)
    tl.debug_barrier()
    tl.store(scratch + at, x, mask=inside)
    is_applied = tl.load(applied) != 0
    if is_applied:
        tl.store(momentum + at, x, mask=inside)
    tl.debug_barrier()
    half = product(rows, height, 1, scratch, stride, 1, height, height, width, HEIGHT, WIDTH)
    tl.debug_barrier()
    tl.store(scratch + at, half, mask=inside)
    tl.debug_barrier()
    components = product(scratch, stride, 1, columns, 1, width, width, height, width, HEIGHT, WIDTH)
    bits = tl.minimum(components.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    chosen = select_in_blocks(tl.reshape(tl.where(inside, bits, -1), (1, HEIGHT * WIDTH)), k)
    number = tl.arange(0, HEIGHT * WIDTH)[None, :]
    offset = (number // WIDTH) * width + number % WIDTH
    found = tl.reshape(components, (1, HEIGHT * WIDTH))
    store_selected(message, values, table, tensor, tile, found, offset, chosen, k, code_bytes, unary, low)
    sent = tl.where(tl.reshape(chosen.to(tl.int32), (HEIGHT, WIDTH)) != 0, components, 0.0)
    tl.debug_barrier()
    tl.store(scratch + at, sent, mask=inside)
    tl.debug_barrier()
    represented = inverse_of(scratch, rows, columns, stride, height, width, row, column_in_tile, inside, HEIGHT, WIDTH)
    if is_applied:
        tl.store(momentum + at, tl.load(momentum + at, mask=inside, other=0.0) - represented, mask=inside)


@triton.jit(do_not_specialize=["height", "width"])
def inverse_kernel(programs, table, outputs, rows, columns, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Replace the components in a tile by their inverse transform."""
    tensor, _, first, stride = tile_at(programs, table, height, width)
    here = tensor_at(outputs, tensor, False) + first
    row, column_in_tile = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < height) & (column_in_tile < width)
    values = inverse_of(here, rows, columns, stride, height, width, row, column_in_tile, inside, HEIGHT, WIDTH)
    tl.debug_barrier()
    tl.store(here + row * stride + column_in_tile, values, mask=inside)


def fits(grid: BlockGrid) -> bool:
    """Return whether the kernels can process the tiles of a grid."""
    return max(grid.height, grid.width) <= _LARGEST and grid.height * grid.columns < 1 << 31


class TritonCosine:
    """The passes of `reference.TorchCosine`, one launch for each form of tiles."""

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self._tiled, self._bases = TiledTensors(layout), bases(layout.grids, device)

    def select(
        self,
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        beta: float,
        factor: float,
        applied: Tensor,
        message: Tensor,
        values: Tensor,
    ) -> None:
        """Select as `TorchCosine.select`."""
        for form, tables in self._tiled.launches(1, momenta=momenta, gradients=gradients):
            code, (basis, sides, constants) = offset_code(form.k, form.size), self._constants(form)
            launching.launch(
                components_kernel,
                (len(form.programs),),
                *(*tables, basis.rows, basis.columns, message, values, applied),
                *(beta, factor, form.k, code.nbytes, code.unary, code.low, *sides),
                warps=8,
                moved=16 * form.entries - (1 - form.share) * (message.nbytes + values.nbytes),
                **constants,
            )

    def inverse_(self, outputs: Sequence[Tensor]) -> None:
        """Transform as `TorchCosine.inverse_`."""
        for form, tables in self._tiled.launches(1, gradients=outputs):
            basis, sides, constants = self._constants(form)
            launching.launch(
                inverse_kernel,
                (len(form.programs),),
                *(*tables, basis.rows, basis.columns, *sides),
                warps=8,
                moved=8 * form.entries,
                **constants,
            )

    def _constants(self, form: Form) -> tuple[Basis, tuple[int, int], dict[str, int]]:
        """Return the basis, the sides of a tile, and those rounded up to a power of two."""
        height, width = sides = form.constants["HEIGHT"], form.constants["WIDTH"]
        return self._bases[sides], sides, dict(HEIGHT=power(height), WIDTH=power(width))

"""The functions of `reference.py` on Triton kernels, one launch each. None synchronizes with the device."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import as_flag
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.scape.triton_masks import encode_offsets_kernel
from torchtitan_scape.kernels.topk import reference, triton_kernels
from torchtitan_scape.kernels.topk.layout import Received, TileGrid

_LARGEST = 1 << 15  # entries of a tile; larger ones, of a whole tensor, use PyTorch
_ENTRIES = 1 << 13  # of a program
# Entries of a program that selects, and of its warps: its search keeps all in registers, and synchronizes the warps.
_SELECTED = 1 << 10
_FLAT = 1 << 12  # entries of a program without tiles
_OFFSETS = 1 << 10  # offsets of a program
_FORMS = {
    "float32": triton_kernels.FLOAT.value,
    "2bit": triton_kernels.TWO_BITS.value,
    "1bit": triton_kernels.ONE_BIT.value,
}


def select(x: Tensor, grid: TileGrid, k: int) -> tuple[Tensor, Tensor]:
    """Select as `reference.select`; the tensor is contiguous."""
    if grid.size > _LARGEST:
        return reference.select(x, grid, k)
    values = torch.empty(grid.tiles, k, dtype=torch.float32, device=x.device)
    offsets = torch.empty(grid.tiles, k, dtype=torch.int64, device=x.device)
    _launch(
        triton_kernels.select_kernel,
        grid,
        k,
        x,
        values,
        offsets,
        entries=_SELECTED,
        per_warp=_SELECTED if grid.size <= _SELECTED else _SELECTED // 2,
    )
    return values, offsets


def accumulate_(residual: Tensor, x: Tensor, decay: float, factor: float, applied: Tensor) -> None:
    """Compute as `reference.accumulate_`; tensors are contiguous."""
    launching.launch(
        triton_kernels.accumulate_kernel,
        (-(-x.numel() // _FLAT),),
        residual,
        x,
        as_flag(applied),
        x.numel(),
        decay,
        factor,
        warps=8,
        moved=residual.nbytes,
        TILE=_FLAT,
    )


def keep_(residual: Tensor, grid: TileGrid, offsets: Tensor, errors: Tensor, applied: Tensor) -> None:
    """Set the residual as `reference.keep_`; tensors are contiguous."""
    if grid.size > _LARGEST:
        reference.keep_(residual, grid, offsets, errors, applied)
        return
    touched = min(residual.nbytes, 32 * errors.numel())  # a sector for each entry
    _launch(
        triton_kernels.keep_kernel, grid, k := offsets.shape[1], residual, offsets, errors, as_flag(applied),
        ENTRIES=_power(k), moved=touched - residual.nbytes,
    )  # fmt: skip


def encode_offsets(offsets: Tensor, size: int) -> Tensor:
    """Encode as `mask_code.encode_offsets`."""
    if size > _LARGEST:
        return reference.encode_offsets(offsets, size)
    (blocks, k), code = offsets.shape, offset_code(offsets.shape[1], size)
    nbytes = blocks * code.nbytes
    coded = torch.zeros(-(-nbytes // 4) * 4, dtype=torch.uint8, device=offsets.device)  # the kernel writes whole words
    launching.launch(
        encode_offsets_kernel,
        (-(-offsets.numel() // _OFFSETS),),
        *(offsets.to(torch.int16), coded, offsets.numel(), blocks, nbytes, k, code.nbytes, code.unary, code.low),
        warps=4,
        TILE=_OFFSETS,
    )
    return coded[:nbytes]


def mean_(x: Tensor, grid: TileGrid, received: Received, over_senders: bool) -> None:
    """Compute the mean as `reference.mean_`; x is contiguous."""
    if grid.size > _LARGEST or not grid.coded:
        reference.mean_(x, grid, received, over_senders)
        return
    replicas, code = len(received.offsets), offset_code(received.k, grid.size)
    counts = torch.empty_like(x, dtype=torch.int16) if over_senders else x
    strides = (t.stride(0) for t in (received.values, received.means, received.offsets))
    _launch(
        triton_kernels.mean_kernel,
        grid,
        received.k,
        *(x, counts, received.values, received.means, received.offsets),
        *strides,
        replicas,
        float(replicas),
        FORM=_FORMS[received.form],
        OVER_SENDERS=over_senders,
        LOW=code.low,
        UNARY=code.unary,
        CODE_BYTES=code.nbytes,
        LANES=_power(max(code.unary, received.k)),
    )


def _launch(
    kernel: Any, grid: TileGrid, k: int, *arguments: Any, entries: int = _ENTRIES, per_warp: int = 0, **constants: Any
) -> None:
    """Launch a kernel on tiles.

    entries: those of a program, unless a tile has more. per_warp: entries of a warp; 0 for a choice by their number.
    """
    columns = _power(grid.size)
    rows = max(1, entries // columns)
    warps = 4 if rows * columns <= 1 << 11 else 8 if columns <= _ENTRIES else 16
    if per_warp:
        warps = max(1, min(16, rows * columns // per_warp))
    launching.launch(
        kernel,
        (-(-grid.tiles // rows),),
        *arguments,
        *(grid.tiles, k, grid.rows, grid.columns, grid.across, grid.height, grid.width),
        warps=warps,
        ROWS=rows,
        COLUMNS=columns,
        ONE_ROW=grid.rows == grid.height == 1,
        **constants,
    )


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()

"""The functions of `reference.py` on Triton kernels, one launch each. None synchronizes with the device."""

from typing import Any

import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import as_flag
from kernels.scape.blocks import offset_code
from kernels.topk import reference, triton_kernels
from kernels.topk.layout import Grid, Received

_LARGEST = 1 << 15  # entries of a tile; larger ones, of a whole tensor, use PyTorch
_ENTRIES = 1 << 13  # of a program
_FORMS = {
    "float32": triton_kernels.FLOAT.value,
    "2bit": triton_kernels.TWO_BITS.value,
    "1bit": triton_kernels.ONE_BIT.value,
}


def select(x: Tensor, grid: Grid, k: int) -> tuple[Tensor, Tensor]:
    """Select as `reference.select`; the tensor is contiguous."""
    if grid.size > _LARGEST:
        return reference.select(x, grid, k)
    values = torch.empty(grid.tiles, k, dtype=torch.float32, device=x.device)
    offsets = torch.empty(grid.tiles, k, dtype=torch.int64, device=x.device)
    _launch(triton_kernels.select_kernel, grid, k, x, values, offsets)
    return values, offsets


def keep_(residual: Tensor, x: Tensor, grid: Grid, offsets: Tensor, errors: Tensor, applied: Tensor) -> None:
    """Set the residual as `reference.keep_`; tensors are contiguous."""
    if grid.size > _LARGEST:
        reference.keep_(residual, x, grid, offsets, errors, applied)
        return
    _launch(
        triton_kernels.keep_kernel, grid, k := offsets.shape[1], residual, x, offsets, errors, as_flag(applied),
        ENTRIES=_power(k),
    )  # fmt: skip


def mean_(x: Tensor, grid: Grid, received: Received, over_senders: bool) -> None:
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


def _launch(kernel: Any, grid: Grid, k: int, *arguments: Any, **constants: Any) -> None:
    columns = _power(grid.size)
    rows = max(1, _ENTRIES // columns)
    launching.launch(
        kernel,
        (-(-grid.tiles // rows),),
        *arguments,
        *(grid.tiles, k, grid.rows, grid.columns, grid.across, grid.height, grid.width),
        warps=8 if columns <= _ENTRIES else 16,
        ROWS=rows,
        COLUMNS=columns,
        **constants,
    )


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()

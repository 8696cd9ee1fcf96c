"""The functions of `reference.py` on Triton kernels, without synchronization."""

import torch
from torch import Tensor

from kernels.common import launching
from kernels.scape.reference import pack_bits
from kernels.tagc import triton_kernels
from kernels.tagc.formats import BITMAP, BLOCK
from kernels.tagc.reference import ROUNDS, estimates, states_of
from kernels.tagc.sketch import Sketch

_SHAPE = {"ROWS": 4, "BLOCK": BLOCK}
_WARPS = 8  # 512 entries each
_ROW_WARPS = 4  # of a program for one row


def select(x: Tensor, k: int) -> Tensor:
    """Select as `reference.select`; the tensor is contiguous."""
    assert x.is_contiguous()
    blocks = -(-x.numel() // BLOCK)
    bits = torch.empty(blocks * BITMAP, dtype=torch.uint8, device=x.device)
    launching.launch(triton_kernels.select_kernel, _grid(blocks), x, bits, x.numel(), blocks, k, warps=_WARPS, **_SHAPE)
    return bits


def pack(x: Tensor, index: Tensor, own: Tensor, capacity: int, out: Tensor) -> None:
    """Pack as `reference.pack`; tensors are contiguous."""
    assert x.is_contiguous() and out.is_contiguous()
    blocks = out.shape[0]
    sizes = x.numel(), blocks, capacity
    launching.launch(triton_kernels.pack_kernel, _grid(blocks), x, index, own, out, *sizes, warps=_WARPS, **_SHAPE)


def expand(packed: Tensor, index: Tensor, out: Tensor) -> None:
    """Expand as `reference.expand`; tensors are contiguous."""
    assert packed.is_contiguous() and out.is_contiguous()
    ranks, blocks, capacity = packed.shape
    sizes = out.numel(), blocks, ranks, capacity
    launching.launch(triton_kernels.expand_kernel, _grid(blocks), packed, index, out, *sizes, warps=_WARPS, **_SHAPE)


def fold(x: Tensor, own: Tensor, sketch: Sketch, out: Tensor) -> None:
    """Compute a sketch as `reference.fold`; tensors are contiguous."""
    assert x.is_contiguous() and out.is_contiguous()
    _by_rows(triton_kernels.fold_kernel, sketch, x, own, sketch.members, out)


def solvable(bits: Tensor, sketch: Sketch) -> Tensor:
    """Return the recoverable entries as `reference.solvable`."""
    state = states_of(bits)
    _peel(state, None, None, sketch)
    return pack_bits((state > 1).view(-1))


def unfold(cells: Tensor, bits: Tensor, sketch: Sketch, estimate: bool, out: Tensor) -> None:
    """Recover entries as `reference.unfold`; tensors are contiguous."""
    assert cells.is_contiguous() and out.is_contiguous()
    state, found = states_of(bits), out.zero_().view(-1, BLOCK)
    _peel(state, cells, found, sketch)
    if estimate:
        found.copy_(torch.where(state == 1, estimates(cells, sketch), found))


def _peel(state: Tensor, cells: Tensor | None, found: Tensor | None, sketch: Sketch) -> None:
    """Peel as `reference._peel`, always with the maximum number of rounds, because the host does not see the states."""
    counts = torch.empty(sketch.rows, BLOCK, dtype=torch.int32, device=state.device)
    _by_rows(triton_kernels.count_kernel, sketch, state, sketch.members, counts)
    # Without values `counts` is a placeholder for these arguments.
    cells, found, has_values = (counts, counts, False) if cells is None or found is None else (cells, found, True)
    blocks = len(state)
    for _ in range(ROUNDS):
        launching.launch(
            triton_kernels.find_kernel,
            (blocks,),
            *(state, sketch.block_rows, sketch.signs, counts, cells, found, blocks),
            warps=_ROW_WARPS,
            BLOCK=BLOCK,
            VALUES=has_values,
        )
        _by_rows(triton_kernels.remove_kernel, sketch, state, sketch.members, counts, cells, found, VALUES=has_values)


def _by_rows(kernel: object, sketch: Sketch, *tensors: Tensor, **constants: bool) -> None:
    """Launch one program per row of cells."""
    most = sketch.members.shape[1]
    launching.launch(kernel, (sketch.rows,), *tensors, most, warps=_ROW_WARPS, BLOCK=BLOCK, **constants)


def _grid(blocks: int) -> tuple[int]:
    return (-(-blocks // _SHAPE["ROWS"]),)

"""The functions of `reference.py` on Triton kernels. Nothing here waits for the device."""

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
_ROW_WARPS = 4  # of a program that has one row


def select(x: Tensor, k: int) -> Tensor:
    """As `reference.select`, of a contiguous tensor."""
    assert x.is_contiguous()
    blocks = -(-x.numel() // BLOCK)
    bits = torch.empty(blocks * BITMAP, dtype=torch.uint8, device=x.device)
    launching.launch(triton_kernels.select_kernel, _grid(blocks), x, bits, x.numel(), blocks, k, warps=_WARPS, **_SHAPE)
    return bits


def pack(x: Tensor, index: Tensor, own: Tensor, capacity: int, out: Tensor) -> None:
    """As `reference.pack`, of contiguous tensors."""
    assert x.is_contiguous() and out.is_contiguous()
    blocks = out.shape[0]
    sizes = x.numel(), blocks, capacity
    launching.launch(triton_kernels.pack_kernel, _grid(blocks), x, index, own, out, *sizes, warps=_WARPS, **_SHAPE)


def expand(packed: Tensor, index: Tensor, out: Tensor) -> None:
    """As `reference.expand`, of contiguous tensors."""
    assert packed.is_contiguous() and out.is_contiguous()
    ranks, blocks, capacity = packed.shape
    sizes = out.numel(), blocks, ranks, capacity
    launching.launch(triton_kernels.expand_kernel, _grid(blocks), packed, index, out, *sizes, warps=_WARPS, **_SHAPE)


def fold(x: Tensor, own: Tensor, sketch: Sketch, out: Tensor) -> None:
    """As `reference.fold`, of contiguous tensors."""
    assert x.is_contiguous() and out.is_contiguous()
    _by_rows(triton_kernels.fold_kernel, sketch, x, own, sketch.members, out)


def solvable(bits: Tensor, sketch: Sketch) -> Tensor:
    """As `reference.solvable`."""
    state = states_of(bits)
    _peel(state, None, None, sketch)
    return pack_bits((state > 1).view(-1))


def unfold(cells: Tensor, bits: Tensor, sketch: Sketch, estimate: bool, out: Tensor) -> None:
    """As `reference.unfold`, of contiguous tensors."""
    assert cells.is_contiguous() and out.is_contiguous()
    state, found = states_of(bits), out.zero_().view(-1, BLOCK)
    _peel(state, cells, found, sketch)
    if estimate:
        found.copy_(torch.where(state == 1, estimates(cells, sketch), found))


def _peel(state: Tensor, cells: Tensor | None, found: Tensor | None, sketch: Sketch) -> None:
    """As `reference._peel`; always so many rounds, as the host does not know when nothing is left."""
    counts = torch.empty(sketch.rows, BLOCK, dtype=torch.int32, device=state.device)
    _by_rows(triton_kernels.count_kernel, sketch, state, sketch.members, counts)
    # Without values their places are taken by what is there anyway.
    cells, found, values = (counts, counts, False) if cells is None or found is None else (cells, found, True)
    blocks = len(state)
    for _ in range(ROUNDS):
        launching.launch(
            triton_kernels.find_kernel,
            (blocks,),
            *(state, sketch.places, sketch.signs, counts, cells, found, blocks),
            warps=_ROW_WARPS,
            BLOCK=BLOCK,
            VALUES=values,
        )
        _by_rows(triton_kernels.remove_kernel, sketch, state, sketch.members, counts, cells, found, VALUES=values)


def _by_rows(kernel: object, sketch: Sketch, *tensors: Tensor, **constants: bool) -> None:
    """A program for every row of cells."""
    most = sketch.members.shape[1]
    launching.launch(kernel, (sketch.rows,), *tensors, most, warps=_ROW_WARPS, BLOCK=BLOCK, **constants)


def _grid(blocks: int) -> tuple[int]:
    return (-(-blocks // _SHAPE["ROWS"]),)

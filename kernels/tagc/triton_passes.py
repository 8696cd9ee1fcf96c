"""The functions of `reference.py` on Triton kernels, without synchronization."""

from functools import partial

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.scape import triton_masks
from torchtitan_scape.kernels.scape.blocks import offset_bytes, offset_code
from torchtitan_scape.kernels.scape.reference import mask_indices
from torchtitan_scape.kernels.tagc import reference, triton_kernels
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK
from torchtitan_scape.kernels.tagc.reference import ROUNDS, Sketch, union_of_bitmaps

_SHAPE = {"ROWS": 4, "BLOCK": BLOCK}
_WARPS = 8  # 512 entries each
_ROW_WARPS = 4  # of a program for one row
_OFFSETS, _DECODED = 1024, 64  # offsets that a program encodes; words of masks that a program decodes


def select(x: Tensor, k: int) -> Tensor:
    """Select as `reference.select`; the tensor is contiguous."""
    assert x.is_contiguous()
    blocks = -(-x.numel() // BLOCK)
    bits = torch.empty(blocks * BITMAP, dtype=torch.uint8, device=x.device)
    launching.launch(triton_kernels.select_kernel, _grid(blocks), x, bits, x.numel(), blocks, k, warps=_WARPS, **_SHAPE)
    return bits


def to_offsets(bits: Tensor, k: int) -> Tensor:
    """Encode as `reference.to_offsets`."""
    blocks = bits.numel() // BITMAP
    code, size = offset_code(k, BLOCK), padded_bytes(offset_bytes(blocks, k, BLOCK))
    offsets = (mask_indices(bits, blocks * BLOCK, blocks * k) % BLOCK).to(torch.int16)
    coded = torch.zeros(size, dtype=torch.uint8, device=bits.device)
    sizes = blocks * k, blocks, size, k, code.nbytes, code.unary, code.low
    grid = (-(-blocks * k // _OFFSETS),)
    launching.launch(triton_masks.encode_offsets_kernel, grid, offsets, coded, *sizes, warps=4, TILE=_OFFSETS)
    return coded


def union_of_offsets(coded: Tensor, blocks: int, k: int) -> Tensor:
    """Decode as `reference.union_of_offsets`; the tensor is contiguous."""
    assert coded.is_contiguous()
    ranks, size = coded.shape
    code = offset_code(k, BLOCK)
    masks = torch.empty(ranks, blocks * BITMAP, dtype=torch.uint8, device=coded.device)
    words = masks.numel() // 4
    launching.launch(
        triton_masks.decode_offsets_kernel,
        (-(-words // _DECODED),),
        *(coded, masks, masks, masks, words, blocks, size, k, code.nbytes, code.unary, code.low),
        warps=1,
        BLOCK=BLOCK,
        UNIT=32,
        TILE=_DECODED,
        LISTS=False,
    )
    return union_of_bitmaps(masks)


def pack(
    x: Tensor,
    index: Tensor,
    own: Tensor,
    capacity: int,
    out: Tensor,
    rest: Tensor | None = None,
    applied: Tensor | None = None,
) -> None:
    """Pack as `reference.pack`; tensors are contiguous."""
    assert x.is_contiguous() and out.is_contiguous()
    blocks = out.shape[0]
    launching.launch(
        triton_kernels.pack_kernel,
        _grid(blocks),
        x,
        index,
        own,
        out,
        x if rest is None else rest,
        index if applied is None else applied,
        x.numel(),
        blocks,
        capacity,
        warps=_WARPS,
        moved=x.nbytes if rest is None else 0,
        GATED=applied is not None,
        **_SHAPE,
    )


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


def peel(state: Tensor, cells: Tensor | None, values: Tensor | None, sketch: Sketch) -> None:
    """Peel as `reference.peel`, always with the maximum number of rounds, because the host does not see the states."""
    assert all(each is None or each.is_contiguous() for each in (cells, values))
    counts = torch.empty(sketch.rows, BLOCK, dtype=torch.int32, device=state.device)
    _by_rows(triton_kernels.count_kernel, sketch, state, sketch.members, counts)
    # Without values `counts` is a placeholder for these arguments.
    cells, values, has_values = (counts, counts, False) if cells is None or values is None else (cells, values, True)
    blocks = len(state)
    for _ in range(ROUNDS):
        launching.launch(
            triton_kernels.find_kernel,
            (blocks,),
            *(state, sketch.block_rows, sketch.signs, counts, cells, values, blocks),
            warps=_ROW_WARPS,
            BLOCK=BLOCK,
            VALUES=has_values,
        )
        _by_rows(triton_kernels.remove_kernel, sketch, state, sketch.members, counts, cells, values, VALUES=has_values)


solvable, unfold = partial(reference.solvable, peel=peel), partial(reference.unfold, peel=peel)


def _by_rows(kernel: object, sketch: Sketch, *tensors: Tensor, **constants: bool) -> None:
    """Launch one program per row of cells."""
    most = sketch.members.shape[1]
    launching.launch(kernel, (sketch.rows,), *tensors, most, warps=_ROW_WARPS, BLOCK=BLOCK, **constants)


def _grid(blocks: int) -> tuple[int]:
    return (-(-blocks // _SHAPE["ROWS"]),)

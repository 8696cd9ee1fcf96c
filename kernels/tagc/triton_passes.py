"""The functions of `reference.py` on Triton kernels, without synchronization."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.scape import triton_masks
from torchtitan_scape.kernels.scape.blocks import offset_bytes, offset_code
from torchtitan_scape.kernels.scape.reference import mask_indices
from torchtitan_scape.kernels.tagc import triton_kernels
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK
from torchtitan_scape.kernels.tagc.reference import union_of_bitmaps

_SHAPE = {"ROWS": 4, "BLOCK": BLOCK}
_WARPS = 8  # 512 entries each
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


def _grid(blocks: int) -> tuple[int]:
    return (-(-blocks // _SHAPE["ROWS"]),)

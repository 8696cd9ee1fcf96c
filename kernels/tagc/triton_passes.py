"""The functions of `reference.py` on Triton kernels, bitwise equal, without synchronization.

A program processes ROWS blocks of BLOCK entries, as [ROWS, BLOCK]. Sums are in the order of ranks or blocks, without
atomics on floats. No result depends on the warp size. `enable_fp_fusion` is off at every launch.

Memory traffic per entry, with a fraction u in the index: selection reads 4 bytes; packing reads 4 and writes 4 + 4u;
expansion reads 4u per rank and writes 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.scape import triton_masks
from torchtitan_scape.kernels.scape.blocks import offset_bytes, offset_code
from torchtitan_scape.kernels.scape.reference import mask_indices
from torchtitan_scape.kernels.scape.triton_tiles import select_in_blocks, to_bytes
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK
from torchtitan_scape.kernels.tagc.reference import union_of_bitmaps


@triton.jit
def tile_of(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the blocks of this program, int64 [ROWS, 1], and the offsets in a block, [1, BLOCK]."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return block, tl.arange(0, BLOCK)[None, :]


@triton.jit
def bits_at(bits, entry, inside):
    """Return the packed bits of entries, int32; 0 where not `inside`."""
    return (tl.load(bits + (entry >> 3), mask=inside, other=0).to(tl.int32) >> (entry & 7).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["n", "blocks", "k"])
def select_kernel(x, bits, n, blocks, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the bitmap of the k largest |x| of each block."""
    block, byte = tile_of(ROWS, BLOCK // 8)
    byte += block * (BLOCK // 8)
    entry = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    # The bits of magnitudes are ordered as the numbers. The largest key is excluded, as the search needs one above all.
    keys = tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    packed = to_bytes(select_in_blocks(keys, k))
    tl.store(bits + byte, packed.to(tl.uint8), mask=block < blocks)


@triton.jit(do_not_specialize=["n", "blocks", "capacity"])
def pack_kernel(
    x,
    index,
    own,
    packed,
    rest,
    applied,
    n,
    blocks,
    capacity,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Copy the values at the index from x to `packed`, followed by zeros, and all others to `rest`.

    GATED: write `rest` only if `applied`.
    """
    block, offset = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + offset
    exists = block + tl.zeros_like(offset) < blocks
    bits = bits_at(index, entry, exists)
    position = tl.cumsum(bits, 1) - bits
    valid = (bits != 0) & (position < capacity)
    sent = valid & (bits_at(own, entry, exists) != 0)
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    start = packed + block * capacity
    tl.store(start + position, tl.where(sent, values, 0.0), mask=valid)
    unused = exists & (offset >= tl.sum(bits, 1)[:, None]) & (offset < capacity)
    tl.store(start + offset, tl.zeros_like(values), mask=unused)
    written = entry < n
    if GATED:
        written = entry < tl.where(tl.load(applied) != 0, n, 0)
    tl.store(rest + entry, tl.where(sent, 0.0, values), mask=written)


@triton.jit(do_not_specialize=["n", "blocks", "ranks", "capacity"])
def expand_kernel(packed, index, out, n, blocks, ranks, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of all ranks' values at the index, in rank order; zero elsewhere."""
    block, offset = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + offset
    bits = bits_at(index, entry, block + tl.zeros_like(offset) < blocks)
    position = tl.cumsum(bits, 1) - bits
    valid = (bits != 0) & (position < capacity)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in range(ranks):
        total += tl.load(packed + (rank * blocks + block) * capacity + position, mask=valid, other=0.0)
    tl.store(out + entry, total, mask=entry < n)


_SHAPE = {"ROWS": 4, "BLOCK": BLOCK}
_WARPS = 8  # 512 entries each
_OFFSETS, _DECODED = 1024, 64  # offsets that a program encodes; words of masks that a program decodes


def select(x: Tensor, k: int) -> Tensor:
    """Select as `reference.select`; the tensor is contiguous."""
    assert x.is_contiguous()
    blocks = -(-x.numel() // BLOCK)
    bits = torch.empty(blocks * BITMAP, dtype=torch.uint8, device=x.device)
    launching.launch(select_kernel, _grid(blocks), x, bits, x.numel(), blocks, k, warps=_WARPS, **_SHAPE)
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
        pack_kernel,
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
    launching.launch(expand_kernel, _grid(blocks), packed, index, out, *sizes, warps=_WARPS, **_SHAPE)


def _grid(blocks: int) -> tuple[int]:
    return (-(-blocks // _SHAPE["ROWS"]),)

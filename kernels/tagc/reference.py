"""TAGC passes in plain PyTorch: the specification, and the CPU implementation.

Entries are divided into blocks of 1024; a short last block is padded with zeros. Bitmaps are packed, entry i in bit
i % 8 of byte i // 8, and have whole blocks: uint8 (blocks * 128,). The index is the bitmap that all ranks share.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.common.tensors import add_in_order_, masked_copy_
from torchtitan_scape.kernels.scape.blocks import offset_bytes
from torchtitan_scape.kernels.scape.reference import (
    decode_offsets,
    encode_offsets,
    mask_indices,
    offsets_to_mask,
    select_rows,
    unpack_bits,
)
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK

# -------------------------------------------------------------------------------- selected indices


def union_of_bitmaps(maps: Tensor) -> Tensor:
    """Return the bitwise OR of the rows of uint8 (ranks, bytes), uint8 (bytes,)."""
    while len(maps) > 1:  # by halves, so that few launches suffice
        half = len(maps) // 2
        combined = maps[:half] | maps[half : 2 * half]
        maps = torch.cat((combined, maps[2 * half :])) if len(maps) % 2 else combined
    return maps[0]


def select(x: Tensor, k: int) -> Tensor:
    """Return the bitmap of the k largest |x| of each block; ties go to the lower index. x: FP32 (n,)."""
    return offsets_to_mask(select_rows(in_blocks(x), k), BLOCK)


def to_offsets(bits: Tensor, k: int) -> Tensor:
    """Encode a bitmap with k set bits per block as offsets. The length is `formats.index_bytes`."""
    blocks = bits.numel() // BITMAP
    coded = encode_offsets(mask_indices(bits, blocks * BLOCK, blocks * k).view(blocks, k) % BLOCK, BLOCK)
    return pad(coded, (0, padded_bytes(coded.numel()) - coded.numel()))


def union_of_offsets(coded: Tensor, blocks: int, k: int) -> Tensor:
    """Decode the offsets of all ranks, uint8 (ranks, bytes), and return the bitwise OR of their bitmaps."""
    rows = coded[:, : offset_bytes(blocks, k, BLOCK)]
    together = max(1, BLOCK // k)  # ranks that are decoded at once; more need more memory than the entries themselves
    masks = []
    for part in rows.split(together):
        offsets = decode_offsets(part.reshape(-1), len(part) * blocks, k, BLOCK).view(len(part), blocks, k)
        masks.append(offsets_to_mask(offsets.transpose(0, 1).reshape(blocks, -1), BLOCK))
    return union_of_bitmaps(torch.stack(masks))


def pack(
    x: Tensor,
    index: Tensor,
    own: Tensor,
    capacity: int,
    out: Tensor,
    rest: Tensor | None = None,
    applied: Tensor | None = None,
) -> None:
    """Move the entries of x at the index to a packed payload. Every entry is in exactly one of both, unchanged.

    Args:
        x: FP32 (n,); sent entries are set to zero, unless `rest` is given.
        index: Bitmap of all ranks. The first `capacity` entries of each block are packed.
        own: Bitmap of the entries that this rank sends; `index` itself to send all of them.
        capacity: Packed entries of a block.
        out: FP32 (blocks, capacity), written: the values of a block in ascending order of their indices, then zeros.
        rest: FP32 (n,), becomes x without the sent entries if `applied`.
        applied: bool ().
    """
    packed, position = packed_positions(index, capacity)
    sent = packed if own is index else packed & unpack_bits(own, packed.numel()).view(packed.shape)
    values = in_blocks(x)
    # One additional slot receives the entries that are not packed.
    slots = out.new_zeros(out.shape[0], capacity + 1)
    slots.scatter_(1, torch.where(packed, position, capacity), torch.where(sent, values, 0.0))
    out.copy_(slots[:, :capacity])
    left = torch.where(sent, 0.0, values).view(-1)[: x.numel()]
    if rest is None or applied is None:
        x.copy_(left)
    else:
        masked_copy_(rest, left, applied)


def expand(packed: Tensor, index: Tensor, out: Tensor) -> None:
    """Write the sum of packed payloads to `out`, FP32 (n,), at the index, and zero elsewhere.

    packed: FP32 (ranks, blocks, capacity), payloads of `pack`, which are added in rank order.
    """
    total = torch.zeros_like(packed[0])
    add_in_order_(total, packed)
    valid, position = packed_positions(index, packed.shape[2])
    values = torch.where(valid, total.gather(1, position.clamp_(max=packed.shape[2] - 1)), 0.0)
    out.copy_(values.view(-1)[: out.numel()])


# ----------------------------------------------------------------------------------------------------- helpers


def in_blocks(x: Tensor) -> Tensor:
    """Return x (n,) as (blocks, 1024), a view if no padding is needed."""
    return pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def packed_positions(index: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return for every entry whether it is packed, bool, and its position in its block, int64 (blocks, 1024)."""
    bits = unpack_bits(index, 8 * index.numel()).view(-1, BLOCK)
    position = bits.cumsum(1).sub_(1)
    return bits & (position < capacity), position.clamp_(min=0)

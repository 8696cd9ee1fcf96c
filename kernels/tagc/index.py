"""Encoding of the selected indices that ranks exchange, and their union. Bitmaps are as in `reference`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.common.launching import to_device
from kernels.common.wire import padded_bytes
from kernels.scape.blocks import offset_bytes
from kernels.scape.mask_code import decode_offsets, encode_offsets
from kernels.scape.reference import mask_indices, offsets_to_mask, pack_bits, unpack_bits
from kernels.tagc.formats import BITMAP, BLOCK

# Thresholds of the selection "table", from the published code.
THRESHOLDS = (1e-20, 1e-15, 1e-10, 1e-8, *(m * 10.0**e for e in range(-7, 0) for m in (1.0, 2.0, 5.0)))


def union_of_bitmaps(maps: Tensor) -> Tensor:
    """Return the bitwise OR of the rows of uint8 (ranks, bytes), uint8 (bytes,)."""
    while len(maps) > 1:  # by halves, so that few launches suffice
        half = len(maps) // 2
        combined = maps[:half] | maps[half : 2 * half]
        maps = torch.cat((combined, maps[2 * half :])) if len(maps) % 2 else combined
    return maps[0].clone()


def sum_bytes(maps: Tensor) -> Tensor:
    """Return the sum of the rows of uint8 (ranks, bytes) modulo 256, uint8 (bytes,).

    The published code applies it to bitmaps, where a bit that two ranks set carries into the next bit.
    """
    return maps.sum(0, dtype=torch.uint8)


def to_nibbles(bits: Tensor) -> Tensor:
    """Expand a bitmap to four bits per entry, uint8 (4 * bytes,), whose sum counts up to 15 ranks."""
    pairs = unpack_bits(bits, 8 * bits.numel()).view(torch.uint8).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def from_nibbles(counts: Tensor) -> Tensor:
    """Return the bitmap of the entries with a nonzero count."""
    return pack_bits(torch.stack((counts & 15, counts >> 4), 1).view(-1) != 0)


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


def select_above(x: Tensor, sparsity: float) -> Tensor:
    """Return the bitmap of the entries of x, FP32 (blocks * 1024,), with |x| >= a threshold.

    The threshold is the largest of `THRESHOLDS` with less than a fraction `sparsity` of the entries below it. If there
    is none, all nonzero entries are selected.
    """
    thresholds = to_device(torch.tensor(THRESHOLDS, dtype=torch.float32), x.device)
    reached = torch.bucketize(x.abs(), thresholds, out_int32=True, right=True)  # number of thresholds <= |x|
    below = torch.stack([(reached <= i).sum() for i in range(len(THRESHOLDS))])
    valid = (below < sparsity * x.numel()).sum()  # number of thresholds that satisfy the condition
    return pack_bits(torch.where(valid > 0, reached >= valid, x != 0))

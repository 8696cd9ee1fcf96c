"""What ranks tell each other of the places they chose, and what becomes of it. Bits as in `reference`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.common.launching import to_device
from kernels.common.wire import padded_bytes
from kernels.scape.blocks import offset_bytes
from kernels.scape.mask_code import decode_offsets, encode_offsets
from kernels.scape.reference import mask_indices, offsets_to_mask, pack_bits, unpack_bits
from kernels.tagc.formats import BITMAP, BLOCK

# Magnitudes from which "table" chooses: those of the published code.
THRESHOLDS = (1e-20, 1e-15, 1e-10, 1e-8, *(m * 10.0**e for e in range(-7, 0) for m in (1.0, 2.0, 5.0)))


def union_of_bitmaps(maps: Tensor) -> Tensor:
    """uint8 (bytes,): what any row of uint8 (ranks, bytes) has set."""
    found = maps[0].clone()
    for one in maps[1:]:
        found |= one
    return found


def sum_bytes(maps: Tensor) -> Tensor:
    """uint8 (bytes,): the rows' sums modulo 256. As published for bits, where a bit that two ranks set carries on."""
    found = maps[0].clone()
    for one in maps[1:]:
        found += one
    return found


def to_nibbles(bits: Tensor) -> Tensor:
    """uint8 (4 * bytes,): four bits an entry, which count up to 15 ranks that set it."""
    pairs = unpack_bits(bits, 8 * bits.numel()).view(torch.uint8).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def from_nibbles(counts: Tensor) -> Tensor:
    """Bits of the entries that any rank counted."""
    return pack_bits(torch.stack((counts & 15, counts >> 4), 1).view(-1) != 0)


def to_offsets(bits: Tensor, k: int) -> Tensor:
    """The code of bits with k set in every block, as on the wire; its length is `formats.index_bytes`."""
    blocks = bits.numel() // BITMAP
    coded = encode_offsets(mask_indices(bits, blocks * BLOCK, blocks * k).view(blocks, k) % BLOCK, BLOCK)
    return pad(coded, (0, padded_bytes(coded.numel()) - coded.numel()))


def union_of_offsets(coded: Tensor, blocks: int, k: int) -> Tensor:
    """Bits that any of the codes, uint8 (ranks, bytes), has set."""
    told = coded[:, : offset_bytes(blocks, k, BLOCK)]
    return union_of_bitmaps(
        torch.stack([offsets_to_mask(decode_offsets(one, blocks, k, BLOCK), BLOCK) for one in told])
    )


def select_above(x: Tensor, sparsity: float) -> Tensor:
    """Bits of |x| from a threshold on: the largest of `THRESHOLDS` that leaves less than this share below it; of all
    that is not zero where there is none. x: FP32 (blocks * 1024,)."""
    thresholds = to_device(torch.tensor(THRESHOLDS, dtype=torch.float32), x.device)
    reached = torch.bucketize(x.abs(), thresholds, out_int32=True, right=True)  # so many of them
    below = torch.stack([(reached <= i).sum() for i in range(len(THRESHOLDS))])
    chosen = (below < sparsity * x.numel()).sum()  # so many of them will do
    return pack_bits(torch.where(chosen > 0, reached >= chosen, x != 0))

"""Encoding of the selected indices that ranks exchange, and their union. Bitmaps are as in `reference`."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.kernels.scape.reference import pack_bits, unpack_bits

# Thresholds of the selection "table", from the published code.
THRESHOLDS = (1e-20, 1e-15, 1e-10, 1e-8, *(m * 10.0**e for e in range(-7, 0) for m in (1.0, 2.0, 5.0)))


def union_of_bitmaps(maps: Tensor) -> Tensor:
    """Return the bitwise OR of the rows of uint8 (ranks, bytes), uint8 (bytes,)."""
    while len(maps) > 1:  # by halves, so that few launches suffice
        half = len(maps) // 2
        combined = maps[:half] | maps[half : 2 * half]
        maps = torch.cat((combined, maps[2 * half :])) if len(maps) % 2 else combined
    return maps[0]


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


def select_above(rows: Tensor, sparsity: float) -> Tensor:
    """Return the bitmaps of the entries of each row, FP32 (rows, blocks * 1024), with |x| >= a threshold of the row.

    The threshold is the largest of `THRESHOLDS` with less than a fraction `sparsity` of the row's entries below it. If
    there is none, all nonzero entries are selected.

    Returns:
        uint8 (rows * blocks * 128,).
    """
    thresholds = to_device(torch.tensor(THRESHOLDS, dtype=torch.float32, device="cpu"), rows.device)
    reached = torch.bucketize(rows.abs(), thresholds, out_int32=True, right=True)  # number of thresholds <= |x|
    # Binary search for the number of thresholds that satisfy the condition, because the entries below them increase.
    valid = torch.zeros(len(rows), 1, dtype=torch.int32, device=rows.device)
    for step in (16, 8, 4, 2, 1):
        below = (reached < valid + step).sum(1, keepdim=True)
        # As FP32: PyTorch compares integers and a number in the default dtype.
        valid += (below.float() < sparsity * rows.shape[1]).int() * step
    return pack_bits(torch.where(valid > 0, reached >= valid, rows != 0).view(-1))

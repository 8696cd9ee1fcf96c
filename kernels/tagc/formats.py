"""Sizes of TAGC's messages. Plain arithmetic: no torch.

Entries are divided into blocks of 1024, and each rank selects the same number of entries in every block. The union of
the selections of S ranks has at most S times as many entries, so that all sizes are known in advance.
"""

from torchtitan_scape.kernels.codec.formats import ALIGNED_BYTES, padded_bytes
from torchtitan_scape.kernels.scape.blocks import entries_per_block, offset_bytes

BLOCK = 1024
BITMAP = BLOCK // 8  # bytes of the bitmap of a block


def capacity(density: float, ranks: int) -> int:
    """Return the packed entries of a block: the selections of all ranks, padded to 16 bytes of FP32."""
    return min(BLOCK, padded_bytes(4 * ranks * entries_per_block(density, BLOCK)) // 4)


def sends_offsets(density: float, ranks: int) -> bool:
    """Return True if an all-gather of encoded offsets is shorter than an all-reduce (bitwise OR) of bitmaps.

    A rank sends (S-1) times its offsets, or 2 (S-1)/S times its bitmap.
    """
    return ranks * offset_bytes(1, entries_per_block(density, BLOCK), BLOCK) < 2 * BITMAP


def index_bytes(density: float, blocks: int) -> int:
    """Return one rank's bytes of encoded offsets, padding included."""
    return padded_bytes(offset_bytes(blocks, entries_per_block(density, BLOCK), BLOCK))


def bitmap_bytes(blocks: int, ranks: int) -> int:
    """Return the bytes of the bitmap, padded so that the slice of each rank is aligned."""
    step = ALIGNED_BYTES * ranks
    return -(-blocks * BITMAP // step) * step

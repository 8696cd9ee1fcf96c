"""How long TAGC's messages are. Plain arithmetic: no torch.

Entries go in blocks of 1024, of which each rank chooses as many. So a union of S choices has at most S times as many,
and all sizes are known beforehand.
"""

import math

from kernels.common.wire import ALIGNED, padded_bytes
from kernels.scape.blocks import entries_per_block, offset_bytes

BLOCK = 1024
BITMAP = BLOCK // 8  # bytes of a block's bits


def capacity(density: float, ranks: int) -> int:
    """Entries of a block that travel packed, where each of so many ranks chooses its own: whole 16 bytes of FP32."""
    return min(BLOCK, padded_bytes(4 * ranks * entries_per_block(density, BLOCK)) // 4)


def sends_offsets(density: float, ranks: int) -> bool:
    """Whether coded offsets, gathered from all ranks, are shorter than bits that owners unite and send back.

    A rank sends (S-1) times its own offsets, or 2 (S-1)/S times its own bits.
    """
    return ranks * offset_bytes(1, entries_per_block(density, BLOCK), BLOCK) < 2 * BITMAP


def index_bytes(density: float, blocks: int) -> int:
    """Own bytes of the offsets that are gathered."""
    return padded_bytes(offset_bytes(blocks, entries_per_block(density, BLOCK), BLOCK))


def bitmap_bytes(blocks: int, ranks: int) -> int:
    """Own bytes of the bits that are united: filled up, so that each rank's share is aligned."""
    step = ALIGNED * ranks
    return -(-blocks * BITMAP // step) * step


def sketch_rows(blocks: int, ratio: float) -> int:
    """Rows of 1024 cells that `blocks` blocks are added into; each of the three hashes has a third of them."""
    return max(3, math.ceil(blocks / ratio))

"""Count of the entries that enter each row and column, from the packed masks, in one launch."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.kernels.scape import reference, triton_masks
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask
from torchtitan_scape.kernels.scape.visits import VisitRates

# Tile of `entering_kernel`: at most 255 rows, so that column sums fit into a byte. A row has 8 columns per byte, so a
# high tile has fewer sums to add.
_ROWS, _STEP, _BYTES = 128, 4, 64


class EnteringCount:
    """Sets `visits.counts`.

    Tensors whose rows begin inside a byte of the mask are counted by PyTorch, one by one.
    """

    def __init__(self, layout: BlockLayout, visits: VisitRates) -> None:
        self._layout, self._visits = layout, visits
        tiles: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}  # by alignment
        for i, columns in enumerate(visits.columns):
            if columns % 8:
                continue
            width, height = columns // 8, visits.rows[i]
            start = layout.first_block[i] * layout.block_size // 8
            rows = tiles[start % 16 == width % 16 == 0]
            for row in range(0, height, _ROWS):
                for byte in range(0, width, _BYTES):
                    first, second = visits.starts[2 * i] + row, visits.starts[2 * i + 1] + 8 * byte
                    rows.append((start + row * width + byte, width, height - row, width - byte, first, second))
        self._tiles = {
            is_aligned: to_device(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 6), visits.counts.device)
            for is_aligned, rows in tiles.items()
        }

    def __call__(self, in_use: Mask, previous: Mask) -> None:
        visits = self._visits
        visits.counts.zero_()
        for is_aligned, tiles in self._tiles.items():
            launching.launch(
                triton_masks.entering_kernel,
                (len(tiles),),
                tiles,
                in_use.bits,
                previous.bits,
                visits.counts,
                warps=1,
                ROWS=_ROWS,
                STEP=_STEP,
                BYTES=_BYTES,
                ALIGNED=is_aligned,
            )
        for i, columns in enumerate(visits.columns):
            if columns % 8:
                fresh = reference.unpack_bits(self._entering(in_use, previous, i), visits.rows[i] * columns)
                for counts, axis in zip(visits.of(visits.counts, i), (1, 0), strict=True):
                    counts.copy_(fresh.view(-1, columns).sum(axis))

    def _entering(self, in_use: Mask, previous: Mask, tensor: int) -> Tensor:
        used, held = (self._layout.bits(mask, tensor) for mask in (in_use, previous))
        assert used is not None and held is not None
        return used & ~held

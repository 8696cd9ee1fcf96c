"""Count of the entries that enter each row and column, from the packed masks, in one launch."""

import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import to_device
from kernels.scape import reference, triton_masks
from kernels.scape.blocks import BlockLayout, Mask
from kernels.scape.visits import VisitRates

# Tile of `entering_kernel`: at most 255 rows, so that column sums fit into a byte.
_ROWS, _BYTES = 64, 128


class EnteringCount:
    """Sets `visits.counts`.

    Tensors whose rows begin inside a byte of the mask are counted by PyTorch, one by one.
    """

    def __init__(self, layout: BlockLayout, visits: VisitRates) -> None:
        self._layout, self._visits = layout, visits
        rows = []
        for i, columns in enumerate(visits.columns):
            if columns % 8:
                continue
            width, height = columns // 8, visits.rows[i]
            start = layout.first_block[i] * layout.block_size // 8
            for row in range(0, height, _ROWS):
                for byte in range(0, width, _BYTES):
                    first, second = visits.starts[2 * i] + row, visits.starts[2 * i + 1] + 8 * byte
                    rows.append((start + row * width + byte, width, height - row, width - byte, first, second))
        self._tiles = to_device(torch.tensor(rows, dtype=torch.int64).view(-1, 6), visits.counts.device)

    def __call__(self, in_use: Mask, previous: Mask) -> None:
        visits = self._visits
        visits.counts.zero_()
        launching.launch(
            triton_masks.entering_kernel,
            (len(self._tiles),),
            self._tiles,
            in_use.bits,
            previous.bits,
            visits.counts,
            warps=4,
            ROWS=_ROWS,
            BYTES=_BYTES,
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

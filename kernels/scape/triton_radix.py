"""The paper's selection, the k largest of each tensor's part of the owned run, by radix: no sort, no host."""

import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import Range, Table, Tiles, as_flag, to_device
from kernels.scape import triton_select
from kernels.scape.blocks import BlockLayout, entries_per_block

_ROUNDS = ((20, 11), (10, 10), (0, 10))  # shift and width of the digits of a 31-bit key
_BINS = 2048


class RadixSelection:
    """Selects in mt, FP32, which lies where the pointer table says the gradients are.

    runs: the replicas whose runs are selected in, their bits one behind the other.
    """

    def __init__(self, layout: BlockLayout, tiles: Tiles, runs: range) -> None:
        self._layout, self._tiles, self._runs = layout, tiles, runs
        ranges: list[Range] = []
        self._sizes: list[int] = []
        for run in runs:
            for tensor in range(len(layout.sizes)):
                start, end = layout.owned(tensor, run)
                if end > start:
                    ranges.append((tensor, start // layout.block_size, -(-end // layout.block_size)))
                    self._sizes.append(end - start)
        if not ranges:
            return
        device = tiles.device
        lists = [tiles.lists((r,), ((False, None),) * len(tiles.sizes))[0][0] for r in ranges]
        lengths = torch.tensor([len(one) for one in lists])
        begins = lengths.cumsum(0) - lengths
        self._listed = torch.cat(lists)
        self._segment = to_device(torch.arange(len(ranges), dtype=torch.int32).repeat_interleave(lengths), device)
        self._first_tile = to_device(begins.repeat_interleave(lengths), device)
        self._wanted = Table(len(ranges), 1, torch.int32, device)

    def __call__(self, table: Tensor, density: float, applied: Tensor, bitmap: Tensor) -> Tensor:
        """Fills the bitmap of the runs, uint8 (runs * run_blocks * block_size / 8,), zeros at first; returns it."""
        layout, tiles, device = self._layout, self._tiles, self._tiles.device
        if not self._sizes:
            return bitmap
        wanted = self._wanted.set([[entries_per_block(density, n)] for n in self._sizes]).clone()
        prefixes, ties = torch.zeros_like(wanted), torch.zeros_like(wanted)
        histograms = torch.zeros(len(self._sizes), _BINS, dtype=torch.int32, device=device)
        listed, segment, grid = self._listed, self._segment, (len(self._listed),)
        on_tiles = dict(warps=tiles.warps, **tiles.shape)
        for shift, bits in _ROUNDS:
            digit = dict(BITS=bits, BINS=_BINS)
            launching.launch(
                triton_select.histogram_kernel,
                grid,
                listed,
                table,
                segment,
                prefixes,
                histograms,
                **on_tiles,
                SHIFT=shift,
                **digit,
            )
            launching.launch(
                triton_select.pick_kernel, (len(self._sizes),), histograms, prefixes, wanted, ties, warps=4, **digit
            )
        counts = torch.empty(len(listed), dtype=torch.int32, device=device)
        found = (table, segment, prefixes, wanted, ties)
        launching.launch(triton_select.count_ties_kernel, grid, listed, *found, counts, **on_tiles)
        before = counts.cumsum(0) - counts
        before -= before[self._first_tile]
        own_block, flag = self._runs.start * layout.run_blocks, as_flag(applied)
        launching.launch(triton_select.mark_kernel, grid, listed, *found, before, bitmap, own_block, flag, **on_tiles)
        return bitmap

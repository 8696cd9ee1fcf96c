"""The payload in the gradients' storage as a source of chunks, on a Triton kernel."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from torch import Tensor

from torchtitan_scape.kernels.scape import triton_masks
from torchtitan_scape.kernels.scape.blocks import entries_per_block


class InPlaceEntries:
    """`topology.chunks.Source` of a payload in the gradients' storage."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes
        self.entries, self.device = sum(passes.counts), passes.device
        self._ends = list(accumulate(passes.counts))
        tiles = [-(-end // passes.tiles.rows) for _, _, end in passes.all]
        self._first_tile = [0, *accumulate(tiles)]
        self._per_block = entries_per_block(passes.step.in_use.density, passes.layout.block_size)
        # All tiles, in tensor order.
        ((self._tiles, _, _),) = passes.tiles.lists(passes.all, passes.any_kinds)

    def fill(self, chunk: Tensor, first: int) -> None:
        """Copy payload[first : first + len(chunk)] to `chunk`."""
        self._move(chunk, first, True)

    def store(self, chunk: Tensor, first: int) -> None:
        """Copy `chunk` to payload[first : first + len(chunk)]."""
        self._move(chunk, first, False)

    def _move(self, chunk: Tensor, first: int, to_chunk: bool) -> None:
        begin, end = self._tile_of(first), self._tile_of(first + chunk.numel() - 1)
        listed = self._tiles[begin.start : end.stop]
        self._passes.launch(
            triton_masks.move_kernel,
            self._passes.tiles,
            listed,
            chunk,
            first,
            chunk.numel(),
            form="in place",
            TO_CHUNK=to_chunk,
        )

    def _tile_of(self, position: int) -> range:
        """Return the tile that contains this payload entry, as a range of length one."""
        p = self._passes
        tensor = bisect_right(self._ends, position)
        tiles = range(self._first_tile[tensor], self._first_tile[tensor + 1])
        per_tile = p.tiles.rows * (self._per_block if tensor < p.sparsified else p.layout.block_size)
        start = self._ends[tensor] - p.counts[tensor]
        return tiles[(position - start) // per_tile :][:1]

"""Masked gradients as the payload of an exchange, without a separate buffer: Triton kernel and its launches.

A mask may have any number of entries in a block. The specification is `radius.method.Radius._exchange_masked`.

Memory traffic per entry at density d: the first pass reads gradient and residual and writes both, and writes the
payload (16 + 4d bytes); the last pass reads the payload and writes the gradient, which is zero outside the mask
(4 + 4d). Both read the mask (1/8).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import DeviceTable, Range, TileSchedule, aligned, to_device
from torchtitan_scape.kernels.common.triton_common import (
    FIRST_BLOCK,
    PARAMETER,
    PAYLOAD,
    STATE,
    bits_of_units,
    cell,
    count_bits,
    entries_of_units,
    pointer,
    spread_units,
    table_row,
    tile_of,
)

_BLOCK, _WARP = 2048, 256  # entries of a tile and of a warp


@triton.jit
def fill_tile(gradients, residuals, has_residual, chunk, at, local, used, inside, applied, factor):
    """Copy the gradients in the mask to `chunk`, and move those outside it to the residuals if `applied`."""
    gradient = tl.load(gradients + local, mask=inside, other=0.0) * factor
    kept = inside & (has_residual.to(tl.int32) + tl.zeros_like(local) != 0)
    residual = tl.load(residuals + local, mask=kept, other=0.0)
    tl.store(chunk + at, gradient, mask=inside & used)
    tl.store(gradients + local, tl.where(used, gradient, 0.0), mask=inside)
    is_kept = tl.where(used, 0, applied) != 0
    tl.store(residuals + local, tl.where(is_kept, gradient + residual, residual), mask=kept)


@triton.jit
def store_tile(gradients, chunk, at, local, used, inside, divisor):
    """Copy `chunk`, divided, to the gradients in the mask; those outside it are zero."""
    total = tl.load(chunk + at, mask=inside & used, other=0.0)
    tl.store(gradients + local, tl.math.div_rn(total, tl.zeros_like(total) + divisor), mask=inside)


@triton.jit(do_not_specialize=["factor", "divisor", "chunk_first", "chunk_entries"])
def masked_kernel(
    tiles,
    table,
    addresses,
    positions,
    chunk,
    applied,
    factor,
    divisor,
    chunk_first,
    chunk_entries,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    TO_CHUNK: tl.constexpr,
):
    """Process payload entries [chunk_first, chunk_first + chunk_entries), and entries outside the mask before them.

    TO_CHUNK: multiply gradients by `factor`, and copy those in the mask to `chunk`; outside it set them to zero, after
    adding them to the residual if `applied`. Otherwise divide `chunk` by `divisor`, and copy it to the gradients in the
    mask. A tensor without a residual has no mask: all its entries are in the payload. Entries after the last one in the
    mask of a tensor belong to the chunk of that one. positions: int64, first payload entry of every tile, and the end.
    ROWS is 1. Only tiles at the ends of a chunk have narrow loads and stores.
    """
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    at_tile = positions + cell(table, tensor, FIRST_BLOCK) + row
    last = cell(table, tensor, PAYLOAD) - 1 - chunk_first
    base, following = tl.load(at_tile) - chunk_first, tl.load(at_tile + 1) - chunk_first
    if (tl.minimum(base, last) >= chunk_entries) | (tl.minimum(following, last) < 0):
        return
    has_residual = cell(table, tensor, STATE) != 0
    mask = pointer(table, tensor, PARAMETER, tl.uint8, False)
    bits = bits_of_units(mask, row, left, has_residual, SHAPE)
    counts = count_bits(bits)
    before = tl.cumsum(counts, 1) - counts
    local, inside = entries_of_units(left, SHAPE, ALIGNED_TILE)
    used = spread_units(bits, WIDTH)
    lower = (1 << tl.arange(0, WIDTH)[None, None, :]) - 1
    at = base + before[:, :, None] + count_bits(bits[:, :, None] & lower)
    gradients = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED_TILE:
        gradients = tl.multiple_of(gradients, 16)
    gradients += first
    residuals = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    is_applied = tl.load(applied).to(tl.int32)
    complete = (tl.minimum(base, last) >= 0) & (tl.minimum(following, last) < chunk_entries)
    if complete:
        if TO_CHUNK:
            fill_tile(gradients, residuals, has_residual, chunk, at, local, used, inside, is_applied, factor)
        else:
            store_tile(gradients, chunk, at, local, used, inside, divisor)
    else:
        belongs_at = tl.minimum(at, last)
        inside = inside & (belongs_at >= 0) & (belongs_at < chunk_entries)
        if TO_CHUNK:
            fill_tile(gradients, residuals, has_residual, chunk, at, local, used, inside, is_applied, factor)
        else:
            store_tile(gradients, chunk, at, local, used, inside, divisor)


class MaskedTensors:
    """Tables of tensors and their masks for `MaskedPayload`. Valid until a mask changes.

    Args:
        masks: Packed bits of every tensor, uint8 (ceil(n / 8),).
        residuals: FP32 (n,) of every tensor.
        counts: Entries in the mask of every tensor, one or more.
        whole: Entries of further tensors, which have neither a mask nor a residual and are sent whole.
    """

    def __init__(
        self, masks: Sequence[Tensor], residuals: Sequence[Tensor], counts: Sequence[int], whole: Sequence[int] = ()
    ) -> None:
        self.masks = masks  # the table has their addresses
        self.sizes = [*(residual.numel() for residual in residuals), *whole]
        self.ends = list(accumulate([*counts, *whole]))
        self.first_tiles = [0, *accumulate(-(-size // _BLOCK) for size in self.sizes)]
        self.is_aligned = aligned(*residuals)
        device = masks[0].device
        self.tiles = TileSchedule(tuple(self.sizes), _BLOCK, _BLOCK, _WARP, device)
        self._tiles_with: dict[tuple[int, int], tuple[Range, ...]] = {}
        self.kinds = {flag: ((flag, None),) * len(self.sizes) for flag in (False, True)}
        self.addresses = DeviceTable(len(self.sizes), 1, torch.int64, device)
        pointers = [(mask.data_ptr(), residual.data_ptr()) for mask, residual in zip(masks, residuals, strict=True)]
        columns = zip([*pointers, *[(0, 0)] * len(whole)], self.sizes, self.first_tiles, self.ends, strict=False)
        rows = [table_row(0, *both, size, first_tile, end) for both, size, first_tile, end in columns]
        self.table = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        full = [(torch.arange(0, size, _BLOCK, device="cpu") - size).neg().clamp(max=_BLOCK) for size in whole]
        in_tiles = [_bits_of_tiles(mask) for mask in masks] + ([to_device(torch.cat(full), device)] if full else [])
        self.positions = pad(torch.cat(in_tiles).cumsum(0), (1, 0))

    def tiles_with(self, first: int, end: int) -> tuple[Range, ...]:
        """Return the tiles of the tensors in payload entries [first, end), every time the same object."""
        if (first, end) not in self._tiles_with:
            bounds = zip([0, *self.ends], self.ends, self.tiles.whole(), strict=False)
            ranges = [tiles for start, stop, tiles in bounds if start < end and stop > first]
            self._tiles_with[first, end] = tuple(ranges)
        return self._tiles_with[first, end]


def _bits_of_tiles(mask: Tensor) -> Tensor:
    """Return the number of set bits of each tile, int64 (tiles,)."""
    words = pad(mask, (0, -mask.numel() % (_BLOCK // 8))).view(-1, _BLOCK // 8)
    counts = torch.zeros_like(words)
    for bit in range(8):
        counts += words >> bit & 1
    return counts.sum(1, dtype=torch.int64)


class MaskedPayload:
    """`topology.chunks.Source` of the gradients in the masks. A step fills and stores every entry once.

    Filling adds the gradients outside the masks to the residuals if `applied`, and sets them to zero.

    Args:
        masked: The masks.
        gradients: FP32, contiguous, of every tensor.
        applied: bool ().
        factor: Multiplies the gradients when they are read.
        divisor: Divides the payload when it is stored, so that a sum becomes a mean.
    """

    def __init__(
        self, masked: MaskedTensors, gradients: Sequence[Tensor], applied: Tensor, factor: float, divisor: float
    ) -> None:
        self._masked, self._applied, self._rates = masked, applied, (factor, divisor)
        self.entries, self.device = masked.ends[-1], masked.table.device
        self._addresses = masked.addresses.set(launching.addresses(gradients))
        self._kinds = masked.kinds[masked.is_aligned and aligned(*gradients)]
        self._moved = (16.125, 4.125)  # without the payload

    def fill(self, chunk: Tensor, first: int) -> None:
        self._move(chunk, first, True)

    def store(self, chunk: Tensor, first: int) -> None:
        self._move(chunk, first, False)

    def _move(self, chunk: Tensor, first: int, to_chunk: bool) -> None:
        masked, end = self._masked, first + chunk.numel()
        lists = masked.tiles.lists(masked.tiles_with(first, end), self._kinds)
        processed = chunk.numel() / self.entries * sum(masked.sizes)
        moved = self._moved[0 if to_chunk else 1] * processed - (len(lists) - 1) * chunk.nbytes
        for listed, full, _ in lists:
            launching.launch(
                masked_kernel,
                (len(listed),),
                *(listed, masked.table, self._addresses, masked.positions, chunk, self._applied),
                *(*self._rates, first, chunk.numel()),
                warps=masked.tiles.warps,
                moved=moved / len(lists),
                **masked.tiles.units(4),
                ALIGNED_TILE=full,
                TO_CHUNK=to_chunk,
            )

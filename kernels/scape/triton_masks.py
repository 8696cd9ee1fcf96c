"""Triton kernels that encode, decode, rotate, list and count masks, and that copy payloads without a buffer."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import TileSchedule, to_device
from torchtitan_scape.kernels.common.triton_common import (
    GRADIENT,
    PER_BLOCK,
    bits_of_units,
    cell,
    count_bits,
    entries_of_units,
    pointer,
    spread_units,
)
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, entries_per_block
from torchtitan_scape.kernels.scape.reference import VisitRates
from torchtitan_scape.kernels.scape.triton_tiles import (
    bits_of_tile,
    block_tile,
    payload_of_tile,
    store_code,
    store_offsets,
)

# Tile of `entering_kernel`: at most 255 rows, so that column sums fit into a byte. A row has 8 columns per byte, so a
# high tile has fewer sums to add.
_ROWS, _STEP, _BYTES = 128, 4, 64


@triton.jit
def code_at(block, run_blocks, run_bytes, code_bytes):
    """Return the first byte of a block's code, int64. Runs of `run_blocks` blocks have `run_bytes` bytes each."""
    run = block.to(tl.int32) // run_blocks  # fewer than 2^31 blocks; a 64-bit division is far slower
    return run.to(tl.int64) * run_bytes + (block.to(tl.int32) - run * run_blocks).to(tl.int64) * code_bytes


@triton.jit(do_not_specialize=["count", "run_blocks", "run_bytes", "k", "code_bytes", "unary", "low"])
def encode_offsets_kernel(
    offsets, message, count, run_blocks, run_bytes, k, code_bytes, unary, low, TILE: tl.constexpr
):
    """Encode `count` ascending int16 offsets, k per block, into zeroed 32-bit words; see `blocks.OffsetCode`."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = number < count
    block = number // k
    rank = number - block * k
    offset = tl.load(offsets + number, mask=inside, other=0).to(tl.int32)
    words = message.to(tl.pointer_type(tl.int32))
    start = code_at(block, run_blocks, run_bytes, code_bytes) * 8
    store_code(words, start, offset, rank, inside, unary, low)


@triton.jit
def count_ones(words):
    """Return the number of set bits of 32-bit words."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101 >> 24) & 0xFF


@triton.jit
def after_zeros(first, count, unary):
    """Return the position after zero number `count` of the unary part of a code at `first`; 0 for a count of 0."""
    passed = tl.zeros_like(count)  # zeros before the word that contains the last of them
    position = tl.zeros_like(count)
    found = tl.zeros_like(count)
    zeros = tl.zeros_like(count)
    start = 0
    while start < unary:
        word = tl.zeros_like(count)
        for i in tl.static_range(4):
            left = tl.zeros_like(count) + (unary - start - 8 * i)
            byte = tl.load(first + (start >> 3) + i, mask=left > 0, other=255).to(tl.int32)
            byte |= 255 & ~((1 << tl.minimum(tl.maximum(left, 0), 8)) - 1)  # bits after the unary part are no zeros
            word |= byte << (8 * i)
        following = zeros + 32 - count_ones(word)
        is_here = (zeros < count) & (following >= count)
        passed = tl.where(is_here, zeros, passed)
        position = tl.where(is_here, start, position)
        found = tl.where(is_here, ~word, found)
        zeros = following
        start += 32
    rank = count - passed
    for step in tl.static_range(5):
        half = 16 >> step
        below = count_ones(found & ((1 << half) - 1))
        above = rank > below
        rank -= tl.where(above, below, 0)
        position += tl.where(above, half, 0)
        found = tl.where(above, (found >> half) & ((1 << (32 - half)) - 1), found)
    return tl.where(count > 0, position + 1, 0)


@triton.jit(do_not_specialize=["units", "run_blocks", "run_bytes", "k", "code_bytes", "unary", "low"])
def decode_offsets_kernel(
    message,
    in_use,
    previous,
    lists,
    units,
    run_blocks,
    run_bytes,
    k,
    code_bytes,
    unary,
    low,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Set previous = in_use, and in_use = the mask of encoded offsets. A thread decodes UNIT bits, 32 or 8, of a mask.

    The unary part has a one for every offset, and a zero after the offsets of each high part; see `blocks.OffsetCode`.
    A thread finds the first high part of its bits, and reads the code from there. LISTS: write the offsets to `lists`.
    """
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = number < units
    block = number // (BLOCK // UNIT)
    first_bit = (number - block * (BLOCK // UNIT)).to(tl.int32) * UNIT
    first = message + tl.where(inside, code_at(block, run_blocks, run_bytes, code_bytes), 0)
    high = first_bit >> low
    position = after_zeros(first, high, unary)
    last_high = (first_bit + UNIT - 1) >> low
    end = tl.where(unary > 0, unary, k)  # without a unary part all high parts are zero
    bits = tl.zeros_like(first_bit)
    active = inside & (position < end)
    while tl.max(active.to(tl.int32)) > 0:
        byte = tl.load(first + (position >> 3), mask=active & (tl.zeros_like(bits) < unary), other=255).to(tl.int32)
        is_one = active & (((byte >> (position & 7)) & 1) != 0)
        rank = position - high
        at = unary + rank * low
        value = tl.zeros_like(bits)
        for i in tl.static_range(3):
            more = tl.load(first + (at >> 3) + i, mask=is_one & ((at & 7) + low > 8 * i), other=0).to(tl.int32)
            value |= more << (8 * i)
        offset = (high << low) | ((value >> (at & 7)) & ((1 << low) - 1))
        bit = offset - first_bit
        is_here = is_one & (bit >= 0) & (bit < UNIT)
        bits |= tl.where(is_here, 1 << (bit & 31), 0)
        if LISTS:
            tl.store(lists + block * k + rank, offset.to(tl.int16), mask=is_here)
        high += tl.where(is_one, 0, 1)
        position += 1
        active = inside & (position < end) & (high <= last_high)
    if UNIT == 32:
        masks, others = in_use.to(tl.pointer_type(tl.int32)), previous.to(tl.pointer_type(tl.int32))
        tl.store(others + number, tl.load(masks + number, mask=inside, other=0), mask=inside)
        tl.store(masks + number, bits, mask=inside)
    else:
        tl.store(previous + number, tl.load(in_use + number, mask=inside, other=0), mask=inside)
        tl.store(in_use + number, bits.to(tl.uint8), mask=inside)


@triton.jit
def rotate_kernel(received, in_use, previous, size, HAS_BITS: tl.constexpr, TILE: tl.constexpr):
    """Set previous = in_use, and in_use = the received bits (zeros without HAS_BITS)."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = byte < size
    tl.store(previous + byte, tl.load(in_use + byte, mask=inside, other=0), mask=inside)
    new = tl.zeros((TILE,), dtype=tl.uint8)
    if HAS_BITS:
        new = tl.load(received + byte, mask=inside, other=0)
    tl.store(in_use + byte, new, mask=inside)


@triton.jit
def entering_kernel(
    tiles, in_use, previous, counts, ROWS: tl.constexpr, STEP: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr
):
    """Add the newly entered entries of each row and column to `counts`, int32. A program of one warp reads STEP rows at
    a time, so that sums over a row or column need no shared memory.

    A tile has six int64: its first byte in the masks, bytes of a row, remaining rows and bytes, and the positions of
    its first row and column in `counts`. ROWS is at most 255, because four columns are summed in one 32-bit word.
    ALIGNED: the first byte and the bytes of a row are multiples of 16, and so are the remaining bytes.
    """
    at = tiles + 6 * tl.program_id(0)
    start, width, height, left = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    if ALIGNED:
        start, width, left = tl.multiple_of(start, 16), tl.multiple_of(width, 16), tl.multiple_of(left, 16)
    of_rows, byte = counts + tl.load(at + 4), tl.arange(0, BYTES)
    low = tl.zeros((STEP, BYTES), dtype=tl.int32)
    high = tl.zeros((STEP, BYTES), dtype=tl.int32)
    for first in range(0, ROWS, STEP):
        row = first + tl.arange(0, STEP)
        inside = (row[:, None] < height) & (byte[None, :] < left)
        at_byte = start + row[:, None] * width + byte[None, :]
        used = tl.load(in_use + at_byte, mask=inside, other=0).to(tl.int32)
        entering = used & ~tl.load(previous + at_byte, mask=inside, other=0).to(tl.int32)
        tl.atomic_add(of_rows + row, tl.sum(count_bits(entering), 1), mask=row < height, sem="relaxed")
        # Moves bit i of a nibble to the lowest bit of byte i.
        low += ((entering & 15) * 0x00204081) & 0x01010101
        high += ((entering >> 4) * 0x00204081) & 0x01010101
    of_columns = counts + tl.load(at + 5) + byte * 8
    low_sums, high_sums = tl.sum(low, 0), tl.sum(high, 0)
    for i in tl.static_range(4):
        tl.atomic_add(of_columns + i, (low_sums >> (8 * i)) & 255, mask=byte < left, sem="relaxed")
        tl.atomic_add(of_columns + 4 + i, (high_sums >> (8 * i)) & 255, mask=byte < left, sem="relaxed")


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "chunk_first", "chunk_entries"])
def move_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    chunk,
    chunk_first,
    chunk_entries,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    FORM: tl.constexpr,
    TO_CHUNK: tl.constexpr,
):
    """Copy payload entries [chunk_first, chunk_first + chunk_entries) between the gradients' storage and `chunk`."""
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, False)
    bits = bits_of_tile(in_use, in_use_masked, table, tensor, block, left, SHAPE, FORM)
    counts = count_bits(bits)
    line = tl.arange(0, ROWS)[:, None]
    per_block = cell(table, tensor, PER_BLOCK)
    at = tl.cumsum(counts, 1) - counts + line * per_block.to(tl.int32)
    base = payload_of_tile(table, tensor, row) - chunk_first
    if (base >= chunk_entries) | (base + tl.max(at + counts) <= 0):
        return
    local, _ = entries_of_units(left, SHAPE, False)
    lower = (1 << tl.arange(0, WIDTH)[None, None, :]) - 1
    position = base + at[:, :, None] + count_bits(bits[:, :, None] & lower)
    moved = spread_units(bits, WIDTH) & (position >= 0) & (position < chunk_entries)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, False) + first + local
    if TO_CHUNK:
        tl.store(chunk + position, tl.load(gradients, mask=moved, other=0.0), mask=moved)
    else:
        tl.store(gradients, tl.load(chunk + position, mask=moved, other=0.0), mask=moved)


@triton.jit(do_not_specialize=["masked", "k"])
def list_kernel(
    tiles,
    table,
    mask,
    masked,
    lists,
    k,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the entries of a packed mask with k entries per block. WIDTH is 8."""
    _, _, block, _, left = block_tile(tiles, table, BLOCK, False)
    bits = bits_of_units(mask, block, left, masked != 0, (ROWS, UNITS, WIDTH, BLOCK))
    store_offsets(lists, bits, block, left, k, BLOCK)


# ------------------------------------------------------------------------------------------------- host side


class MaskLists:
    """The position of every entry of A and P in its block, int16 (blocks, k), ascending.

    They are written when a mask is decoded. A mask that was changed otherwise, as by loading a checkpoint, is listed
    when it is needed.

    Args:
        layout: Blocks of the masks.
        density: Target density, which determines k.
        device: Device of the lists.
    """

    def __init__(self, layout: BlockLayout, density: float, device: torch.device) -> None:
        self.k = entries_per_block(density, layout.block_size)
        shape = layout.total_blocks, self.k
        self._lists = [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(2)]
        self._identities: list[tuple[int, int, bool] | None] = [None, None]  # of the masks when they were listed

    def rotate(self, in_use: Tensor, previous: Tensor) -> Tensor:
        """Make the list of A that of P, for masks that will be rotated. Return the buffer for the list of the new A.

        Call `decoded` when the list is written.
        """
        known = self._identities[0] == _identity(in_use)
        self._lists.reverse()
        self._identities = [None, _identity(previous) if known else None]
        return self._lists[0]

    def decoded(self, in_use: Tensor) -> None:
        """Record that the list of A is that of these bits."""
        self._identities[0] = _identity(in_use)

    def of(
        self, masks: Sequence[Mask | None], tiles: TileSchedule, lists: Sequence[Tensor], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the lists of A and P, rebuilt if necessary. That of a mask that is None may be invalid.

        tiles, lists: any schedule, and its tiles of all sparsified tensors. table: of pointers.
        """
        for number, mask in enumerate(masks):
            if mask is None or self._identities[number] == (identity := _identity(mask.bits, mask.dense)):
                continue
            for listed in lists:
                launching.launch(
                    list_kernel,
                    (len(listed),),
                    listed,
                    table,
                    mask.bits,
                    int(not mask.dense),
                    self._lists[number],
                    self.k,
                    warps=tiles.warps,
                    **tiles.units(8),
                )
            self._identities[number] = identity
        return self._lists[0], self._lists[1]


def _identity(bits: Tensor, dense: bool = False) -> tuple[int, int, bool]:
    """Return what changes if PyTorch writes to the tensor. Kernels and collectives do not change it."""
    return bits.data_ptr(), bits._version, dense


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
                entering_kernel,
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
                bits = self._layout.entering(in_use, previous, i)
                visits.count(i, reference.unpack_bits(bits, visits.rows[i] * columns))


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
            move_kernel, self._passes.tiles, listed, chunk, first, chunk.numel(), form="in place", TO_CHUNK=to_chunk
        )

    def _tile_of(self, position: int) -> range:
        """Return the tile that contains this payload entry, as a range of length one."""
        p = self._passes
        tensor = bisect_right(self._ends, position)
        tiles = range(self._first_tile[tensor], self._first_tile[tensor + 1])
        per_tile = p.tiles.rows * (self._per_block if tensor < p.sparsified else p.layout.block_size)
        start = self._ends[tensor] - p.counts[tensor]
        return tiles[(position - start) // per_tile :][:1]

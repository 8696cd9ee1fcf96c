"""Triton kernels that encode, decode, rotate and count masks, and that copy payloads without a separate buffer."""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    GRADIENT,
    PER_BLOCK,
    cell,
    count_bits,
    entries_of_units,
    lowest,
    pointer,
    spread_units,
)
from torchtitan_scape.kernels.scape.triton_tiles import bits_of_tile, block_tile, payload_of_tile


@triton.jit
def code_at(block, run_blocks, run_bytes, code_bytes):
    """Return the first byte of a block's code, int64. Runs of `run_blocks` blocks have `run_bytes` bytes each."""
    run = block.to(tl.int32) // run_blocks  # fewer than 2^31 blocks; a 64-bit division is far slower
    return run.to(tl.int64) * run_bytes + (block.to(tl.int32) - run * run_blocks).to(tl.int64) * code_bytes


@triton.jit(do_not_specialize=["count", "run_blocks", "run_bytes", "k", "code_bytes", "unary", "low"])
def encode_offsets_kernel(
    offsets, message, count, run_blocks, run_bytes, k, code_bytes, unary, low, TILE: tl.constexpr
):
    """Encode `count` ascending int16 offsets, k per block, into zeroed 32-bit words; see `blocks.OffsetCode`.

    Every bit is set at most once, so an addition sets it. Triton compiles an atomic OR for gfx90a to a loop.
    """
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = number < count
    block = number // k
    rank = number - block * k
    offset = tl.load(offsets + number, mask=inside, other=0).to(tl.int32)
    words = message.to(tl.pointer_type(tl.int32))
    start = code_at(block, run_blocks, run_bytes, code_bytes) * 8
    at = start + (offset >> low) + rank
    tl.atomic_add(words + (at >> 5), 1 << (at & 31).to(tl.int32), mask=inside & (rank < unary), sem="relaxed")
    at = start + unary + rank * low
    end = at + low
    # The low bits may extend over two words.
    bits = (offset & ((1 << low) - 1)).to(tl.int64) << (at & 31)
    tl.atomic_add(words + (at >> 5), bits.to(tl.int32), mask=inside & (at < end), sem="relaxed")
    tl.atomic_add(words + (at >> 5) + 1, (bits >> 32).to(tl.int32), mask=inside & (end > (at | 31) + 1), sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "run_blocks", "run_bytes", "k", "code_bytes", "unary", "low"])
def decode_offsets_kernel(
    message,
    mask,
    lists,
    blocks,
    run_blocks,
    run_bytes,
    k,
    code_bytes,
    unary,
    low,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Decode offsets into a mask of zeros. A program decodes ROWS blocks, with BYTES bytes of unary bits each.

    The offsets of a block are distinct, so an addition sets their bits. LISTS: write them to `lists` too.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    byte = tl.arange(0, BYTES)[None, :]
    first = message + code_at(block, run_blocks, run_bytes, code_bytes)
    # Without a unary part all high parts are zero, which corresponds to k set bits.
    left = tl.where(unary > 0, unary, k) - byte * 8
    bits = tl.load(first + byte, mask=(block < blocks) & (byte * 8 < unary), other=255).to(tl.int32)
    bits = tl.where(block < blocks, bits & ((1 << tl.minimum(tl.maximum(left, 0), 8)) - 1), 0)
    counts = count_bits(bits)
    rank = tl.cumsum(counts, 1) - counts
    words = mask.to(tl.pointer_type(tl.int32))
    left_over = tl.max(counts)
    while left_over > 0:
        left_over -= 1
        some = bits != 0
        high = byte * 8 + lowest(bits) - rank
        at = unary + rank * low
        shift = at & 7
        value = tl.zeros_like(bits)
        for i in tl.static_range(3):
            more = tl.load(first + (at >> 3) + i, mask=some & (shift + low > 8 * i), other=0).to(tl.int32)
            value = value | (more << (8 * i))
        offset = (high << low) | ((value >> shift) & ((1 << low) - 1))
        if LISTS:
            tl.store(lists + block * k + rank, offset.to(tl.int16), mask=some)
        position = block * BLOCK + offset
        tl.atomic_add(words + (position >> 5), 1 << (position & 31).to(tl.int32), mask=some, sem="relaxed")
        bits = bits & (bits - 1)
        rank += 1


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
def entering_kernel(tiles, in_use, previous, counts, ROWS: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Add the newly entered entries of each row and column to `counts`, int32.

    A tile has six int64: its first byte in the masks, bytes of a row, remaining rows and bytes, and the positions of
    its first row and column in `counts`. ROWS is at most 255, because four columns are summed in one 32-bit word.
    ALIGNED: the first byte and the bytes of a row are multiples of 16, and so are the remaining bytes.
    """
    at = tiles + 6 * tl.program_id(0)
    start, width, height, left = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    if ALIGNED:
        start, width, left = tl.multiple_of(start, 16), tl.multiple_of(width, 16), tl.multiple_of(left, 16)
    row, byte = tl.arange(0, ROWS), tl.arange(0, BYTES)
    inside = (row[:, None] < height) & (byte[None, :] < left)
    at_byte = start + row[:, None] * width + byte[None, :]
    used = tl.load(in_use + at_byte, mask=inside, other=0).to(tl.int32)
    entering = used & ~tl.load(previous + at_byte, mask=inside, other=0).to(tl.int32)
    tl.atomic_add(counts + tl.load(at + 4) + row, tl.sum(count_bits(entering), 1), mask=row < height, sem="relaxed")
    first = counts + tl.load(at + 5) + byte * 8
    for half in tl.static_range(2):
        # Moves bit i of a nibble to the lowest bit of byte i.
        bits = (((entering >> (4 * half)) & 15) * 0x00204081) & 0x01010101
        sums = tl.sum(bits, 0)
        for i in tl.static_range(4):
            tl.atomic_add(first + 4 * half + i, (sums >> (8 * i)) & 255, mask=byte < left, sem="relaxed")


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
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, False)
    bits = bits_of_tile(in_use, in_use_masked, table, tensor, block, left, ROWS, UNITS, WIDTH, BLOCK, FORM)
    counts = count_bits(bits)
    line = tl.arange(0, ROWS)[:, None]
    per_block = cell(table, tensor, PER_BLOCK)
    at = tl.cumsum(counts, 1) - counts + line * per_block.to(tl.int32)
    base = payload_of_tile(table, tensor, row) - chunk_first
    if (base >= chunk_entries) | (base + tl.max(at + counts) <= 0):
        return
    local, _ = entries_of_units(left, ROWS, UNITS, WIDTH, BLOCK, False)
    lower = (1 << tl.arange(0, WIDTH)[None, None, :]) - 1
    position = base + at[:, :, None] + count_bits(bits[:, :, None] & lower)
    moved = spread_units(bits, WIDTH) & (position >= 0) & (position < chunk_entries)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, False) + first + local
    if TO_CHUNK:
        tl.store(chunk + position, tl.load(gradients, mask=moved, other=0.0), mask=moved)
    else:
        tl.store(gradients, tl.load(chunk + position, mask=moved, other=0.0), mask=moved)

"""Masks on the wire and in turn, and payloads that have no buffer of their own: Triton kernels."""

import triton
import triton.language as tl

from kernels.common.triton_common import (
    FIRST_BLOCK,
    GRADIENT,
    cell,
    count_bits,
    entries,
    mask_bytes,
    payload_places,
    pointer,
    spread,
    tile_of,
)


@triton.jit(do_not_specialize=["count"])
def encode_offsets_kernel(offsets, wire, count, size, BITS: tl.constexpr, TILE: tl.constexpr):
    """Packs `count` offsets, int16, to BITS bits each, into `size` bytes; first offset lowest."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    packed = tl.zeros((TILE,), dtype=tl.int32)
    number = byte * 8 // BITS
    for i in tl.static_range(8 // BITS + 2):
        inside = number + i < count
        value = tl.load(offsets + number + i, mask=inside, other=0).to(tl.int32)
        # Bit 0 of the offset lies `shift` bits above bit 0 of the byte; negative where it began in a byte before.
        shift = ((number + i) * BITS - byte * 8).to(tl.int32)
        bits = tl.where(shift >= 0, value << tl.maximum(shift, 0), value >> tl.maximum(-shift, 0))
        packed = packed | tl.where(inside & (shift < 8), bits, 0)
    tl.store(wire + byte, (packed & 255).to(tl.uint8), mask=byte < size)


@triton.jit(do_not_specialize=["k", "run_blocks", "total_blocks", "wire_bytes"])
def decode_offsets_kernel(
    wire,
    mask,
    k,
    run_blocks,
    total_blocks,
    wire_bytes,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sets the bits that a replica's offsets name in a mask of zeros. Programs: (tiles of a run, replicas)."""
    replica = tl.program_id(1)
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    block = replica * run_blocks + number // k
    # The last run may be short: what lies behind its blocks is no tensor's.
    inside = (number < run_blocks.to(tl.int64) * k) & (block < total_blocks)
    at = number * BITS
    byte = at >> 3
    first = wire + replica.to(tl.int64) * wire_bytes + byte
    value = tl.load(first, mask=inside, other=0).to(tl.int32)
    for i in tl.static_range(1, (BITS + 14) // 8):
        more = tl.load(first + i, mask=inside & (byte + i < wire_bytes), other=0).to(tl.int32)
        value = value | (more << (8 * i))
    offset = (value >> (at & 7).to(tl.int32)) & ((1 << BITS) - 1)
    position = block * BLOCK + offset
    word = mask.to(tl.pointer_type(tl.int32)) + (position >> 5)
    tl.atomic_or(word, 1 << (position & 31).to(tl.int32), mask=inside, sem="relaxed")


@triton.jit
def rotate_kernel(arrived, in_use, previous, size, HAS_BITS: tl.constexpr, TILE: tl.constexpr):
    """previous = in_use, and in_use = what arrived (zeros without HAS_BITS)."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = byte < size
    tl.store(previous + byte, tl.load(in_use + byte, mask=inside, other=0), mask=inside)
    new = tl.zeros((TILE,), dtype=tl.uint8)
    if HAS_BITS:
        new = tl.load(arrived + byte, mask=inside, other=0)
    tl.store(in_use + byte, new, mask=inside)


@triton.jit
def entering_kernel(tiles, in_use, previous, counts, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Adds the newly entered entries of each row and column to `counts`, int32.

    Tiles, int64: byte of the masks where it begins, bytes of a row, rows and bytes that are left from there, positions
    of its first row and column in `counts`. ROWS: at most 255, as columns are added up four to a word.
    """
    at = tiles + 6 * tl.program_id(0)
    start, width, height, left = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    row, byte = tl.arange(0, ROWS), tl.arange(0, BYTES)
    inside = (row[:, None] < height) & (byte[None, :] < left)
    place = start + row[:, None] * width + byte[None, :]
    used = tl.load(in_use + place, mask=inside, other=0).to(tl.int32)
    entering = used & ~tl.load(previous + place, mask=inside, other=0).to(tl.int32)
    tl.atomic_add(counts + tl.load(at + 4) + row, tl.sum(count_bits(entering), 1), mask=row < height, sem="relaxed")
    first = counts + tl.load(at + 5) + byte * 8
    for half in tl.static_range(2):
        # Bit i of a nibble goes to the lowest bit of byte i.
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
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_CHUNK: tl.constexpr,
):
    """Copies payload entries [chunk_first, chunk_first + chunk_entries) between the gradients' storage and `chunk`."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    block, masked = cell(table, tensor, FIRST_BLOCK), in_use_masked != 0
    masked = masked & (block >= 0)
    bits = mask_bytes(in_use, block + row, left, masked, ROWS, BYTES, BLOCK)
    base, to = payload_places(table, tensor, row, bits, ROWS, BLOCK)
    base -= chunk_first
    if (base >= chunk_entries) | (base + tl.max(to + count_bits(bits)) <= 0):
        return
    local, _ = entries(left, ROWS, BYTES, BLOCK, False)
    used = spread(bits)
    ones = used.to(tl.int32)
    at = base + to[:, :, None] + tl.cumsum(ones, 2) - ones
    moved = used & (at >= 0) & (at < chunk_entries)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, False) + first + local
    if TO_CHUNK:
        tl.store(chunk + at, tl.load(gradients, mask=moved, other=0.0), mask=moved)
    else:
        tl.store(gradients, tl.load(chunk + at, mask=moved, other=0.0), mask=moved)

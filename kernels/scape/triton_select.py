"""Exact top-k without sorting: inside a block in registers, and over a tensor by radix."""

import triton
import triton.language as tl

from kernels.common.triton_common import FIRST_BLOCK, GRADIENT, cell, count_bits, entries, lowest, pointer, tile_of


@triton.jit
def choose_in_blocks(keys, k):
    """bool [ROWS, COLUMNS]: the k largest keys of each row, ties to the lower index.

    keys: int32, the bits of |value|; -1 where there is no entry, and those are never chosen. A row with fewer than k
    entries gives them all.

    Bisection for a threshold: `low` is one that at least `wanted` keys reach, `high` one that fewer do. It ends when
    exactly the wanted number reach `low`, or when both are neighbours: then those at `low` are ties.
    """
    entries = tl.sum((keys >= 0).to(tl.int32), 1)
    wanted = tl.minimum(entries, k)
    high = tl.max(keys, 1) + 1
    low = tl.zeros_like(high)
    reached = entries
    above = tl.zeros_like(high)
    # The wanted keys mostly lie within two binary orders of the largest: that is tried first.
    middle = tl.maximum(high - (1 << 24), 0)
    unsettled = (high - low > 1) & (reached != wanted)
    while tl.max(unsettled.to(tl.int32)) > 0:
        count = tl.sum((keys >= middle[:, None]).to(tl.int32), 1)
        enough = count >= wanted
        low = tl.where(unsettled & enough, middle, low)
        reached = tl.where(unsettled & enough, count, reached)
        high = tl.where(unsettled & ~enough, middle, high)
        above = tl.where(unsettled & ~enough, count, above)
        middle = low + (high - low) // 2
        unsettled = (high - low > 1) & (reached != wanted)
    sure = keys >= high[:, None]
    ties = (keys >= low[:, None]) & ~sure
    order = tl.cumsum(ties.to(tl.int32), 1)
    return sure | (ties & (order <= (wanted - above)[:, None]))


@triton.jit
def to_bytes(bits, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """int32 [ROWS, BYTES] from bool [ROWS, 8 * BYTES]."""
    return tl.sum(tl.reshape(bits.to(tl.int32), (ROWS, BYTES, 8)) << tl.arange(0, 8)[None, None, :], 2)


@triton.jit
def store_bitmap(bitmap, bits, line, left, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Writes bytes [ROWS, BYTES] as blocks `line` and following."""
    rows, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    at = bitmap + line.to(tl.int64) * (BLOCK // 8) + rows * (BLOCK // 8) + byte
    tl.store(at, bits.to(tl.uint8), mask=(byte < BLOCK // 8) & (rows * BLOCK < left))


@triton.jit
def store_offsets(offsets, bits, line, left, k, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the numbers of the set bits in ascending order, int16 (blocks, k); a short row repeats its first."""
    rows, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    counts = count_bits(bits)
    at = offsets + (line + rows).to(tl.int64) * k
    place = tl.cumsum(counts, 1) - counts
    least = tl.min(tl.where(bits != 0, byte * 8 + lowest(bits), BLOCK), 1)[:, None]
    first = 0
    while first < k:
        later = first + byte + tl.zeros_like(bits)
        unused = (later >= tl.sum(counts, 1)[:, None]) & (later < k) & (rows * BLOCK < left)
        tl.store(at + later, (least + tl.zeros_like(bits)).to(tl.int16), mask=unused)
        first += BYTES
    left_over = tl.max(counts)
    while left_over > 0:
        left_over -= 1
        tl.store(at + place, (byte * 8 + lowest(bits)).to(tl.int16), mask=bits != 0)
        bits = bits & (bits - 1)
        place += 1


# ----------------------------------------------------------------------------------- over a tensor's owned part
#
# Three rounds of 11, 10 and 10 bits narrow down the k-th largest key of every segment (a tensor's part of the owned
# run): histogram, then pick the digit in which it lies. Tiles here are those of the owned run; `segments` gives each
# tile's segment. The key's bits so far, and how many are still wanted below them, stay on the device.


@triton.jit
def _keys(table, tiles, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of |mt|, which lies over the gradient, int32 [ROWS, BYTES, 8], -1 where there is no entry; and the place."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, False)
    moment = tl.load(pointer(table, tensor, GRADIENT, tl.float32, False) + first + local, mask=inside, other=0.0)
    keys = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    return keys, cell(table, tensor, FIRST_BLOCK) + row, left


@triton.jit
def histogram_kernel(
    tiles,
    table,
    segments,
    prefixes,
    histograms,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Counts the digit at SHIFT of the keys that agree with their segment's prefix above it."""
    keys, _, _ = _keys(table, tiles, ROWS, BYTES, BLOCK)
    keys = tl.reshape(keys, (ROWS * BYTES * 8,))
    segment = tl.load(segments + tl.program_id(0))
    prefix = tl.load(prefixes + segment)
    agrees = (keys >= 0) & ((keys >> (SHIFT + BITS)) == prefix)
    counts = tl.histogram((keys >> SHIFT) & ((1 << BITS) - 1), BINS, mask=agrees)
    tl.atomic_add(histograms + segment * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def pick_kernel(histograms, prefixes, wanted, ties, BITS: tl.constexpr, BINS: tl.constexpr):
    """Appends to each segment's prefix the digit in which its last wanted key lies; clears the histogram."""
    segment = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(histograms + segment * BINS + bins)
    want = tl.load(wanted + segment)
    from_top = tl.sum(counts) - tl.cumsum(counts, 0) + counts  # keys in this bin and above
    digit = tl.max(tl.where(from_top >= want, bins, 0))
    here = tl.sum(tl.where(bins == digit, counts, 0))
    above = tl.sum(tl.where(bins == digit, from_top, 0)) - here
    tl.store(prefixes + segment, (tl.load(prefixes + segment) << BITS) | digit)
    tl.store(wanted + segment, want - above)
    tl.store(ties + segment, here)
    tl.store(histograms + segment * BINS + bins, tl.zeros_like(counts))


@triton.jit
def count_ties_kernel(
    tiles,
    table,
    segments,
    thresholds,
    wanted,
    ties,
    counts,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of each tile that equal their segment's threshold; 0, unread, where all of them are wanted."""
    segment = tl.load(segments + tl.program_id(0))
    count = 0
    if tl.load(ties + segment) != tl.load(wanted + segment):
        keys, _, _ = _keys(table, tiles, ROWS, BYTES, BLOCK)
        count = tl.sum((keys == tl.load(thresholds + segment)).to(tl.int32))
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=["own_block"])
def mark_kernel(
    tiles,
    table,
    segments,
    thresholds,
    wanted,
    ties,
    ties_before,
    bitmap,
    own_block,
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mask's bits: keys above the threshold, and of those at it the first ones.

    ties_before: int64 (tiles,), keys at the threshold in the segment's tiles before this one.
    """
    if tl.load(applied) == 0:
        return
    segment = tl.load(segments + tl.program_id(0))
    keys, block, left = _keys(table, tiles, ROWS, BYTES, BLOCK)
    keys = tl.reshape(keys, (ROWS * BYTES * 8,))
    threshold = tl.load(thresholds + segment)
    at = keys == threshold
    want = tl.load(wanted + segment)
    rank = tl.load(ties_before + tl.program_id(0)) + tl.cumsum(at.to(tl.int32), 0)
    bits = (keys > threshold) | (at & ((rank <= want) | (tl.load(ties + segment) == want)))
    store_bitmap(bitmap, to_bytes(bits, ROWS, BYTES), block - own_block, left, ROWS, BYTES, BLOCK)

"""Exact top-k of every block in registers, without sorting."""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import count_bits, lowest


@triton.jit
def row_sum(x):
    """Sum [ROWS, COLUMNS] or [ROWS, BYTES, 8] to [ROWS].

    Three axes are not reshaped to two: Triton 3.6 reduces a reshaped axis over the wrong threads if those of a row are
    not contiguous.
    """
    if len(x.shape) == 3:
        x = tl.sum(x, 2)
    return tl.sum(x, 1)


@triton.jit
def by_row(x, keys):
    """Expand [ROWS] to the number of axes of `keys`."""
    x = x[:, None]
    if len(keys.shape) == 3:
        x = x[:, :, None]
    return x


@triton.jit
def select_in_blocks(keys, k):
    """Return bool of the shape of `keys`: true for the k largest keys of each row; ties go to the lower index.

    keys: int32 [ROWS, COLUMNS] or [ROWS, BYTES, 8], the bits of |value|; -1 for missing entries, which are never
    selected. A row with fewer than k entries selects all of them.

    Bisection for a threshold: at least `wanted` keys are >= `low`, and fewer are >= `high`. It ends when exactly
    `wanted` keys are >= `low`, or when `low` and `high` are neighbors: keys equal to `low` are then ties.
    """
    entries = row_sum((keys >= 0).to(tl.int32))
    wanted = tl.minimum(entries, k)
    largest = keys
    if len(keys.shape) == 3:
        largest = tl.max(keys, 2)
    high = tl.max(largest, 1) + 1
    low = tl.zeros_like(high)
    reached = entries
    above = tl.zeros_like(high)
    # Most wanted keys are within a factor of four of the largest one, so this threshold is tried first.
    middle = tl.maximum(high - (1 << 24), 0)
    unfinished = (high - low > 1) & (reached != wanted)
    while tl.max(unfinished.to(tl.int32)) > 0:
        count = row_sum((keys >= by_row(middle, keys)).to(tl.int32))
        enough = count >= wanted
        low = tl.where(unfinished & enough, middle, low)
        reached = tl.where(unfinished & enough, count, reached)
        high = tl.where(unfinished & ~enough, middle, high)
        above = tl.where(unfinished & ~enough, count, above)
        middle = low + (high - low) // 2
        unfinished = (high - low > 1) & (reached != wanted)
    sure = keys >= by_row(high, keys)
    ties = (keys >= by_row(low, keys)) & ~sure
    if len(keys.shape) == 3:
        counts = tl.sum(ties.to(tl.int32), 2)
        order = tl.cumsum(ties.to(tl.int32), 2) + (tl.cumsum(counts, 1) - counts)[:, :, None]
    else:
        order = tl.cumsum(ties.to(tl.int32), 1)
    return sure | (ties & (order <= by_row(wanted - above, keys)))


@triton.jit
def to_bytes(bits):
    """Pack bool [ROWS, BYTES, 8] into the bytes of a mask, int32 [ROWS, BYTES]."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 8)[None, None, :], 2)


@triton.jit
def store_bitmap(bitmap, bits, line, left, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Store bytes [ROWS, BYTES] of a mask as blocks `line` and following."""
    rows, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    at = bitmap + line.to(tl.int64) * (BLOCK // 8) + rows * (BLOCK // 8) + byte
    tl.store(at, bits.to(tl.uint8), mask=(byte < BLOCK // 8) & (rows * BLOCK < left))


@triton.jit
def store_offsets(offsets, bits, line, left, k, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Store the indices of the set bits in ascending order, int16 (blocks, k).

    A row with fewer than k set bits has no others: the positions after them follow, as in `reference.select_blocks`.
    """
    rows, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    counts = count_bits(bits)
    at = offsets + (line + rows).to(tl.int64) * k
    position = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)[:, None]
    first = 0
    while first < k:
        later = first + byte + tl.zeros_like(bits)
        unused = (later >= total) & (later < k) & (rows * BLOCK < left)
        tl.store(at + later, later.to(tl.int16), mask=unused)
        first += BYTES
    left_over = tl.max(counts)
    while left_over > 0:
        left_over -= 1
        tl.store(at + position, (byte * 8 + lowest(bits)).to(tl.int16), mask=(bits != 0) & (position < k))
        bits = bits & (bits - 1)
        position += 1

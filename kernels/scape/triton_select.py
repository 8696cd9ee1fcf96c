"""Exact top-k of every block without sorting, in registers."""

import triton
import triton.language as tl

from kernels.common.triton_common import count_bits, lowest


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
    """Writes the numbers of the set bits in ascending order, int16 (blocks, k).

    A row with fewer than k has all of its entries; it repeats the last.
    """
    rows, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    counts = count_bits(bits)
    at = offsets + (line + rows).to(tl.int64) * k
    place = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)[:, None]
    first = 0
    while first < k:
        later = first + byte + tl.zeros_like(bits)
        unused = (later >= total) & (later < k) & (rows * BLOCK < left)
        tl.store(at + later, (total - 1 + tl.zeros_like(bits)).to(tl.int16), mask=unused)
        first += BYTES
    left_over = tl.max(counts)
    while left_over > 0:
        left_over -= 1
        tl.store(at + place, (byte * 8 + lowest(bits)).to(tl.int16), mask=bits != 0)
        bits = bits & (bits - 1)
        place += 1

"""The entries of a tile that a kernel processes, the arithmetic of an update, and exact top-k, for SCAPE's kernels.

FORM states where the payload of the bound step is, and which entries a program processes:

- "listed": in the payload buffer. A mask's entries are also listed: their positions in their blocks, int16 (blocks, k),
  ascending; the last block of a tensor may have fewer. A program processes them without idle threads, k per block.
- "whole": in the payload buffer, with all entries of a tensor that is not sparsified.
- "in place": in the gradients' storage. Programs process whole tiles, in which the mask may have any density.

`used` are the bits of A, `held` those of P, and `was_held` is true for entries in P.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    BETA1,
    BETA2,
    EPS,
    FIRST_BLOCK,
    GRADIENT,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    OUTSIDE,
    PAYLOAD,
    PER_BLOCK,
    ROW,
    SIZE,
    START,
    VISITED_COLUMNS,
    VISITED_ROWS,
    WHOLE,
    adams,
    bits_of_units,
    cell,
    count_bits,
    entries_of_units,
    lowest,
    pointer,
    rate,
    spread_units,
)
from torchtitan_scape.kernels.scape import reference

MIN_VISIT_RATE = tl.constexpr(reference.MIN_VISIT_RATE)
MAX_STALENESS = tl.constexpr(reference.MAX_STALENESS)
KEPT_MOMENT = tl.constexpr(reference.KEPT_MOMENT)


@triton.jit
def block_tile(tiles, table, BLOCK: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Return tensor, first block in the tensor and in the masks, first entry (int64) and number of entries of the tile.

    A complete tile needs no access to the table: what depends on it is loaded earlier.
    """
    at = tiles + 4 * tl.program_id(0)
    tensor, row, block = tl.load(at), tl.load(at + 1), tl.load(at + 3)
    first = row.to(tl.int64) * BLOCK
    left = tl.load(at + 2) * BLOCK
    if not ALIGNED_TILE:
        left = tl.minimum(left, cell(table, tensor, SIZE) - first).to(tl.int32)
    return tensor, row, block, first, left


@triton.jit
def bits_of_tile(mask, masked, table, tensor, block, left, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Return the tile's bits of a mask, [ROWS, UNITS]: all ones unless `masked`, and for tensors without a mask."""
    is_masked = masked != 0
    if FORM == "whole":
        is_masked = False
    elif FORM == "in place":
        is_masked = is_masked & (cell(table, tensor, FIRST_BLOCK) >= 0)
    return bits_of_units(mask, block, left, is_masked, SHAPE)


@triton.jit
def listed_entries(lists, table, tensor, left, block, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile's entries of a mask, [ENTRIES]: which of these exist, their indices in the tile, and their
    positions in the payload, relative to that of the tile.

    lists: of the mask.
    """
    k = cell(table, tensor, PER_BLOCK).to(tl.int32)
    number = tl.arange(0, ENTRIES) ^ tl.minimum(left, 0)
    blocks = left // BLOCK
    some = number < blocks * k + tl.minimum(left - blocks * BLOCK, k)
    position = tl.load(lists + block.to(tl.int64) * k + number, mask=some, other=0).to(tl.int32)
    at = number // k * BLOCK + position
    # A received selection may contain positions after the end of the tensor, as in a dry run.
    return some & (at < left), at, number


@triton.jit
def bits_of_entries(mask, masked, block, at, some, BLOCK: tl.constexpr):
    """Return whether the entries `at` of a tile are in a packed mask: all of them unless `masked`, an integer."""
    byte = mask + block.to(tl.int64) * (BLOCK // 8) + at // 8
    byte = tl.load(byte, mask=some & (tl.zeros_like(at) < masked), other=255).to(tl.int32)
    return ((byte >> (at % 8)) & 1) != 0


@triton.jit
def payload_of_tile(table, tensor, row):
    """Return the tile's first position in the payload buffer, int64: every block but a tensor's last has PER_BLOCK."""
    return cell(table, tensor, PAYLOAD) + row * cell(table, tensor, PER_BLOCK)


@triton.jit
def processed_entries(
    payload,
    lists,
    table,
    masks,
    tile,
    SHAPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the entries of a tile: which exist, their indices in the tile, the position of their payload (relative to
    the third result but one), the pointer to the payload of the tile, and whether they are in A and in P.

    masks: A and P, and whether they are masked. tile: of `block_tile`.
    """
    in_use, previous, in_use_masked, previous_masked = masks
    tensor, row, block, first, left = tile
    BLOCK: tl.constexpr = SHAPE[3]
    if FORM == "listed":
        some, at, number = listed_entries(lists, table, tensor, left, block, ENTRIES, BLOCK)
        used = some
        was_held = bits_of_entries(previous, previous_masked, block, at, some, BLOCK)
    else:
        at, some = entries_of_units(left, SHAPE, ALIGNED_TILE)
        number = at
        used = spread_units(bits_of_tile(in_use, in_use_masked, table, tensor, block, left, SHAPE, FORM), SHAPE[2])
        bits = bits_of_tile(previous, previous_masked, table, tensor, block, left, SHAPE, FORM)
        was_held = spread_units(bits, SHAPE[2])
    if FORM == "in place":
        values = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
    else:
        values = payload + payload_of_tile(table, tensor, row)
    return some, at, number, values, used, was_held


@triton.jit
def moment_and_step(before, gradient, newly, at, tile, table, inputs, SCALED: tl.constexpr, CLIP_MOMENT: tl.constexpr):
    """Return the new moment, and the update times the learning rate, of entries `at` of a tile.

    before: moment of the last step. gradient: synchronized, before clipping. newly: the entry is in A and not in P.
    tile: of `block_tile`. inputs: the arguments of the update kernels from `rates` on.
    SCALED: multiply the update of such entries by their staleness, and their moment by KEPT_MOMENT. The staleness is
    the mean of the tensor by Little's law, divided by the relative visit rates of row and column.
    """
    tensor, _, _, first, _ = tile
    rates, corrections, clip, fresh_counts, relative = inputs
    moment, step = adams(
        before,
        gradient,
        gradient * tl.load(clip),
        rate(rates, tensor, BETA1),
        rate(rates, tensor, ONE_MINUS_BETA1),
        rate(rates, tensor, BETA2),
        rate(rates, tensor, ONE_MINUS_BETA2),
        rate(rates, tensor, EPS),
        1.0 / tl.load(corrections + 2 * tensor),
        1.0 / tl.load(corrections + 2 * tensor + 1),
        CLIP_MOMENT,
    )
    if SCALED:
        entering = tl.maximum(tl.load(fresh_counts + cell(table, tensor, WHOLE)), 1).to(tl.float32)
        mean = tl.minimum(tl.maximum(cell(table, tensor, OUTSIDE).to(tl.float32) / entering, 1.0), MAX_STALENESS)
        columns, start = cell(table, tensor, ROW), first + cell(table, tensor, START)
        rows = relative + cell(table, tensor, VISITED_ROWS) + start // columns  # once per tile: it is slow
        width = columns.to(tl.int32)
        column = (start % columns).to(tl.int32) + at
        row = column // width
        column -= row * width
        of_columns = relative + cell(table, tensor, VISITED_COLUMNS)
        frequency = tl.load(rows + row, mask=newly, other=1.0) * tl.load(of_columns + column, mask=newly, other=1.0)
        factor = mean / tl.maximum(frequency, MIN_VISIT_RATE)
        step = tl.where(newly, step * tl.minimum(tl.maximum(factor, 1.0), MAX_STALENESS), step)
        moment = tl.where(newly, moment * KEPT_MOMENT, moment)
    return moment, step * rate(rates, tensor, LR)


# ---------------------------------------------------------------- exact top-k of every block, without sorting


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
def store_bitmap(bitmap, bits, line, left, BLOCK: tl.constexpr):
    """Store bytes of a mask, a row for each block, as blocks `line` and following."""
    rows, byte = tl.arange(0, bits.shape[0])[:, None], tl.arange(0, bits.shape[1])[None, :]
    at = bitmap + line.to(tl.int64) * (BLOCK // 8) + rows * (BLOCK // 8) + byte
    tl.store(at, bits.to(tl.uint8), mask=(byte < BLOCK // 8) & (rows * BLOCK < left))


@triton.jit
def store_offsets(offsets, bits, line, left, k, BLOCK: tl.constexpr):
    """Store the indices of the set bits in ascending order, int16 (blocks, k).

    A row with fewer than k set bits has no others: the positions after them follow, as in `reference.select_blocks`.
    """
    rows, byte = tl.arange(0, bits.shape[0])[:, None], tl.arange(0, bits.shape[1])[None, :]
    counts = count_bits(bits)
    at = offsets + (line + rows).to(tl.int64) * k
    position = tl.cumsum(counts, 1) - counts
    total = tl.sum(counts, 1)[:, None]
    first = 0
    while first < k:
        later = first + byte + tl.zeros_like(bits)
        unused = (later >= total) & (later < k) & (rows * BLOCK < left)
        tl.store(at + later, later.to(tl.int16), mask=unused)
        first += bits.shape[1]
    left_over = tl.max(counts)
    while left_over > 0:
        left_over -= 1
        tl.store(at + position, (byte * 8 + lowest(bits)).to(tl.int16), mask=(bits != 0) & (position < k))
        bits = bits & (bits - 1)
        position += 1


@triton.jit
def store_code(words, start, offset, rank, inside, unary, low):
    """Set the bits of ascending offsets in zeroed 32-bit words, in codes whose first bit is `start`.

    See `blocks.OffsetCode`. Every bit is set at most once, so an addition sets it. Triton compiles an atomic OR for
    gfx90a to a loop.
    """
    at = start + (offset >> low) + rank
    tl.atomic_add(words + (at >> 5), 1 << (at & 31).to(tl.int32), mask=inside & (rank < unary), sem="relaxed")
    at = start + unary + rank * low
    end = at + low
    # The low bits may extend over two words.
    bits = (offset & ((1 << low) - 1)).to(tl.int64) << (at & 31)
    tl.atomic_add(words + (at >> 5), bits.to(tl.int32), mask=inside & (at < end), sem="relaxed")
    tl.atomic_add(words + (at >> 5) + 1, (bits >> 32).to(tl.int32), mask=inside & (end > (at | 31) + 1), sem="relaxed")

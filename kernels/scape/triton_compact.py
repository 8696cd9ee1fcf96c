"""Passes at the target density as Triton kernels: the payload is in a buffer; specified by `reference.py`.

The entries of the masks A and P are also listed: their positions in their blocks, int16 (blocks, k), ascending; the
last block of a tensor may have fewer. A program processes the listed entries of its tile without idle threads, k per
block, and all entries of the tile with wide loads and stores. Listed values are exchanged with the entries through the
storage of gradient, state and parameter, while it is in the device's cache.

Between two steps the first moment on the mask is in the payload's order in `last`, the buffer of the moment of the last
step, and not in the state: scattered stores to the state would make the memory read and write whole sectors.
`store_moments_kernel` copies the moment to the state when something else than the next step reads it.

A tile is [ROWS, UNITS, WIDTH]: blocks, parts of a block, and the entries of a part, whose bits one thread has. With
WIDTH = 4 these are the 16 bytes that a thread loads at once, so that nothing is exchanged between threads.

Memory traffic per parameter: `pack` reads gradient and state and writes the state (12 bytes); `update` reads and writes
the parameter (8 bytes). Masks are extra, and for each entry of the payload 14 bytes in either; with quantization errors
4 more, and the gradients of the entries are written.

`used` are the bits of A, `held` those of P.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    GRADIENT,
    GRADIENT_RATE,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    PARAMETER,
    PAYLOAD,
    PER_BLOCK,
    STATE,
    adams,
    bits_of_units,
    cell,
    entries_of_units,
    pointer,
    rate,
    spread_units,
    tile_of,
)
from torchtitan_scape.kernels.scape.triton_kernels import masks_of_tile, mean_of_tensor, scaled, visit_rates
from torchtitan_scape.kernels.scape.triton_select import select_in_blocks, store_bitmap, store_offsets, to_bytes


@triton.jit
def listed_entries(lists, table, tensor, row, left, block, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile's entries of a mask, [ENTRIES]: which of these exist, their indices in the tile, and their
    positions in the payload, relative to the tile's first one, which is the last result, int64 ().

    lists: of the mask.
    """
    per_block = cell(table, tensor, PER_BLOCK)
    k = per_block.to(tl.int32)
    number = tl.arange(0, ENTRIES) ^ tl.minimum(left, 0)
    blocks = left // BLOCK
    some = number < blocks * k + tl.minimum(left - blocks * BLOCK, k)
    position = tl.load(lists + block.to(tl.int64) * k + number, mask=some, other=0).to(tl.int32)
    at = number // k * BLOCK + position
    # A received selection may contain positions after the end of the tensor, as in a dry run.
    return some & (at < left), at, number, cell(table, tensor, PAYLOAD) + row * per_block


@triton.jit
def bits_of_entries(mask, block, masked, at, some, BLOCK: tl.constexpr):
    """Return whether the entries `at` of a tile are in a packed mask: all of them unless `masked`, an integer."""
    byte = mask + block.to(tl.int64) * (BLOCK // 8) + at // 8
    byte = tl.load(byte, mask=some & (tl.zeros_like(at) < masked), other=255).to(tl.int32)
    return ((byte >> (at % 8)) & 1) != 0


@triton.jit
def list_kernel(tiles, table, mask, lists, k, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """List the entries of a packed mask with k entries per block."""
    tensor, row, _, left = tile_of(tiles, table, BLOCK)
    block, _ = masks_of_tile(table, tensor, row)
    line, byte = tl.arange(0, ROWS)[:, None], tl.arange(0, BYTES)[None, :]
    first = line * BLOCK + byte * 8
    at = mask + (block + line).to(tl.int64) * (BLOCK // 8) + byte
    bits = tl.load(at, mask=(byte < BLOCK // 8) & (first < left), other=0).to(tl.int32)
    exist = tl.minimum(tl.maximum(left - first, 0), 8)
    store_offsets(lists, bits & ((1 << exist) - 1), block, left, k, ROWS, BYTES, BLOCK)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "k", "own_block"])
def pack_compact_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    last,
    in_use_lists,
    previous_lists,
    errors,
    fresh_counts,
    selection,
    k,
    own_block,
    applied,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    ADDS_ERRORS: tl.constexpr,
    SKIP_NEW: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Compute `triton_kernels.pack_kernel` of sparsified tensors, with the payload in a buffer.

    HAS_MOMENTS: `last` contains the moment on P, which the state does not. It becomes m of the last step on A.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_units(left, ROWS, UNITS, WIDTH, BLOCK, ALIGNED_TILE)
    block, _ = masks_of_tile(table, tensor, row)
    gradients = pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, GRADIENT_RATE)
    some, at, number, base = listed_entries(in_use_lists, table, tensor, row, left, block, ENTRIES, BLOCK)
    own_held = bits_of_entries(previous, block, previous_masked, at, some, BLOCK)
    payload += base
    last += base
    if not ADDS_ERRORS:
        gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    if HAS_MOMENTS or ADDS_ERRORS:
        had, before_at, _, _ = listed_entries(previous_lists, table, tensor, row, left, block, ENTRIES, BLOCK)
        if HAS_MOMENTS:
            tl.store(states + before_at, tl.load(last + number, mask=had, other=0.0), mask=had)
        if ADDS_ERRORS:
            error = tl.load(errors + base + number, mask=had, other=0.0)
            added = tl.div_rn(error, tl.zeros_like(error) + gradient_rate)
            before = tl.load(gradients + before_at, mask=had, other=0.0)
            tl.store(gradients + before_at, before + added, mask=had)
        tl.debug_barrier()  # other threads read state and gradients below
    if ADDS_ERRORS:
        gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(states + local, mask=inside, other=0.0)
    used = bits_of_units(in_use, block, left, in_use_masked != 0, ROWS, UNITS, WIDTH, BLOCK)
    held = bits_of_units(previous, block, left, previous_masked != 0, ROWS, UNITS, WIDTH, BLOCK)

    before = tl.load(states + at, mask=some, other=0.0)
    retained = tl.where(own_held, before * beta1, before)
    sent = tl.load(gradients + at, mask=some, other=0.0).to(tl.float32) * gradient_rate + retained
    tl.store(payload + number, sent, mask=some)
    tl.store(last + number, tl.where(own_held, before, 0.0), mask=some)
    tl.atomic_add(fresh_counts + tensor, tl.sum((some & ~own_held).to(tl.int32)), sem="relaxed")
    tl.debug_barrier()  # other threads write the state below

    was_held = spread_units(held, WIDTH)
    moment = gradient * gradient_rate + tl.where(was_held, state * beta1, state)
    kept = tl.where(was_held, state, 0.0)
    tl.store(states + local, tl.where(spread_units(used, WIDTH), kept, moment), mask=inside)
    if SKIP_NEW:
        moment = tl.where(spread_units(used & ~held, WIDTH), 0.0, moment)
    if SELECT != "none":
        tl.static_assert(WIDTH == 8)
        keys = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
        bits = to_bytes(select_in_blocks(keys, k))
        if SELECT == "bitmap":
            store_bitmap(selection, bits, block - own_block, left, ROWS, UNITS, BLOCK)
        else:
            store_offsets(selection, bits, block - own_block, left, k, ROWS, UNITS, BLOCK)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "max_staleness"])
def update_compact_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    corrections,
    last,
    in_use_lists,
    fresh_counts,
    relative,
    max_staleness,
    clip,
    applied,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    WRITES: tl.constexpr,
    SCALED: tl.constexpr,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """Compute `triton_kernels.update_kernel` of sparsified tensors, with the payload in a buffer.

    The new moment on A replaces `last`.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_units(left, ROWS, UNITS, WIDTH, BLOCK, ALIGNED_TILE)
    block, _ = masks_of_tile(table, tensor, row)
    if WRITES:
        parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
        parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
    some, at, number, base = listed_entries(in_use_lists, table, tensor, row, left, block, ENTRIES, BLOCK)
    mean = tl.load(payload + base + number, mask=some, other=0.0)
    before = tl.load(last + base + number, mask=some, other=0.0)
    if SCALED:
        newly = some & ~bits_of_entries(previous, block, previous_masked, at, some, BLOCK)
        rows, of_columns, columns, start = visit_rates(table, tensor, relative, first)
    if WRITES:
        decayed = parameter - parameter * rate(rates, tensor, DECAY)
        tl.store(parameters + local, decayed.to(DTYPE), mask=inside)
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, ONE_MINUS_BETA1)
    beta2, square_rate = rate(rates, tensor, BETA2), rate(rates, tensor, ONE_MINUS_BETA2)
    eps, lr, factor = rate(rates, tensor, EPS), rate(rates, tensor, LR), tl.load(clip)
    unbias1 = 1.0 / tl.load(corrections + 2 * tensor)
    unbias2 = 1.0 / tl.load(corrections + 2 * tensor + 1)
    to_gradient = 1.0 / gradient_rate
    gh = (mean - before * beta1) * to_gradient
    moment, step = adams(
        before, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
    )
    if SCALED:
        step, moment = scaled(
            step,
            moment,
            newly,
            rows,
            of_columns,
            columns,
            start,
            mean_of_tensor(table, tensor, fresh_counts, max_staleness),
            max_staleness,
            at,
            MOMENT_SHARE,
            MIN_VISIT_RATE,
        )
    tl.store(last + base + number, moment, mask=some)
    if WRITES:
        tl.debug_barrier()  # other threads have written the parameters
        value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
        tl.store(parameters + at, (value - step * lr).to(DTYPE), mask=some)


@triton.jit(do_not_specialize=["otherwise"])
def store_moments_kernel(
    tiles,
    table,
    in_use_lists,
    previous_lists,
    last,
    applied,
    otherwise,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the moments in `last` to the state: on A if the step was applied, else on P if `otherwise`."""
    is_applied = tl.load(applied) != 0
    if (not is_applied) & (otherwise == 0):
        return
    lists = previous_lists
    if is_applied:
        lists = in_use_lists
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    block, _ = masks_of_tile(table, tensor, row)
    some, at, number, base = listed_entries(lists, table, tensor, row, left, block, ENTRIES, BLOCK)
    states = pointer(table, tensor, STATE, tl.float32, False) + first
    tl.store(states + at, tl.load(last + base + number, mask=some, other=0.0), mask=some)

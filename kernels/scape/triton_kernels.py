"""The passes of a SCAPE step as Triton kernels, for any FORM of `triton_tiles`; specified by `reference.py`.

With the sharded update the mean of the payloads is replaced by the synchronized gradient (`gradient_kernel`), and that
by the new values (`owned_update_kernel`): in the owner's row of the payload, or in the gradients' storage at the
positions of the entries.

Memory traffic per parameter: `pack_kernel` reads gradient and state and writes the state (12 bytes); `update_kernel`
reads and writes the parameter (8 bytes). Masks are extra, and for each entry of the payload 14 bytes in either; with
quantization errors 4 more, and the gradients of the entries are written.

Listed values are exchanged with the entries of a tile through the storage of gradient, state and parameter, while it is
in the device's cache. Between two steps the first moment on the mask of a replicated update is in the payload's order
in `last`, the buffer of the moment of the last step, and not in the state: scattered stores to the state would make the
memory read and write whole sectors. `store_moments_kernel` copies it to the state when something else reads it.

A tile is [ROWS, UNITS, WIDTH]: blocks, parts of a block, and the entries of a part, whose bits one thread has. With
WIDTH = 4 these are the 16 bytes that a thread loads at once, so that nothing is exchanged between threads.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    BETA1,
    COMMON,
    COUNTED,
    DECAY,
    GRADIENT,
    GRADIENT_RATE,
    MASTER,
    ONE_MINUS_BETA1,
    PARAMETER,
    STATE,
    entries_of_units,
    pointer,
    rate,
    spread_units,
)
from torchtitan_scape.kernels.scape.triton_tiles import (
    bits_of_entries,
    bits_of_tile,
    block_tile,
    listed_entries,
    moment_and_step,
    payload_of_tile,
    processed_entries,
    select_in_blocks,
    store_bitmap,
    store_offsets,
    to_bytes,
)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "k", "own_block"])
def pack_kernel(
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
    FORM: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_COMMON: tl.constexpr,
    ADDS_ERRORS: tl.constexpr,
    SKIP_NEW: tl.constexpr,
    SELECT: tl.constexpr,
):
    """Compute the new moment, payload, moment of the last step, residual, and the selection, in one pass.

    HAS_STATE: false for a tensor that has no residual: its payload is the gradient. HAS_LAST: write m of the last step
    on A to `last`. HAS_MOMENTS: `last` contains the moment on P, which the state does not. HAS_COMMON: there is a
    common buffer; it is added to mt for the selection, and updated off A. ADDS_ERRORS: first add the quantization
    `errors` of the last payload, g += error / ((1 - beta1) * scale), FP32. SKIP_NEW: newly entered entries count as
    zero in the selection. SELECT: "none", "bitmap" (uint8, bits of the own run) or "offsets" (int16 (owned blocks, k)),
    written to `selection`.
    """
    is_applied = tl.load(applied)
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    local, inside = entries_of_units(left, SHAPE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, GRADIENT_RATE)
    used = bits_of_tile(in_use, in_use_masked, table, tensor, block, left, SHAPE, FORM)
    held = bits_of_tile(previous, previous_masked, table, tensor, block, left, SHAPE, FORM)
    if FORM != "in place":
        base = payload_of_tile(table, tensor, row)
        payload += base
        last += base
        errors += base
    ADDS_LISTED: tl.constexpr = ADDS_ERRORS and FORM == "listed"
    if FORM == "listed":
        some, at, number = listed_entries(in_use_lists, table, tensor, left, block, ENTRIES, BLOCK)
        own_held = bits_of_entries(previous, previous_masked, block, at, some, BLOCK)
        if HAS_MOMENTS or ADDS_ERRORS:
            had, before_at, _ = listed_entries(previous_lists, table, tensor, left, block, ENTRIES, BLOCK)
            if HAS_MOMENTS:
                held_moments = tl.load(last + number, mask=had, other=0.0)
            if ADDS_ERRORS:
                error = tl.load(errors + number, mask=had, other=0.0)
                before = tl.load(gradients + before_at, mask=had, other=0.0)
    if not ADDS_LISTED:
        gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    # Only now: what a tile reads does not wait for the flag.
    if is_applied == 0:
        return
    if FORM == "listed" and (HAS_MOMENTS or ADDS_ERRORS):
        if HAS_MOMENTS:
            tl.store(states + before_at, held_moments, mask=had)
        if ADDS_ERRORS:
            tl.store(gradients + before_at, before + tl.div_rn(error, tl.zeros_like(error) + gradient_rate), mask=had)
        tl.debug_barrier()  # other threads read state and gradients below
    if ADDS_LISTED:
        gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    elif ADDS_ERRORS:
        error = tl.load(errors + local, mask=inside, other=0.0)
        gradient += tl.div_rn(error, tl.zeros_like(error) + gradient_rate)
    moment = gradient * gradient_rate
    if HAS_STATE:
        state = tl.load(states + local, mask=inside, other=0.0)
        was_held = spread_units(held, WIDTH)
        moment += tl.where(was_held, state * beta1, state)
        kept = tl.where(was_held, state, 0.0)
    if FORM == "listed":
        before = tl.load(states + at, mask=some, other=0.0)
        retained = tl.where(own_held, before * beta1, before)
        sent = tl.load(gradients + at, mask=some, other=0.0).to(tl.float32) * gradient_rate + retained
        tl.store(payload + number, sent, mask=some)
        if HAS_LAST:
            tl.store(last + number, tl.where(own_held, before, 0.0), mask=some)
        tl.debug_barrier()  # other threads write the state below
    elif FORM == "whole":
        tl.store(payload + local, moment, mask=inside)
        if HAS_LAST:
            tl.store(last + local, kept, mask=inside)
    else:
        tl.store(gradients + local, moment.to(DTYPE), mask=inside)
    if HAS_STATE:
        tl.store(states + local, tl.where(spread_units(used, WIDTH), kept, moment), mask=inside)
    if HAS_COMMON:
        commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
        common = tl.load(commons + local, mask=inside, other=0.0)
        common_part = tl.where(was_held, common * beta1, common)
        tl.store(commons + local, tl.where(spread_units(used, WIDTH), common, common_part), mask=inside)
        moment += common_part
    if SKIP_NEW:
        moment = tl.where(spread_units(used & ~held, WIDTH), 0.0, moment)
    if SELECT != "none":
        tl.static_assert(WIDTH == 8)
        keys = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
        bits = to_bytes(select_in_blocks(keys, k))
        if SELECT == "bitmap":
            store_bitmap(selection, bits, block - own_block, left, BLOCK)
        else:
            store_offsets(selection, bits, block - own_block, left, k, BLOCK)


@triton.jit(do_not_specialize=["first_tile"])
def squares_kernel(tiles, first_tile, rates, payload, last, partial, TILE: tl.constexpr):
    """Set partial[i] = sum of gh^2 over tile i of the payload buffer, with gh = (b - beta1*q) / (1 - beta1).

    A tile has three int64: tensor, position in the payload, entries. The first program processes tile `first_tile`.
    """
    number = first_tile + tl.program_id(0)
    tensor, position = tl.load(tiles + 3 * number), tl.load(tiles + 3 * number + 1)
    inside = tl.arange(0, TILE) < tl.load(tiles + 3 * number + 2)
    at = position + tl.arange(0, TILE)
    mean, before = tl.load(payload + at, mask=inside, other=0.0), tl.load(last + at, mask=inside, other=0.0)
    gh = (mean - before * rate(rates, tensor, BETA1)) / rate(rates, tensor, ONE_MINUS_BETA1)
    tl.store(partial + number, tl.sum(gh * gh) * rate(rates, tensor, COUNTED))


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def gradient_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    lists,
    partial,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    FORM: tl.constexpr,
    OWNED: tl.constexpr,
):
    """Set partial[i] = sum of gh^2 over a tile. OWNED: of a sharded update, whose payload becomes gh.

    All tiles use the same code: the order of summation must not depend on the alignment of a replica's gradients.
    """
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    masks = in_use, previous, in_use_masked, previous_masked
    tile = block_tile(tiles, table, BLOCK, False)
    tensor, _, _, first, _ = tile
    some, at, number, values, used, was_held = processed_entries(
        payload, lists, table, masks, tile, SHAPE, ENTRIES, False, FORM
    )
    mean = tl.load(values + number, mask=some, other=0.0)
    if OWNED:
        # beta1 * q, which no replica sent, cancels for entries in P; for others the common residual is added.
        commons = pointer(table, tensor, COMMON, tl.float32, False) + first
        common = tl.load(commons + at, mask=some, other=0.0)
        gh = (mean + tl.where(was_held, 0.0, common)) * (1.0 / rate(rates, tensor, ONE_MINUS_BETA1))
        tl.store(values + number, gh, mask=some & used)
    else:
        before = tl.load(pointer(table, tensor, STATE, tl.float32, False) + first + at, mask=some, other=0.0)
        gh = (mean - before * rate(rates, tensor, BETA1)) / rate(rates, tensor, ONE_MINUS_BETA1)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(some & used, gh * gh, 0.0)) * rate(rates, tensor, COUNTED))


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def update_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    lists,
    corrections,
    last,
    fresh_counts,
    relative,
    clip,
    applied,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,
    WRITES: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """Apply the AdamS update on A and weight decay everywhere. The new moment on A replaces `last` of listed entries,
    and is written to the state of others.

    WRITES: write the parameters; false if another replica of the process does. SCALED: see
    `moment_and_step`. Of a payload in place, m of the last step is in the state.
    """
    if tl.load(applied) == 0:
        return
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    masks = in_use, previous, in_use_masked, previous_masked
    tile = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    tensor, row, _, first, left = tile
    if WRITES:
        local, inside = entries_of_units(left, SHAPE, ALIGNED_TILE)
        parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
        parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        decayed = parameter - parameter * rate(rates, tensor, DECAY)
    some, at, number, values, used, was_held = processed_entries(
        payload, lists, table, masks, tile, SHAPE, ENTRIES, ALIGNED_TILE, FORM
    )
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    moments = states
    if FORM != "in place":
        moments = last + payload_of_tile(table, tensor, row)
    mean, before = tl.load(values + number, mask=some, other=0.0), tl.load(moments + number, mask=some, other=0.0)
    if WRITES and FORM == "listed":
        tl.store(parameters + local, decayed.to(DTYPE), mask=inside)
    gh = (mean - before * rate(rates, tensor, BETA1)) * (1.0 / rate(rates, tensor, ONE_MINUS_BETA1))
    inputs = rates, corrections, clip, fresh_counts, relative
    moment, step = moment_and_step(before, gh, used & ~was_held, at, tile, table, inputs, SCALED, CLIP_MOMENT)
    if FORM == "listed":
        tl.store(moments + number, moment, mask=some)
        if WRITES:
            tl.debug_barrier()  # other threads have written the parameters
            value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
            tl.store(parameters + at, (value - step).to(DTYPE), mask=some)
    else:
        tl.store(states + at, tl.where(used, moment, before), mask=some)
        if WRITES:
            tl.store(parameters + at, (decayed - tl.where(used, step, 0.0)).to(DTYPE), mask=some)


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
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, False)
    some, at, number = listed_entries(lists, table, tensor, left, block, ENTRIES, BLOCK)
    states = pointer(table, tensor, STATE, tl.float32, False) + first
    moments = tl.load(last + payload_of_tile(table, tensor, row) + number, mask=some, other=0.0)
    tl.store(states + at, moments, mask=some)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def owned_update_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    lists,
    corrections,
    scales,
    fresh_counts,
    relative,
    clip,
    applied,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SCALED: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """Write the new moments of owned entries to the common buffer, and replace gh by the new values.

    HAS_MASTER: update the FP32 master weights, which decay everywhere, and divide the new values by float64 `scales`,
    one per tensor; otherwise start from the parameters, which `write_kernel` decays. SCALED: see `moment_and_step`.
    """
    if tl.load(applied) == 0:
        return
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    masks = in_use, previous, in_use_masked, previous_masked
    tile = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    tensor, _, _, first, left = tile
    decay = rate(rates, tensor, DECAY)
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    if HAS_MASTER:
        parameters = pointer(table, tensor, MASTER, tl.float32, ALIGNED_TILE) + first
    if HAS_MASTER and FORM == "listed":
        local, inside = entries_of_units(left, SHAPE, ALIGNED_TILE)
        master = tl.load(parameters + local, mask=inside, other=0.0)
        tl.store(parameters + local, master - master * decay, mask=inside)
        tl.debug_barrier()  # other threads write the entries of the mask below
    some, at, number, values, used, was_held = processed_entries(
        payload, lists, table, masks, tile, SHAPE, ENTRIES, ALIGNED_TILE, FORM
    )
    commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
    common, gh = tl.load(commons + at, mask=some, other=0.0), tl.load(values + number, mask=some, other=0.0)
    inputs = rates, corrections, clip, fresh_counts, relative
    before = tl.where(was_held, common, 0.0)
    moment, step = moment_and_step(before, gh, used & ~was_held, at, tile, table, inputs, SCALED, CLIP_MOMENT)
    value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
    if not (HAS_MASTER and FORM == "listed"):
        value -= value * decay
    changed = value - step
    sent = changed
    if HAS_MASTER:
        sent = tl.div_rn(changed, tl.zeros_like(changed) + tl.load(scales + tensor).to(tl.float32))
    # Whole tiles: a mask of single entries would split the stores into words.
    tl.store(values + number, tl.where(used, sent, gh), mask=some)
    tl.store(commons + at, tl.where(used, moment, common), mask=some)
    if HAS_MASTER:
        tl.store(parameters + at, tl.where(used, changed, value), mask=some)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def write_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    lists,
    applied,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """Write the owners' values on A, FP32 or BF16, and with DECAYS apply weight decay off A."""
    if tl.load(applied) == 0:
        return
    SHAPE: tl.constexpr = (ROWS, UNITS, WIDTH, BLOCK)
    masks = in_use, previous, in_use_masked, previous_masked
    tile = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    tensor, _, _, first, left = tile
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    decay = rate(rates, tensor, DECAY)
    some, at, number, values, used, _ = processed_entries(
        payload, lists, table, masks, tile, SHAPE, ENTRIES, ALIGNED_TILE, FORM
    )
    value = tl.load(values + number, mask=some, other=0.0).to(tl.float32)
    parameter = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
    decayed = parameter - parameter * decay
    if FORM == "listed":
        if DECAYS:
            local, inside = entries_of_units(left, SHAPE, ALIGNED_TILE)
            every = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
            tl.store(parameters + local, (every - every * decay).to(DTYPE), mask=inside)
            tl.debug_barrier()  # other threads write the entries of the mask below
        tl.store(parameters + at, value.to(DTYPE), mask=some)
    else:
        if DECAYS:
            parameter = decayed
        tl.store(parameters + at, tl.where(used, value, parameter).to(DTYPE), mask=some)

"""The streaming passes of a SCAPE step as Triton kernels; `reference.py` specifies them.

Bytes per parameter: `pack` reads gradient and state and writes the state (12), `update` reads and writes the parameter
(8); masks, payload and the moment on the mask come on top.
"""

import triton
import triton.language as tl

from kernels.common.triton_common import (
    BETA1,
    BETA2,
    COMMON,
    COUNTED,
    DECAY,
    EPS,
    FIRST_BLOCK,
    GRADIENT,
    GRADIENT_RATE,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    OUTSIDE,
    PARAMETER,
    ROW,
    STATE,
    VISITED_COLUMNS,
    VISITED_ROWS,
    adams,
    cell,
    count_bits,
    entries,
    lowest,
    mask_bytes,
    payload_positions,
    pointer,
    rate,
    spread,
    tile_of,
)
from kernels.scape.triton_select import choose_in_blocks, store_bitmap, store_offsets, to_bytes


@triton.jit
def masks_of_tile(table, tensor, row):
    """First block of the tile in the masks, and whether the tensor has a mask at all."""
    first = cell(table, tensor, FIRST_BLOCK)
    return first + row, first >= 0


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
    fresh_counts,
    chosen,
    k,
    own_block,
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    SKIP_NEW: tl.constexpr,
    SELECT: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_COMMON: tl.constexpr,
):
    """New moment, payload, last step's moment on it, residual, and the next mask of owned blocks, in one pass.

    COMPACT: mt on A goes to `payload`, last step's m there to `last`; else mt goes over the gradient, FP32.
    SKIP_NEW: newly entered entries count as zeros in the selection. SELECT: "none", "bitmap" (uint8, the bits of the
    own run) or "offsets" (int16 (owned blocks, k)), written to `chosen`. HAS_LAST: there is a `last`. HAS_COMMON: what
    all replicas leave out of mt lies in a buffer of its own, counts in the selection, and is kept off A.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (in_use_masked != 0)
    used = mask_bytes(in_use, block, left, masked, ROWS, BYTES, BLOCK)
    held = mask_bytes(previous, block, left, sparse & (previous_masked != 0), ROWS, BYTES, BLOCK)
    gradients = pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, GRADIENT_RATE)
    gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(states + local, mask=inside, other=0.0)

    if sparse:
        tl.atomic_add(fresh_counts + tensor, tl.sum(count_bits(used & ~held)), sem="relaxed")
    if COMPACT:
        base, to = payload_positions(table, tensor, row, used, ROWS, BLOCK)
        payload += base
        last += base
        at_byte = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BYTES)[None, :] * 8
        bits, left_over = used, tl.max(count_bits(used))
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            at = at_byte + lowest(bits)
            before = tl.load(states + at, mask=some, other=0.0)
            was_held = (held & (bits & -bits)) != 0
            carried = tl.where(was_held, before * beta1, before)
            moment = tl.load(gradients + at, mask=some, other=0.0).to(tl.float32) * gradient_rate + carried
            tl.store(payload + to, moment, mask=some)
            if HAS_LAST:
                tl.store(last + to, tl.where(was_held, before, 0.0), mask=some)
            bits = bits & (bits - 1)
            to += 1
        tl.debug_barrier()  # the state is written below, by other threads than those that read it here

    was_held = spread(held)
    moment = gradient * gradient_rate + tl.where(was_held, state * beta1, state)
    kept = tl.where(was_held, state, 0.0)
    tl.store(states + local, tl.where(spread(used), kept, moment), mask=inside)
    if not COMPACT:
        tl.store(gradients + local, moment.to(DTYPE), mask=inside)
    if HAS_COMMON:
        commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
        common = tl.load(commons + local, mask=inside, other=0.0)
        carried = tl.where(was_held, common * beta1, common)
        tl.store(commons + local, tl.where(spread(used), common, carried), mask=inside)
        moment += carried
    if SKIP_NEW:
        moment = tl.where(spread(used & ~held), 0.0, moment)
    if SELECT != "none":
        keys = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
        bits = to_bytes(choose_in_blocks(tl.reshape(keys, (ROWS, BYTES * 8)), k), ROWS, BYTES)
        if SELECT == "bitmap":
            store_bitmap(chosen, bits, block - own_block, left, ROWS, BYTES, BLOCK)
        else:
            store_offsets(chosen, bits, block - own_block, left, k, ROWS, BYTES, BLOCK)


@triton.jit(do_not_specialize=["previous_masked"])
def carry_kernel(
    tiles,
    table,
    rates,
    previous,
    previous_masked,
    errors,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """g += error / ((1 - beta1) * scale) on P, FP32: what rounding the last payload lost."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (previous_masked != 0)
    bits = mask_bytes(previous, block, left, masked, ROWS, BYTES, BLOCK)
    base, position = payload_positions(table, tensor, row, bits, ROWS, BLOCK)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, False) + first
    errors += base
    gradient_rate = rate(rates, tensor, GRADIENT_RATE)
    at_byte = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BYTES)[None, :] * 8
    left_over = tl.max(count_bits(bits))
    while left_over > 0:
        left_over -= 1
        some = bits != 0
        at = at_byte + lowest(bits)
        error = tl.load(errors + position, mask=some, other=0.0)
        gradient = tl.load(gradients + at, mask=some, other=0.0)
        tl.store(gradients + at, gradient + error / gradient_rate, mask=some)
        bits = bits & (bits - 1)
        position += 1


@triton.jit
def squares_kernel(tiles, rates, payload, last, partial, TILE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """partial[i] = sum over a stretch of the compact payload of gh^2, gh = (b - beta1*q) / (1 - beta1).

    Tiles, int64: tensor, position in the payload, entries. EASY: all have TILE entries from a multiple of 4 on.
    """
    at = tiles + 3 * tl.program_id(0)
    tensor = tl.load(at)
    position = tl.load(at + 1)
    lanes = tl.arange(0, TILE)
    if ALIGNED_TILE:
        position = tl.multiple_of(position, 4)
        inside = lanes >= 0
    else:
        inside = lanes < tl.load(at + 2)
    mean = tl.load(payload + position + lanes, mask=inside, other=0.0)
    before = tl.load(last + position + lanes, mask=inside, other=0.0)
    gh = (mean - before * rate(rates, tensor, BETA1)) / rate(rates, tensor, ONE_MINUS_BETA1)
    tl.store(partial + tl.program_id(0), tl.sum(gh * gh) * rate(rates, tensor, COUNTED))


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def squares_in_place_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    partial,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same where the mean of mt lies in the gradients' storage and last step's m in the state.

    All tiles are taken alike: the order of summation must not depend on how a replica's gradients are aligned.
    """
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, False)
    block, sparse = masks_of_tile(table, tensor, row)
    used = spread(mask_bytes(in_use, block, left, sparse & (in_use_masked != 0), ROWS, BYTES, BLOCK))
    mean = tl.load(pointer(table, tensor, GRADIENT, tl.float32, False) + first + local, mask=inside, other=0.0)
    before = tl.load(pointer(table, tensor, STATE, tl.float32, False) + first + local, mask=inside, other=0.0)
    gh = (mean - before * rate(rates, tensor, BETA1)) / rate(rates, tensor, ONE_MINUS_BETA1)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(used, gh * gh, 0.0)) * rate(rates, tensor, COUNTED))


@triton.jit
def mean_of_tensor(table, tensor, fresh_counts, max_staleness):
    """The tensor's mean staleness, by Little's law."""
    entering = tl.maximum(tl.load(fresh_counts + tensor), 1).to(tl.float32)
    return tl.minimum(tl.maximum(cell(table, tensor, OUTSIDE).to(tl.float32) / entering, 1.0), max_staleness)


@triton.jit
def staleness(table, tensor, relative, mean, max_staleness, first, local, here, MIN_VISIT_RATE: tl.constexpr):
    """By how often the mask visits an entry's row and column, from the tensor's mean; `here` says which are wanted.

    first: the tile's first entry in the tensor, int64 (); local: numbers of entries behind it.
    """
    columns = cell(table, tensor, ROW)
    column = (first % columns).to(tl.int32) + local
    row = column // columns.to(tl.int32)
    column -= row * columns.to(tl.int32)
    rows = relative + cell(table, tensor, VISITED_ROWS) + first // columns
    often = tl.load(rows + row, mask=here, other=1.0)
    often = often * tl.load(relative + cell(table, tensor, VISITED_COLUMNS) + column, mask=here, other=1.0)
    return tl.minimum(tl.maximum(mean / tl.maximum(often, MIN_VISIT_RATE), 1.0), max_staleness)


@triton.jit
def scaled(
    step,
    moment,
    newly,
    table,
    tensor,
    relative,
    mean_staleness,
    max_staleness,
    first,
    local,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
):
    """Step and moment, where `newly` scaled by the staleness and cut to the share that is kept."""
    factor = staleness(table, tensor, relative, mean_staleness, max_staleness, first, local, newly, MIN_VISIT_RATE)
    step = tl.where(newly, step * factor, step)
    if MOMENT_SHARE < 1:
        moment = tl.where(newly, moment * MOMENT_SHARE, moment)
    return step, moment


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "max_staleness"])
def update_kernel(
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
    fresh_counts,
    relative,
    max_staleness,
    clip,
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    WRITES: tl.constexpr,
    SCALED: tl.constexpr,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """The AdamS step on A, weight decay everywhere; the new moment goes into the state on A.

    WRITES: whether new values go into the parameters; another replica of the process may do that.

    SCALED: by staleness, see `relative`. KEEPS: share of the moment that entries keep whose step was scaled. Where not
    COMPACT, the mean of mt lies in the gradients' storage (FP32) and last step's m in the state.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    if WRITES:
        parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
        parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        decayed = parameter - parameter * rate(rates, tensor, DECAY)

    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (in_use_masked != 0)
    used = mask_bytes(in_use, block, left, masked, ROWS, BYTES, BLOCK)
    held = mask_bytes(previous, block, left, sparse & (previous_masked != 0) & SCALED, ROWS, BYTES, BLOCK)
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, ONE_MINUS_BETA1)
    beta2, square_rate = rate(rates, tensor, BETA2), rate(rates, tensor, ONE_MINUS_BETA2)
    eps, lr, factor = rate(rates, tensor, EPS), rate(rates, tensor, LR), tl.load(clip)
    unbias1 = 1.0 / tl.load(corrections + 2 * tensor)
    unbias2 = 1.0 / tl.load(corrections + 2 * tensor + 1)
    to_gradient = 1.0 / gradient_rate
    mean_staleness = mean_of_tensor(table, tensor, fresh_counts, max_staleness)
    if COMPACT:
        if WRITES:
            tl.store(parameters + local, decayed.to(DTYPE), mask=inside)
            tl.debug_barrier()  # the entries of the mask are changed below, by other threads
        base, at_payload = payload_positions(table, tensor, row, used, ROWS, BLOCK)
        payload += base
        last += base
        at_byte = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BYTES)[None, :] * 8
        bits, left_over = used, tl.max(count_bits(used))
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            at = at_byte + lowest(bits)
            mean = tl.load(payload + at_payload, mask=some, other=0.0)
            before = tl.load(last + at_payload, mask=some, other=0.0)
            gh = (mean - before * beta1) * to_gradient
            moment, step = adams(
                before, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
            )
            if SCALED:
                newly = some & ((held & (bits & -bits)) == 0)
                step, moment = scaled(
                    step,
                    moment,
                    newly,
                    table,
                    tensor,
                    relative,
                    mean_staleness,
                    max_staleness,
                    first,
                    at,
                    MOMENT_SHARE,
                    MIN_VISIT_RATE,
                )
            if WRITES:
                value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
                tl.store(parameters + at, (value - step * lr).to(DTYPE), mask=some)
            tl.store(states + at, moment, mask=some)
            bits = bits & (bits - 1)
            at_payload += 1
    else:
        means = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
        mean = tl.load(means + local, mask=inside, other=0.0)
        state = tl.load(states + local, mask=inside, other=0.0)
        gh = (mean - state * beta1) * to_gradient
        moment, step = adams(
            state, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
        )
        changed = spread(used)
        if SCALED:
            newly = changed & ~spread(held)
            step, moment = scaled(
                step,
                moment,
                newly,
                table,
                tensor,
                relative,
                mean_staleness,
                max_staleness,
                first,
                local,
                MOMENT_SHARE,
                MIN_VISIT_RATE,
            )
        if WRITES:
            value = decayed - tl.where(changed, step * lr, 0.0)
            tl.store(parameters + local, value.to(DTYPE), mask=inside)
        tl.store(states + local, tl.where(changed, moment, state), mask=inside)

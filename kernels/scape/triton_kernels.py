"""Streaming passes of a SCAPE step as Triton kernels; specified by `reference.py`.

Memory traffic per parameter: `pack` reads gradient and state and writes the state (12 bytes); `update` reads and writes
the parameter (8 bytes). Masks, payload and the moment on the mask are extra.

In all kernels `used` are the bits of A, `held` those of P, and `was_held` is true for entries in P.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
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
    PAYLOAD,
    ROW,
    STATE,
    VISITED_COLUMNS,
    VISITED_ROWS,
    adams,
    cell,
    count_bits,
    entries,
    first_entries,
    lowest,
    mask_bytes,
    payload_positions,
    pointer,
    rate,
    spread,
    tile_of,
)
from torchtitan_scape.kernels.scape.triton_select import select_in_blocks, store_bitmap, store_offsets, to_bytes


@triton.jit
def masks_of_tile(table, tensor, row):
    """Return the first block of the tile in the masks, and whether the tensor is sparsified."""
    first = cell(table, tensor, FIRST_BLOCK)
    return first + row, first >= 0


@triton.jit
def add_errors(
    gradients,
    errors,
    table,
    tensor,
    row,
    bits,
    gradient_rate,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the quantization errors of the last payload to a tile: g += error / ((1 - beta1) * scale), FP32.

    bits: the entries of that payload, P.
    """
    base, position = payload_positions(table, tensor, row, bits)
    errors += base
    at_byte = first_entries(ROWS, BYTES, BLOCK)
    left_over = tl.max(count_bits(bits))
    while left_over > 0:
        left_over -= 1
        some = bits != 0
        at = at_byte + lowest(bits)
        error = tl.load(errors + position, mask=some, other=0.0)
        gradient = tl.load(gradients + at, mask=some, other=0.0)
        added = tl.div_rn(error, tl.zeros_like(error) + gradient_rate)
        tl.store(gradients + at, gradient + added, mask=some)
        bits = bits & (bits - 1)
        position += 1


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
    selection,
    k,
    own_block,
    applied,
    errors,
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
    ADDS_ERRORS: tl.constexpr,
):
    """Compute the new moment, payload, moment of the last step, residual, and the selection, in one pass.

    COMPACT: write mt on A to `payload`, and m of the last step on A to `last`; otherwise mt replaces the gradient.
    SKIP_NEW: newly entered entries count as zero in the selection. SELECT: "none", "bitmap" (uint8, bits of the own
    run) or "offsets" (int16 (owned blocks, k)), written to `selection`. HAS_LAST: `last` exists. HAS_COMMON: there is a
    common buffer; it is added to mt for the selection, and updated off A. ADDS_ERRORS: first add `errors` to the
    gradients.
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
    if ADDS_ERRORS:
        add_errors(gradients, errors, table, tensor, row, held, gradient_rate, ROWS, BYTES, BLOCK)
        tl.debug_barrier()  # other threads read the gradients below
    gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    state = tl.load(states + local, mask=inside, other=0.0)

    if sparse:
        tl.atomic_add(fresh_counts + tensor, tl.sum(count_bits(used & ~held)), sem="relaxed")
    if COMPACT:
        base, to = payload_positions(table, tensor, row, used)
        payload += base
        last += base
        at_byte = first_entries(ROWS, BYTES, BLOCK)
        bits, left_over = used, tl.max(count_bits(used))
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            at = at_byte + lowest(bits)
            before = tl.load(states + at, mask=some, other=0.0)
            was_held = (held & (bits & -bits)) != 0
            retained = tl.where(was_held, before * beta1, before)
            moment = tl.load(gradients + at, mask=some, other=0.0).to(tl.float32) * gradient_rate + retained
            tl.store(payload + to, moment, mask=some)
            if HAS_LAST:
                tl.store(last + to, tl.where(was_held, before, 0.0), mask=some)
            bits = bits & (bits - 1)
            to += 1
        tl.debug_barrier()  # other threads write the state below

    was_held = spread(held, ROWS, BYTES)
    moment = gradient * gradient_rate + tl.where(was_held, state * beta1, state)
    kept = tl.where(was_held, state, 0.0)
    tl.store(states + local, tl.where(spread(used, ROWS, BYTES), kept, moment), mask=inside)
    if not COMPACT:
        tl.store(gradients + local, moment.to(DTYPE), mask=inside)
    if HAS_COMMON:
        commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
        common = tl.load(commons + local, mask=inside, other=0.0)
        common_part = tl.where(was_held, common * beta1, common)
        tl.store(commons + local, tl.where(spread(used, ROWS, BYTES), common, common_part), mask=inside)
        moment += common_part
    if SKIP_NEW:
        moment = tl.where(spread(used & ~held, ROWS, BYTES), 0.0, moment)
    if SELECT != "none":
        keys = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
        bits = to_bytes(select_in_blocks(keys, k))
        if SELECT == "bitmap":
            store_bitmap(selection, bits, block - own_block, left, ROWS, BYTES, BLOCK)
        else:
            store_offsets(selection, bits, block - own_block, left, k, ROWS, BYTES, BLOCK)


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
    """Add the quantization errors of the last payload to the gradients, as a pass of its own."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    block, sparse = masks_of_tile(table, tensor, row)
    bits = mask_bytes(previous, block, left, sparse & (previous_masked != 0), ROWS, BYTES, BLOCK)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, False) + first
    gradient_rate = rate(rates, tensor, GRADIENT_RATE)
    add_errors(gradients, errors, table, tensor, row, bits, gradient_rate, ROWS, BYTES, BLOCK)


@triton.jit
def squares_kernel(tiles, rates, payload, last, partial, TILE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Set partial[i] = sum of gh^2 over a tile of the payload buffer, with gh = (b - beta1*q) / (1 - beta1).

    A tile has three int64: tensor, position in the payload, entries. ALIGNED_TILE: all tiles have TILE entries and
    begin at a multiple of 4.
    """
    at = tiles + 3 * tl.program_id(0)
    tensor = tl.load(at)
    position = tl.load(at + 1)
    offsets = tl.arange(0, TILE)
    if ALIGNED_TILE:
        position = tl.multiple_of(position, 4)
        inside = offsets >= 0
    else:
        inside = offsets < tl.load(at + 2)
    mean = tl.load(payload + position + offsets, mask=inside, other=0.0)
    before = tl.load(last + position + offsets, mask=inside, other=0.0)
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
    """Compute `squares_kernel` with the mean of mt in the gradients' storage and m of the last step in the state.

    All tiles use the same code: the order of summation must not depend on the alignment of a replica's gradients.
    """
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, False)
    block, sparse = masks_of_tile(table, tensor, row)
    used = mask_bytes(in_use, block, left, sparse & (in_use_masked != 0), ROWS, BYTES, BLOCK)
    used = spread(used, ROWS, BYTES)
    mean = tl.load(pointer(table, tensor, GRADIENT, tl.float32, False) + first + local, mask=inside, other=0.0)
    before = tl.load(pointer(table, tensor, STATE, tl.float32, False) + first + local, mask=inside, other=0.0)
    gh = (mean - before * rate(rates, tensor, BETA1)) / rate(rates, tensor, ONE_MINUS_BETA1)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(used, gh * gh, 0.0)) * rate(rates, tensor, COUNTED))


@triton.jit
def mean_of_tensor(table, tensor, fresh_counts, max_staleness):
    """Return the tensor's mean staleness, by Little's law."""
    entering = tl.maximum(tl.load(fresh_counts + tensor), 1).to(tl.float32)
    return tl.minimum(tl.maximum(cell(table, tensor, OUTSIDE).to(tl.float32) / entering, 1.0), max_staleness)


@triton.jit
def visit_rates(table, tensor, relative, first):
    """Return the arguments of `scaled` for a tile: the addresses of the visit rates of its first row and of the first
    column of the tensor, the length of a row, and the column of the tile's first entry.

    first: first entry of the tile in the tensor, int64 (). Outside loops, because these divisions are slow.
    """
    columns = cell(table, tensor, ROW)
    rows = relative + cell(table, tensor, VISITED_ROWS) + first // columns
    of_columns = relative + cell(table, tensor, VISITED_COLUMNS)
    return rows, of_columns, columns.to(tl.int32), (first % columns).to(tl.int32)


@triton.jit
def scaled(
    step,
    moment,
    newly,
    rows,
    of_columns,
    columns,
    start,
    mean_staleness,
    max_staleness,
    local,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
):
    """Return step and moment; where `newly`, multiplied by the staleness and by MOMENT_SHARE, respectively.

    The staleness is the tensor's mean, divided by the relative visit rates of row and column. local: indices of the
    entries in the tile. rows, of_columns, columns, start: of `visit_rates`.
    """
    column = start + local
    row = column // columns
    column -= row * columns
    frequency = tl.load(rows + row, mask=newly, other=1.0) * tl.load(of_columns + column, mask=newly, other=1.0)
    factor = mean_staleness / tl.maximum(frequency, MIN_VISIT_RATE)
    step = tl.where(newly, step * tl.minimum(tl.maximum(factor, 1.0), max_staleness), step)
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
    """Apply the AdamS update on A and weight decay everywhere; the new moment on A is written to the state.

    WRITES: write the parameters; false if another replica of the process does. SCALED: multiply the steps of newly
    entered entries by their staleness, and their moments by MOMENT_SHARE. The mean of mt is in the gradients' storage
    (FP32), and m of the last step in the state. COMPACT: only tensors that are not sparsified, and both are in buffers.
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
    rows, of_columns, columns, start = visit_rates(table, tensor, relative, first)
    if COMPACT:
        base = cell(table, tensor, PAYLOAD) + first
        mean = tl.load(payload + base + local, mask=inside, other=0.0)
        state = tl.load(last + base + local, mask=inside, other=0.0)
    else:
        means = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
        mean = tl.load(means + local, mask=inside, other=0.0)
        state = tl.load(states + local, mask=inside, other=0.0)
    gh = (mean - state * beta1) * to_gradient
    moment, step = adams(
        state, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
    )
    changed = spread(used, ROWS, BYTES)
    if SCALED:
        newly = changed & ~spread(held, ROWS, BYTES)
        step, moment = scaled(
            step,
            moment,
            newly,
            rows,
            of_columns,
            columns,
            start,
            mean_staleness,
            max_staleness,
            local,
            MOMENT_SHARE,
            MIN_VISIT_RATE,
        )
    if WRITES:
        value = decayed - tl.where(changed, step * lr, 0.0)
        tl.store(parameters + local, value.to(DTYPE), mask=inside)
    tl.store(states + local, tl.where(changed, moment, state), mask=inside)

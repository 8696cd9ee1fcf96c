"""Updates by the owner of entries, for SCAPE with sharded updates, as Triton kernels; see `reference_owner.py`.

The mean of the payloads is replaced by the synchronized gradient, and that by the new values. With COMPACT they are in
the owner's row of the payload, otherwise in the gradients' storage, at the positions of the entries.
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
    GRADIENT,
    LR,
    MASTER,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    PARAMETER,
    START,
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
from torchtitan_scape.kernels.scape.triton_kernels import masks_of_tile, mean_of_tensor, scaled, visit_rates


@triton.jit
def _synchronized_gradient(common, was_held, mean, to_gradient):
    """Return gh: beta1 * q, which no replica sent, cancels for entries in P; for others the residual is added."""
    return (mean + tl.where(was_held, 0.0, common)) * to_gradient


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked"])
def owned_gradient_kernel(
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
    COMPACT: tl.constexpr,
):
    """Replace the mean of the payloads by gh on A; partial[i] = the sum of its squares in a tile.

    All tiles use the same code: the order of summation must not depend on the alignment of tensors.
    """
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (in_use_masked != 0)
    used = mask_bytes(in_use, block, left, masked, ROWS, BYTES, BLOCK)
    held = mask_bytes(previous, block, left, sparse & (previous_masked != 0), ROWS, BYTES, BLOCK)
    commons = pointer(table, tensor, COMMON, tl.float32, False) + first
    to_gradient = 1.0 / rate(rates, tensor, ONE_MINUS_BETA1)
    counted = rate(rates, tensor, COUNTED)
    if COMPACT:
        base, position = payload_positions(table, tensor, row, used)
        payload += base
        at_byte = first_entries(ROWS, BYTES, BLOCK)
        bits, left_over = used, tl.max(count_bits(used))
        squares = tl.zeros((ROWS * BYTES,), dtype=tl.float32)
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            common = tl.load(commons + at_byte + lowest(bits), mask=some, other=0.0)
            mean = tl.load(payload + position, mask=some, other=0.0)
            gh = _synchronized_gradient(common, (held & (bits & -bits)) != 0, mean, to_gradient)
            tl.store(payload + position, gh, mask=some)
            squares += gh * gh
            bits = bits & (bits - 1)
            position += 1
        tl.store(partial + tl.program_id(0), tl.sum(squares) * counted)
    else:
        local, inside = entries(left, ROWS, BYTES, BLOCK, False)
        means = pointer(table, tensor, GRADIENT, tl.float32, False) + first
        common = tl.load(commons + local, mask=inside, other=0.0)
        mean = tl.load(means + local, mask=inside, other=0.0)
        changed, was_held = spread(used, ROWS, BYTES), spread(held, ROWS, BYTES)
        gh = tl.where(changed, _synchronized_gradient(common, was_held, mean, to_gradient), 0.0)
        tl.store(means + local, gh, mask=inside & changed)
        tl.store(partial + tl.program_id(0), tl.sum(gh * gh) * counted)


@triton.jit(do_not_specialize=["in_use_masked", "previous_masked", "max_staleness"])
def owned_update_kernel(
    tiles,
    table,
    rates,
    in_use,
    previous,
    in_use_masked,
    previous_masked,
    payload,
    corrections,
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
    HAS_MASTER: tl.constexpr,
    CHANGES: tl.constexpr,
    SCALED: tl.constexpr,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """Write new moments to the common buffer, and replace gh by the new values.

    HAS_MASTER: update the FP32 master weights, which decay everywhere; otherwise start from the parameters, which
    `write_kernel` decays. CHANGES: replace gh by the difference between the new values and the decayed parameters.
    SCALED and MOMENT_SHARE: as in `update_kernel`.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (in_use_masked != 0)
    used = mask_bytes(in_use, block, left, masked, ROWS, BYTES, BLOCK)
    held = mask_bytes(previous, block, left, sparse & (previous_masked != 0), ROWS, BYTES, BLOCK)
    commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
    beta1, gradient_rate = rate(rates, tensor, BETA1), rate(rates, tensor, ONE_MINUS_BETA1)
    beta2, square_rate = rate(rates, tensor, BETA2), rate(rates, tensor, ONE_MINUS_BETA2)
    eps, lr, factor = rate(rates, tensor, EPS), rate(rates, tensor, LR), tl.load(clip)
    decay = rate(rates, tensor, DECAY)
    unbias1 = 1.0 / tl.load(corrections + 2 * tensor)
    unbias2 = 1.0 / tl.load(corrections + 2 * tensor + 1)
    rows, of_columns, columns, start = visit_rates(table, tensor, relative, first + cell(table, tensor, START))
    mean_staleness = mean_of_tensor(table, tensor, fresh_counts, max_staleness)
    if HAS_MASTER:
        parameters = pointer(table, tensor, MASTER, tl.float32, ALIGNED_TILE) + first
        if COMPACT:
            master = tl.load(parameters + local, mask=inside, other=0.0)
            tl.store(parameters + local, master - master * decay, mask=inside)
            tl.debug_barrier()  # other threads write the entries of the mask below
    else:
        parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    copies = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    if COMPACT:
        base, position = payload_positions(table, tensor, row, used)
        payload += base
        at_byte = first_entries(ROWS, BYTES, BLOCK)
        bits, left_over = used, tl.max(count_bits(used))
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            at = at_byte + lowest(bits)
            was_held = (held & (bits & -bits)) != 0
            before = tl.where(was_held, tl.load(commons + at, mask=some, other=0.0), 0.0)
            gh = tl.load(payload + position, mask=some, other=0.0)
            moment, step = adams(
                before, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
            )
            if SCALED:
                newly = some & ~was_held
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
                    at,
                    MOMENT_SHARE,
                    MIN_VISIT_RATE,
                )
            value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
            if not HAS_MASTER:
                value -= value * decay
            value -= step * lr
            sent = value
            if CHANGES:
                copy = tl.load(copies + at, mask=some, other=0.0).to(tl.float32)
                sent = value - (copy - copy * decay)
            tl.store(payload + position, sent, mask=some)
            tl.store(commons + at, moment, mask=some)
            if HAS_MASTER:
                tl.store(parameters + at, value, mask=some)
            bits = bits & (bits - 1)
            position += 1
    else:
        gradients = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
        gh = tl.load(gradients + local, mask=inside, other=0.0)
        common = tl.load(commons + local, mask=inside, other=0.0)
        was_held, changed = spread(held, ROWS, BYTES), spread(used, ROWS, BYTES)
        before = tl.where(was_held, common, 0.0)
        moment, step = adams(
            before, gh, gh * factor, beta1, gradient_rate, beta2, square_rate, eps, unbias1, unbias2, CLIP_MOMENT
        )
        if SCALED:
            step, moment = scaled(
                step,
                moment,
                changed & ~was_held,
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
        value = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        value = value - value * decay
        changed_value = value - step * lr
        sent = changed_value
        if CHANGES:
            copy = tl.load(copies + local, mask=inside, other=0.0).to(tl.float32)
            sent = changed_value - (copy - copy * decay)
        # Whole tiles: a mask of single entries would split the stores into words.
        tl.store(gradients + local, tl.where(changed, sent, gh), mask=inside)
        tl.store(commons + local, tl.where(changed, moment, common), mask=inside)
        if HAS_MASTER:
            tl.store(parameters + local, tl.where(changed, changed_value, value), mask=inside)


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
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPACT: tl.constexpr,
    DECAYS: tl.constexpr,
    CHANGES: tl.constexpr,
):
    """Write the owners' values on A, and with DECAYS apply weight decay off A.

    COMPACT: values are in `payload`, FP32 or BF16, otherwise in the gradients' storage. CHANGES: values are differences
    from the decayed parameters.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    block, sparse = masks_of_tile(table, tensor, row)
    masked = sparse & (in_use_masked != 0)
    used = mask_bytes(in_use, block, left, masked, ROWS, BYTES, BLOCK)
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    decay = rate(rates, tensor, DECAY)
    if COMPACT:
        # Differences are from decayed parameters in FP32: one that was rounded cannot be read again.
        ROUNDED: tl.constexpr = CHANGES and DTYPE != tl.float32  # noqa: SIM300
        if DECAYS:
            parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
            decayed = (parameter - parameter * decay).to(DTYPE)
            if ROUNDED:
                tl.store(parameters + local, decayed, mask=inside & ~spread(used, ROWS, BYTES))
            else:
                # Whole tiles: a mask of single entries would split the stores into words.
                tl.store(parameters + local, decayed, mask=inside)
                tl.debug_barrier()  # other threads write the entries of the mask below
        base, position = payload_positions(table, tensor, row, used)
        payload += base
        at_byte = first_entries(ROWS, BYTES, BLOCK)
        bits, left_over = used, tl.max(count_bits(used))
        while left_over > 0:
            left_over -= 1
            some = bits != 0
            at = at_byte + lowest(bits)
            value = tl.load(payload + position, mask=some, other=0.0).to(tl.float32)
            if CHANGES:
                copy = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
                if ROUNDED or not DECAYS:
                    copy -= copy * decay
                value += copy
            tl.store(parameters + at, value.to(DTYPE), mask=some)
            bits = bits & (bits - 1)
            position += 1
    else:
        changed = spread(used, ROWS, BYTES)
        gradients = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
        parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(gradients + local, mask=inside, other=0.0)
        decayed = parameter - parameter * decay
        if CHANGES:
            value += decayed
        if DECAYS:
            parameter = decayed
        tl.store(parameters + local, tl.where(changed, value, parameter).to(DTYPE), mask=inside)

"""Updates by the owner of entries, for SCAPE with sharded updates, as Triton kernels; see `reference_owner.py`.

The mean of the payloads is replaced by the synchronized gradient (`triton_kernels.gradient_kernel`), and that by the
new values: in the owner's row of the payload, or in the gradients' storage at the positions of the entries.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    COMMON,
    DECAY,
    MASTER,
    PARAMETER,
    entries_of_units,
    pointer,
    rate,
)
from torchtitan_scape.kernels.scape.triton_tiles import block_tile, moment_and_step, processed_entries


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
    lists,
    corrections,
    scales,
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
    FORM: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CHANGES: tl.constexpr,
    SCALED: tl.constexpr,
    MOMENT_SHARE: tl.constexpr,
    MIN_VISIT_RATE: tl.constexpr,
    CLIP_MOMENT: tl.constexpr,
):
    """Write the new moments of owned entries to the common buffer, and replace gh by the new values; see
    `reference_owner`.

    HAS_MASTER: update the FP32 master weights, which decay everywhere; otherwise start from the parameters, which
    `write_kernel` decays. HAS_SCALES: divide the new values by float64 `scales`, one per tensor. CHANGES: replace gh by
    the difference between the new values and the decayed parameters. SCALED and MOMENT_SHARE: see `moment_and_step`.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    decay = rate(rates, tensor, DECAY)
    copies = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    parameters = copies
    if HAS_MASTER:
        parameters = pointer(table, tensor, MASTER, tl.float32, ALIGNED_TILE) + first
    if HAS_MASTER and FORM == "listed":
        local, inside = entries_of_units(left, ROWS, UNITS, WIDTH, BLOCK, ALIGNED_TILE)
        master = tl.load(parameters + local, mask=inside, other=0.0)
        tl.store(parameters + local, master - master * decay, mask=inside)
        tl.debug_barrier()  # other threads write the entries of the mask below
    some, at, number, values, used, was_held = processed_entries(
        *(payload, lists, table, in_use, previous, in_use_masked, previous_masked, tensor, row, block, first, left),
        *(ROWS, UNITS, WIDTH, BLOCK, ENTRIES, ALIGNED_TILE, FORM),
    )
    commons = pointer(table, tensor, COMMON, tl.float32, ALIGNED_TILE) + first
    common, gh = tl.load(commons + at, mask=some, other=0.0), tl.load(values + number, mask=some, other=0.0)
    moment, step = moment_and_step(
        *(tl.where(was_held, common, 0.0), gh, used & ~was_held, at, tensor, first, table, rates, corrections, clip),
        *(fresh_counts, relative, max_staleness, SCALED, MOMENT_SHARE, MIN_VISIT_RATE, CLIP_MOMENT),
    )
    value = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
    if not (HAS_MASTER and FORM == "listed"):
        value -= value * decay
    changed = value - step
    sent = changed
    if HAS_SCALES:
        sent = tl.div_rn(changed, tl.zeros_like(changed) + tl.load(scales + tensor).to(tl.float32))
    if CHANGES:
        copy = tl.load(copies + at, mask=some, other=0.0).to(tl.float32)
        sent = changed - (copy - copy * decay)
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
    CHANGES: tl.constexpr,
):
    """Write the owners' values on A, FP32 or BF16, and with DECAYS apply weight decay off A.

    CHANGES: values are differences from the decayed parameters in FP32.
    """
    if tl.load(applied) == 0:
        return
    tensor, row, block, first, left = block_tile(tiles, table, BLOCK, ALIGNED_TILE)
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    decay = rate(rates, tensor, DECAY)
    some, at, number, values, used, _ = processed_entries(
        *(payload, lists, table, in_use, previous, in_use_masked, previous_masked, tensor, row, block, first, left),
        *(ROWS, UNITS, WIDTH, BLOCK, ENTRIES, ALIGNED_TILE, FORM),
    )
    value = tl.load(values + number, mask=some, other=0.0).to(tl.float32)
    parameter = tl.load(parameters + at, mask=some, other=0.0).to(tl.float32)
    decayed = parameter - parameter * decay
    if CHANGES:
        value += decayed
    if FORM == "listed":
        if DECAYS:
            local, inside = entries_of_units(left, ROWS, UNITS, WIDTH, BLOCK, ALIGNED_TILE)
            every = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
            if CHANGES:
                tl.debug_barrier()  # other threads read the parameters above
            tl.store(parameters + local, (every - every * decay).to(DTYPE), mask=inside)
            tl.debug_barrier()  # other threads write the entries of the mask below
        tl.store(parameters + at, value.to(DTYPE), mask=some)
    else:
        if DECAYS:
            parameter = decayed
        tl.store(parameters + at, tl.where(used, value, parameter).to(DTYPE), mask=some)

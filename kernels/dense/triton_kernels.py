"""The finite check, scaling, AdamS and AdamW with a frozen variance as Triton kernels, over all tensors of a model."""

import triton
import triton.language as tl

from torchtitan_scape.kernels.common.triton_common import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FIRST_BLOCK,
    GRADIENT,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    PARAMETER,
    STATE,
    adams,
    entries,
    pointer,
    rate,
    tile_of,
)

VARIANCE = FIRST_BLOCK  # address; these tensors have no blocks in a mask


@triton.jit
def finite_kernel(
    tiles,
    table,
    bad,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Set bad[tensor] = 1, int32, if its gradient has NaN, Inf or an exponent (bits) from LIMIT on.

    `bad` is initially zero.
    """
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    gradient = tl.load(pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first + local, mask=inside, other=0.0)
    exponent = gradient.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    # Several programs may store to one element; all of them store 1.
    largest = tl.max(tl.max(tl.max(exponent, 2), 1), 0)
    tl.store(bad + tensor, 1, mask=largest >= LIMIT)


@triton.jit
def scale_kernel(
    tiles,
    table,
    factor,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
):
    """Multiply FP32 gradients by a factor; with 1, as of gradients that are not clipped, no memory is accessed."""
    by = tl.load(factor)
    if by == 1.0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first + local
    tl.store(gradients, tl.load(gradients, mask=inside, other=0.0) * by, mask=inside)


@triton.jit
def adams_kernel(
    tiles,
    table,
    rates,
    corrections,
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
):
    """Update parameters and moments with dense AdamS; 20 bytes of memory traffic per FP32 parameter."""
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, GRADIENT_DTYPE, ALIGNED_TILE) + first
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    states = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(states + local, mask=inside, other=0.0)
    parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
    moment, step = adams(
        before,
        gradient,
        gradient,
        rate(rates, tensor, BETA1),
        rate(rates, tensor, ONE_MINUS_BETA1),
        rate(rates, tensor, BETA2),
        rate(rates, tensor, ONE_MINUS_BETA2),
        rate(rates, tensor, EPS),
        1.0 / tl.load(corrections + 2 * tensor),
        1.0 / tl.load(corrections + 2 * tensor + 1),
        True,
    )
    parameter = parameter - parameter * rate(rates, tensor, DECAY) - step * rate(rates, tensor, LR)
    tl.store(parameters + local, parameter.to(DTYPE), mask=inside)
    tl.store(states + local, moment, mask=inside)


@triton.jit
def frozen_adam_kernel(
    tiles,
    table,
    rates,
    corrections,
    applied,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Update parameters and moments as `reference.frozen_adam_update_`; 20 bytes of traffic per FP32 parameter."""
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries(left, ROWS, BYTES, BLOCK, ALIGNED_TILE)
    momenta = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    moments = pointer(table, tensor, STATE, STATE_DTYPE, ALIGNED_TILE) + first
    variances = pointer(table, tensor, VARIANCE, STATE_DTYPE, ALIGNED_TILE) + first
    moment = tl.load(momenta + local, mask=inside, other=0.0) * rate(rates, tensor, ONE_MINUS_BETA1)
    variance = tl.load(variances + local, mask=inside, other=0.0).to(tl.float32)
    parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
    corrected = tl.div_rn(variance, tl.zeros_like(variance) + tl.load(corrections + tensor))
    step = tl.where(variance > 0.0, tl.div_rn(moment, tl.sqrt_rn(corrected) + rate(rates, tensor, EPS)), 0.0)
    parameter = parameter - parameter * rate(rates, tensor, DECAY) - step * rate(rates, tensor, LR)
    tl.store(parameters + local, parameter.to(DTYPE), mask=inside)
    tl.store(moments + local, moment.to(STATE_DTYPE), mask=inside)

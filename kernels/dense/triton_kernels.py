"""Sums of squares, scaling, and the elementwise parts of optimizer steps, over all tensors of a model."""

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
    PAYLOAD,
    STATE,
    adams,
    cell,
    pointer,
    rate,
    tile_of,
)

# These tensors have no blocks in a mask and no payload.
VARIANCE = FIRST_BLOCK  # address
FIRST_TILE = FIRST_BLOCK  # of the tensor, among those of all tensors
END_TILE = PAYLOAD


@triton.jit
def entries_of_tile(left, TILE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Return the indices of the tile's entries, int32 [TILE], and a mask of those that exist."""
    local = tl.arange(0, TILE)
    inside = local >= 0
    if not ALIGNED_TILE:
        inside = local < left
    return local, inside


@triton.jit
def squares_kernel(
    tiles,
    table,
    sums,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the sum of squares of every tile, FP64. Products in FP32 would overflow from 1.8e19 on."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradient = tl.load(pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first + local, mask=inside, other=0.0)
    value = gradient.to(tl.float64)
    tl.store(sums + cell(table, tensor, FIRST_TILE) + row // (TILE // BLOCK), tl.sum(value * value, 0))


@triton.jit
def norms_kernel(table, sums, norms, EACH: tl.constexpr):
    """Write the norm of tensor i, FP64, from the sums of its tiles, which are added in a fixed order."""
    tensor = tl.program_id(0)
    end = cell(table, tensor, END_TILE)
    total = tl.zeros((EACH,), tl.float64)
    for first in range(cell(table, tensor, FIRST_TILE), end, EACH):
        at = first + tl.arange(0, EACH)
        total += tl.load(sums + at, mask=at < end, other=0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total, 0)))


@triton.jit
def scale_kernel(
    tiles,
    table,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiply gradients by a factor; with 1, as of gradients that are not clipped, no memory is accessed."""
    by = tl.load(factor)
    if by == 1.0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first + local
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    tl.store(gradients, (gradient * by).to(DTYPE), mask=inside)


@triton.jit
def update_kernel(
    tiles,
    table,
    rates,
    corrections,
    applied,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Update parameters and moments by the RULE "adams", "adamw" or "frozen", see `reference`.

    20 bytes of memory traffic per FP32 parameter, with "adamw" 28.
    """
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, GRADIENT_DTYPE, ALIGNED_TILE) + first
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    moments = pointer(table, tensor, STATE, STATE_DTYPE, ALIGNED_TILE) + first
    gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
    correction1, correction2 = tl.load(corrections + 2 * tensor), tl.load(corrections + 2 * tensor + 1)
    beta2, square_rate = rate(rates, tensor, BETA2), rate(rates, tensor, ONE_MINUS_BETA2)
    gradient_rate, eps = rate(rates, tensor, ONE_MINUS_BETA1), rate(rates, tensor, EPS)
    if RULE != "frozen":
        before = tl.load(moments + local, mask=inside, other=0.0).to(tl.float32)
    if RULE == "adams":
        moment, step = adams(
            before,
            gradient,
            gradient,
            rate(rates, tensor, BETA1),
            gradient_rate,
            beta2,
            square_rate,
            eps,
            1.0 / correction1,
            1.0 / correction2,
            True,
        )
    else:
        variances = pointer(table, tensor, VARIANCE, STATE_DTYPE, ALIGNED_TILE) + first
        variance = tl.load(variances + local, mask=inside, other=0.0).to(tl.float32)
        zeros = tl.zeros_like(variance)
        if RULE == "adamw":
            moment = before + (gradient - before) * gradient_rate
            variance = variance * beta2 + gradient * gradient * square_rate
            tl.store(variances + local, variance.to(STATE_DTYPE), mask=inside)
            numerator = tl.div_rn(moment, zeros + correction1)
        else:
            moment = gradient * gradient_rate
            numerator = moment
        step = tl.div_rn(numerator, tl.sqrt_rn(tl.div_rn(variance, zeros + correction2)) + eps)
        if RULE == "frozen":
            step = tl.where(variance > 0.0, step, 0.0)
    parameter = parameter - parameter * rate(rates, tensor, DECAY) - step * rate(rates, tensor, LR)
    tl.store(parameters + local, parameter.to(DTYPE), mask=inside)
    tl.store(moments + local, moment.to(STATE_DTYPE), mask=inside)


@triton.jit
def lerp(start, end, weight):
    """Interpolate as `torch.lerp`."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def average_kernel(
    tiles,
    table,
    weights,
    applied,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
):
    """Add gradients to Muon's momentum, and write the directions to be orthogonalized, BF16, where there are any.

    weights: FP32 (tensors, 2), momentum and 1 - momentum. PARAMETER: address of the direction, or 0.
    """
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
    averages = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    gradient = tl.load(gradients + local, mask=inside, other=0.0) * tl.load(factor)
    before = tl.load(averages + local, mask=inside, other=0.0)
    average = lerp(before, gradient, tl.load(weights + 2 * tensor + 1))
    direction = lerp(gradient, average, tl.load(weights + 2 * tensor))
    is_applied = (tl.load(applied) != 0).to(tl.int32) + tl.zeros_like(local) > 0
    tl.store(averages + local, average, mask=inside & is_applied)
    if cell(table, tensor, PARAMETER) != 0:
        directions = pointer(table, tensor, PARAMETER, tl.bfloat16, ALIGNED_TILE) + first
        tl.store(directions + local, direction.to(tl.bfloat16), mask=inside)


@triton.jit
def move_kernel(
    tiles,
    table,
    factors,
    applied,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
):
    """Decay FP32 weights and move them along BF16 directions: weight * factor 0 + direction * factor 1.

    factors: FP32 (tensors, 2).
    """
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    parameters = pointer(table, tensor, PARAMETER, tl.float32, ALIGNED_TILE) + first
    directions = pointer(table, tensor, GRADIENT, tl.bfloat16, ALIGNED_TILE) + first
    weight = tl.load(parameters + local, mask=inside, other=0.0) * tl.load(factors + 2 * tensor)
    direction = tl.load(directions + local, mask=inside, other=0.0).to(tl.float32)
    tl.store(parameters + local, weight + direction * tl.load(factors + 2 * tensor + 1), mask=inside)


@triton.jit(do_not_specialize=["learning_rate", "mu", "mix", "rest"])
def outer_kernel(
    tiles,
    table,
    learning_rate,
    mu,
    mix,
    rest,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MIXES: tl.constexpr,
):
    """Take the outer step of local updates with the mean displacements, GRADIENT; see `OuterStep`.

    STATE: address of the anchor. VARIANCE: that of the outer momentum with HAS_MOMENTUM.
    """
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    anchors = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    means = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
    update = tl.load(means + local, mask=inside, other=0.0)
    none = tl.zeros_like(update)
    if HAS_MOMENTUM:
        momenta = pointer(table, tensor, VARIANCE, tl.float32, ALIGNED_TILE) + first
        momentum = tl.load(momenta + local, mask=inside, other=0.0) * mu + update
        tl.store(momenta + local, momentum, mask=inside)
        update = tl.fma(momentum, none + mu, update)
    shared = tl.fma(update, none - learning_rate, tl.load(anchors + local, mask=inside, other=0.0))
    tl.store(anchors + local, shared, mask=inside)
    own = shared
    if MIXES:
        kept = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32) * mix
        own = tl.fma(shared, none + rest, kept.to(DTYPE).to(tl.float32))
    tl.store(parameters + local, own.to(DTYPE), mask=inside)

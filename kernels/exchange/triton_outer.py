"""The outer step of local updates as a Triton kernel; its specification is `methods.local_updates.OuterOptimizer`."""

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching

_TILE = 4096


@triton.jit(do_not_specialize=["rate", "mu", "mix", "rest"])
def outer_kernel(
    anchor,
    theta,
    velocity,
    mean,
    n,
    rate,
    mu,
    mix,
    rest,
    HAS_MOMENTUM: tl.constexpr,
    MIXES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update anchor, momentum and parameters with the mean displacement; see `step`."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    update = tl.load(mean + at, mask=inside, other=0.0)
    none = tl.zeros_like(update)
    if HAS_MOMENTUM:
        momentum = tl.load(velocity + at, mask=inside, other=0.0) * mu + update
        tl.store(velocity + at, momentum, mask=inside)
        update = tl.fma(momentum, none + mu, update)
    shared = tl.fma(update, none - rate, tl.load(anchor + at, mask=inside, other=0.0))
    tl.store(anchor + at, shared, mask=inside)
    own = shared
    if MIXES:
        kept = tl.load(theta + at, mask=inside, other=0.0).to(tl.float32) * mix
        own = tl.fma(shared, none + rest, kept.to(theta.dtype.element_ty).to(tl.float32))
    tl.store(theta + at, own.to(theta.dtype.element_ty), mask=inside)


def step(
    anchor: Tensor, theta: Tensor, velocity: Tensor | None, mean: Tensor, rate: float, mu: float, mix: float
) -> None:
    """Run the outer step in place, one launch: read and write each tensor once.

    v = mu v + mean, anchor -= rate (mean + mu v), theta = mix theta + (1 - mix) anchor. A product is rounded together
    with its sum where PyTorch does so on a GPU.

    Args:
        anchor: FP32 (n,), contiguous.
        theta: (n,), contiguous, any dtype of the kernels.
        velocity: FP32 (n,), contiguous; None without momentum.
        mean: FP32 (n,), contiguous.
        rate, mu, mix: Outer learning rate, momentum, and the share of the old parameters.
    """
    written = [anchor, *([] if velocity is None else [velocity]), *([theta] if mix else [])]  # and read
    launching.launch(
        outer_kernel,
        (-(-anchor.numel() // _TILE),),
        anchor,
        theta,
        anchor if velocity is None else velocity,
        mean,
        anchor.numel(),
        rate,
        mu,
        mix,
        1.0 - mix,
        warps=8,
        moved=sum(tensor.nbytes for tensor in written),
        HAS_MOMENTUM=velocity is not None,
        MIXES=mix != 0.0,
        TILE=_TILE,
    )

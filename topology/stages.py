"""An exchange level by level: reduce-scatter inside, the same for each part one level further out, gather inside.

Each byte crosses the network once per node in each direction, every rank of a node carries its own part, and all of
its NICs work. The functions recurse over the rings, from the inside out; they run wherever a `Lane` runs them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.groups import Ring

# torch 2.13 renamed the collectives and warns about the old names.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = tuple[Ring, ProcessGroup]


def reduce_(x: Tensor, groups: Sequence[Group], divisor: float, error: Tensor | None = None) -> None:
    """x = (sum over all replicas of x) / divisor, in place; bitwise the same on all of them.

    Args:
        x: FP32 (n,), contiguous; n is a multiple of the product of the rings' sizes (of all but the outermost
            suffices without `error`).
        groups: the rings and their process groups, from the inside out.
        divisor: of the sum; the number of replicas for the mean.
        error: FP32 (n,), makes the outermost ring carry BF16, and receives what rounding lost: the sum over
            replicas of (x before - error) is x after * divisor. Inside, sums travel in FP32.
    """
    (ring, group), outer = groups[0], groups[1:]
    if not outer:
        if error is None:
            dist.all_reduce(x, group=group)
            x.div_(divisor)
        else:
            _reduce_rounded(x, ring, group, divisor, error)
        return
    own = x.view(ring.size, -1)[ring.place]
    _scatter(x, own, group)
    if error is None:
        reduce_(own, outer, divisor)
        all_gather_into(x, own, group=group)
        return
    error.zero_()
    reduce_(own, outer, divisor, error.view(ring.size, -1)[ring.place])
    # What came back is BF16 already: it goes inside as such, with nothing lost.
    rounded = torch.empty_like(x, dtype=torch.bfloat16)
    all_gather_into(rounded, own.to(torch.bfloat16), group=group)
    x.copy_(rounded)


def scatter_(x: Tensor, groups: Sequence[Group], divisor: float, error: Tensor | None = None) -> None:
    """The first half of `reduce_`: its result for this replica's part alone, the `place_of`-th of equal ones.

    Args as `reduce_`; n is a multiple of the number of replicas. The other parts of x are undefined afterwards. `error`
    receives what rounding lost of what this replica sent; the sum itself is not rounded.
    """
    (ring, group), outer = groups[0], groups[1:]
    own = x.view(ring.size, -1)[ring.place]
    if outer:
        _scatter(x, own, group)
        if error is not None:
            error.zero_()
            error = error.view(ring.size, -1)[ring.place]
        scatter_(own, outer, divisor, error)
    elif error is None:
        _scatter(x, own, group)
        own.div_(divisor)
    else:
        own.copy_(_sum_rounded(x, ring, group, error)).div_(divisor)


def _scatter(x: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """own = this rank's part of the sum of x over one ring; `own` lies in x."""
    if x.is_cuda:
        reduce_scatter_into(own, x, group=group)
    else:  # gloo's reduce-scatter moves as many bytes as an all-reduce
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=group)
        torch.sum(parts.view(-1, own.numel()), 0, out=own)


def _sum_rounded(x: Tensor, ring: Ring, group: ProcessGroup, error: Tensor) -> Tensor:
    """FP32: this rank's part of the sum over one ring of x, which travels in BF16; `error` is what that lost of x."""
    sent = x.to(torch.bfloat16)
    torch.sub(x, sent, out=error)
    parts = torch.empty_like(sent)
    dist.all_to_all_single(parts, sent, group=group)
    return parts.view(ring.size, -1).float().sum(0)


def _reduce_rounded(x: Tensor, ring: Ring, group: ProcessGroup, divisor: float, error: Tensor) -> None:
    """One ring in BF16, both ways: every rank sums its part in FP32, so that nothing is rounded but what is sent."""
    total = _sum_rounded(x, ring, group, error).div_(divisor)
    own = total.to(torch.bfloat16)
    error.view(ring.size, -1)[ring.place] += (total - own) * divisor
    mean = torch.empty_like(x, dtype=torch.bfloat16)
    all_gather_into(mean, own, group=group)
    x.copy_(mean)


def gather_(output: Tensor, own: Tensor, groups: Sequence[Group]) -> None:
    """output = `own` (b,) of all replicas, (replicas * b,), in the order of `place_of`.

    From the outside in, so that each replica's `own` crosses the network once per node; every stage gathers where
    its result belongs.
    """
    start, size = place_of([ring for ring, _ in groups]) * own.numel(), own.numel()
    filled = output[start : start + size]
    filled.copy_(own)
    for ring, group in reversed(groups):
        start -= ring.place * size
        size *= ring.size
        whole = output[start : start + size]
        all_gather_into(whole, filled, group=group)
        filled = whole


def place_of(rings: Sequence[Ring]) -> int:
    """A replica's number among all: its place in the innermost ring counts most, so that `gather_` needs no copy."""
    place = 0
    for ring in rings:
        place = place * ring.size + ring.place
    return place

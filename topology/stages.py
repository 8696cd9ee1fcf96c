"""An exchange level by level: reduce-scatter inside, the same for each part one level further out, gather inside.

Each byte crosses the network once per node in each direction, every rank of a node carries its own part, and all of
its NICs work. The functions recurse over the rings, from the inside out; they run wherever a `Lane` runs them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.codecs import Codec
from topology.groups import Ring
from topology.primitives import all_gather_into, reduce_scatter_into

Group = tuple[Ring, ProcessGroup]


def reduce_(x: Tensor, groups: Sequence[Group], divisor: float) -> None:
    """x = (sum over all replicas of x) / divisor, in place; bitwise the same on all of them.

    Args:
        x: FP32 (n,), contiguous; n is a multiple of the product of the sizes of all rings but the outermost.
        groups: the rings and their process groups, from the inside out.
        divisor: of the sum; the number of replicas for the mean.
    """
    (ring, group), outer = groups[0], groups[1:]
    if not outer:
        dist.all_reduce(x, group=group)
        x.div_(divisor)
        return
    own = x.view(ring.size, -1)[ring.group_rank]
    _scatter(x, own, group)
    reduce_(own, outer, divisor)
    all_gather_into(x, own, group=group)


def reduce_coded(
    x: Tensor,
    groups: Sequence[Group],
    divisor: float,
    codec: Codec,
    error: Tensor | None,
    carried_error: Tensor | None = None,
) -> None:
    """As `reduce_`; the outermost ring carries the codec's messages both ways. Inside, sums travel in FP32.

    Owners add what they receive in FP32 in rank order, so that nothing is rounded but what is sent; all decode the
    same messages.

    Args:
        x: n is a multiple of the number of replicas times the codec's unit.
        error: FP32 (n,), receives what this replica has to carry over: the sum over replicas of (x before - error) is
            (x after + carried after - carried before) * divisor. None to let it go.
        carried: FP32 (n / replicas,), of this rank's part of what x becomes: is added to it before it is coded, and
            becomes what that loses. None: there is none, and what is lost is in `error`, times the divisor.
    """
    *inner, (ring, group) = groups
    own, lost = _scatter_inside(x, inner, error)
    part = torch.empty(own.numel() // ring.size, dtype=torch.float32, device=x.device)
    _sum_coded(own, part, ring, group, codec, lost)
    part.div_(divisor)
    rounding = carried_error
    if carried_error is not None:
        part += carried_error
    elif lost is not None:
        rounding = torch.empty_like(part)
    messages = codec.encode(part.view(1, -1), None if rounding is None else rounding.view(1, -1)).view(-1)
    if lost is not None and carried_error is None and rounding is not None:
        lost.view(ring.size, -1)[ring.group_rank] += rounding * divisor
    # They go inside as they came, with nothing lost.
    for within, over in reversed(groups):
        gathered = torch.empty(within.size * messages.numel(), dtype=torch.uint8, device=x.device)
        all_gather_into(gathered, messages, group=over)
        messages = gathered
    replicas = x.numel() // part.numel()
    codec.decode(messages.view(replicas, -1), x.view(replicas, -1))


def scatter_(x: Tensor, groups: Sequence[Group], divisor: float) -> None:
    """The first half of `reduce_`: its result for this replica's part alone, the `replica_index`-th of equal ones.

    Args as `reduce_`; n is a multiple of the number of replicas. The other parts of x are undefined afterwards.
    """
    own, _ = _scatter_inside(x, groups, None)
    own.div_(divisor)


def scatter_coded(x: Tensor, groups: Sequence[Group], divisor: float, codec: Codec, error: Tensor | None) -> None:
    """As `scatter_`; the outermost ring carries the codec's messages. Args as `reduce_coded`; the sum itself is not
    rounded."""
    *inner, (ring, group) = groups
    own, lost = _scatter_inside(x, inner, error)
    part = own.view(ring.size, -1)[ring.group_rank]
    _sum_coded(own, part, ring, group, codec, lost)
    part.div_(divisor)


def _scatter_inside(x: Tensor, groups: Sequence[Group], error: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums over these rings, part by part. Returns this rank's part of x and of the error, of which all is zeroed."""
    if error is not None:
        error.zero_()
    for ring, group in groups:
        own = x.view(ring.size, -1)[ring.group_rank]
        _scatter(x, own, group)
        x, error = own, None if error is None else error.view(ring.size, -1)[ring.group_rank]
    return x, error


def _scatter(x: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """own = this rank's part of the sum of x over one ring; `own` lies in x."""
    if x.is_cuda:
        reduce_scatter_into(own, x, group=group)
    else:  # gloo's reduce-scatter moves as many bytes as an all-reduce
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=group)
        torch.sum(parts.view(-1, own.numel()), 0, out=own)


def _sum_coded(x: Tensor, out: Tensor, ring: Ring, group: ProcessGroup, codec: Codec, error: Tensor | None) -> None:
    """out = this rank's part of the sum over one ring of x; `error` becomes what the codec lost of x."""
    sent = codec.encode(x.view(ring.size, -1), None if error is None else error.view(ring.size, -1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    codec.decode_and_sum(received, out)


def unite_(bits: Tensor, groups: Sequence[Group]) -> None:
    """bits, uint8 (b,): what any replica has set of packed bits, in place. No backend of GPUs knows this reduction.

    b: a multiple of the number of replicas. groups: the rings and their process groups, from the inside out.
    """
    (ring, group), outer = groups[0], groups[1:]
    received = torch.empty_like(bits)
    dist.all_to_all_single(received, bits, group=group)
    own = bits.view(ring.size, -1)[ring.group_rank]
    for one in received.view(ring.size, -1):
        own |= one
    if outer:
        unite_(own, outer)
    all_gather_into(bits, own, group=group)


def gather_(output: Tensor, own: Tensor, groups: Sequence[Group]) -> None:
    """output = `own` (b,) of all replicas, (replicas * b,), in the order of `replica_index`.

    From the outside in, so that each replica's `own` crosses the network once per node; every stage gathers where
    its result belongs.
    """
    start, size = replica_index([ring for ring, _ in groups]) * own.numel(), own.numel()
    filled = output[start : start + size]
    filled.copy_(own)
    for ring, group in reversed(groups):
        start -= ring.group_rank * size
        size *= ring.size
        whole = output[start : start + size]
        all_gather_into(whole, filled, group=group)
        filled = whole


def replica_index(rings: Sequence[Ring]) -> int:
    """A replica's number among all: its place in the innermost ring counts most, so that `gather_` needs no copy."""
    place = 0
    for ring in rings:
        place = place * ring.size + ring.group_rank
    return place

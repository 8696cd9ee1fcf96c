"""Hierarchical collectives: reduce-scatter on the inner levels, exchange on the outermost one, then all-gather.

Each byte crosses the network once per node and direction. Every rank of a node handles its own slice, so all NICs of
the node are used. The functions block; a `CommStream` runs them in the background. Their argument `levels` contains
this rank's group on every level, innermost first, each with a process group, or with a `SimulatedGroup`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.rank_group import RankGroup, replica_index
from torchtitan_scape.topology.torch_version import all_gather_into, reduce_scatter_into

Levels = Sequence[RankGroup]


class SimulatedGroup:
    """Communicator of replicas of one process, in the place of a process group.

    exchange: Passes the items of all replicas, in their order, to a function, once per collective.
    """

    def __init__(self, exchange: Callable[[Any, Callable[[list[Any]], None]], None]) -> None:
        self._exchange = exchange

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: list[int]) -> None:
        """Send `sizes` entries to the replicas, one after the other."""

        def combine(each: list[tuple[Tensor, tuple[Tensor, ...]]]) -> None:
            for rank, (output, _) in enumerate(each):
                torch.cat([parts[rank] for _, parts in each], out=output)

        self._exchange((received.view(-1), sent.view(-1).split(sizes)), combine)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        def combine(each: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([own for _, own in each])
            for gathered, _ in each:
                gathered.copy_(whole)

        self._exchange((output.view(-1), input.view(-1)), combine)


def all_to_all(
    received: Tensor, sent: Tensor, group: RankGroup, sizes: Sequence[list[int] | None] = (None, None), **options: Any
) -> Any:
    """Send a part of the contiguous `sent` to every rank of a group.

    Args:
        received: The parts of all ranks for this one.
        sent: The parts for all ranks.
        group: The ranks.
        sizes: Rows of the parts of `received` and of `sent`, (None, None) for equal parts.
        options: `async_op=True` returns a handle with `wait`.
    """
    if isinstance(group.process_group, SimulatedGroup):
        group.process_group.all_to_all(received, sent, sizes[1] or [sent.numel() // group.size] * group.size)
        return Handle()
    return dist.all_to_all_single(received, sent, *sizes, group=group.process_group, **options)


def all_gather(output: Tensor, input: Tensor, group: RankGroup) -> None:
    """Gather the contiguous `input` of all ranks of a group into `output`, in rank order."""
    if isinstance(group.process_group, SimulatedGroup):
        group.process_group.all_gather(output, input)
    else:
        all_gather_into(output, input, group=group.process_group)


def divide_(x: Tensor, divisor: float) -> None:
    """Divide x in place. A divisor of 1, for sums, costs no pass over memory."""
    if divisor != 1.0:
        x.div_(divisor)


def all_reduce_(x: Tensor, levels: Levels, divisor: float) -> None:
    """All-reduce x in place: x = (sum of x over all replicas) / divisor, bitwise equal on all replicas.

    Args:
        x: FP32 (n,), contiguous; n is a multiple of the product of the sizes of all levels but the outermost.
        levels: See the module docstring.
        divisor: The number of replicas for the mean, 1 for the sum.
    """
    group, outer = levels[0], levels[1:]
    if not outer:
        dist.all_reduce(x, group=group.process_group)
        divide_(x, divisor)
        return
    own = x.view(group.size, -1)[group.group_rank]
    _reduce_scatter(x, own, group.process_group)
    all_reduce_(own, outer, divisor)
    all_gather(x, own, group)


def all_reduce_encoded(
    x: Tensor,
    levels: Levels,
    divisor: float,
    codec: Codec,
    error: Tensor | None,
    carried_error: Tensor | None = None,
) -> None:
    """All-reduce x in place as `all_reduce_`, with encoded messages on the outermost level in both directions.

    The inner levels reduce in FP32. On the outermost level each rank decodes and adds the messages for its slice in
    FP32, in rank order, so that only transmitted values are rounded. All ranks decode the same messages.

    Args:
        x: FP32 (n,); n is a multiple of the number of replicas times the block size of the codec.
        levels: See the module docstring.
        divisor: The number of replicas for the mean, 1 for the sum.
        codec: Encodes what crosses the outermost level.
        error: FP32 (n,), receives the quantization error that this replica has to feed back: summed over replicas,
            (x before - error) is (x after + carried_error after - carried_error before) * divisor. None to discard it.
        carried_error: FP32 (n / replicas,), of this rank's slice of the result. It is added to the slice before it is
            encoded, and becomes the quantization error of the slice. If None, that error is added to `error`,
            multiplied by the divisor.
    """
    *inner, outermost = levels
    own, own_error = _reduce_scatter_inner(x, inner, error)
    sent = codec.encode(own.view(outermost.size, -1), None if own_error is None else own_error.view(outermost.size, -1))
    count, rounding = own.numel() // outermost.size, carried_error
    if carried_error is None and own_error is not None:
        rounding = torch.empty(count, dtype=torch.float32, device=x.device)
    messages = _mean_of_slice(sent, count, outermost, divisor, codec, rounding, carried_error is not None)
    if own_error is not None and carried_error is None and rounding is not None:
        own_error.view(outermost.size, -1)[outermost.group_rank] += rounding * divisor
    # The inner levels forward the received messages unchanged, without a further rounding.
    for group in reversed(levels):
        gathered = torch.empty(group.size * messages.numel(), dtype=torch.uint8, device=x.device)
        all_gather(gathered, messages, group)
        messages = gathered
    replicas = x.numel() // count
    codec.decode(messages.view(replicas, -1), x.view(replicas, -1))


def pair_mean_(x: Tensor, levels: Levels, partner: int | None) -> None:
    """Average x over all replicas of two units of the outermost level, such as two nodes, in place.

    The result is bitwise equal on these replicas.

    Args:
        x: FP32 (n,), contiguous; n is a multiple of the product of the sizes of all levels but the outermost.
        levels: See the module docstring.
        partner: Position of the other unit on the outermost level; None for the mean over this unit alone.
    """
    group, outer = levels[0], levels[1:]
    if not outer:
        received = exchange_pair(x, group, partner)
        received.work.wait()
        received.add_to(x)
        return
    own = x.view(group.size, -1)[group.group_rank]
    _reduce_scatter(x, own, group.process_group)
    own.div_(group.size)
    pair_mean_(own, outer, partner)
    all_gather(x, own, group)


class PairExchange(NamedTuple):
    """An exchange with the partner in flight. values: the partner's, FP32 (n,); () without a partner."""

    work: Any
    values: Tensor

    def add_to(self, x: Tensor) -> None:
        """Make x the mean of x and the received values; nothing happens without a partner."""
        if self.values.numel():
            x.add_(self.values).mul_(0.5)


def exchange_pair(x: Tensor, group: RankGroup, partner: int | None) -> PairExchange:
    """Start sending x, FP32 (n,), to a partner of the group and receiving its x. All ranks of the group take part.

    It is an all-to-all in which all parts but the partner's are empty. On a GPU it contains one message in each
    direction. Point-to-point calls would need all ranks at their first use of an NCCL communicator.
    """
    sizes = [x.numel() if i == partner else 0 for i in range(group.size)]
    received = x.new_empty(sum(sizes))
    sent = x if partner is not None else x[:0]
    return PairExchange(all_to_all(received, sent, group, (sizes, sizes), async_op=True), received)


def all_reduce_messages(
    sent: Tensor,
    means: Tensor,
    count: int,
    group: RankGroup,
    divisor: float,
    codec: Codec,
    error: Tensor | None,
    adds_error: bool,
) -> None:
    """All-reduce values that are already encoded, over one group.

    Args:
        sent: uint8 (ranks, message bytes), the encoded slice of every rank.
        means: uint8 (ranks, message bytes), receives the encoded results of all slices.
        count: FP32 entries of a slice.
        group: The ranks.
        divisor: The number of ranks for the mean, 1 for the sum.
        codec: Code of the messages.
        error: FP32 (count,), becomes the quantization error of this rank's slice of the result.
        adds_error: Add `error` to that slice before it is encoded.
    """
    message = _mean_of_slice(sent, count, group, divisor, codec, error, adds_error)
    all_gather(means.view(-1), message, group)


def _mean_of_slice(
    sent: Tensor, count: int, group: RankGroup, divisor: float, codec: Codec, error: Tensor | None, adds_error: bool
) -> Tensor:
    """Exchange messages over one group, and return the encoded mean of this rank's slice, uint8 (message bytes,)."""
    received = torch.empty_like(sent)
    all_to_all(received, sent, group)
    return codec.encode_mean(received, count, divisor, error, adds_error).view(-1)


def reduce_scatter_(
    x: Tensor, levels: Levels, divisor: float, codec: Codec | None = None, error: Tensor | None = None
) -> None:
    """Reduce-scatter x: slice `replica_index` of `replicas` equal slices becomes its sum / divisor.

    Args as in `all_reduce_encoded`; the result is not rounded, and the other slices of x become undefined. Without a
    codec, n is a multiple of the number of replicas.
    """
    if codec is None:
        own, _ = _reduce_scatter_inner(x, levels, None)
        divide_(own, divisor)
        return
    *inner, outermost = levels
    own, own_error = _reduce_scatter_inner(x, inner, error)
    rows, errors = (None if each is None else each.view(outermost.size, -1) for each in (own, own_error))
    assert rows is not None
    sent = codec.encode(rows, errors)
    received, mean = torch.empty_like(sent), rows[outermost.group_rank]
    all_to_all(received, sent, outermost)
    codec.decode_and_sum(received, mean)
    divide_(mean, divisor)


def send_to_owners(received: Tensor, messages: Tensor, owners: Sequence[int], group: RankGroup) -> None:
    """Send messages, uint8 (owners, bytes), to their owners: received = those of all ranks for this rank.

    Args:
        received: uint8 (ranks, bytes); (0, bytes) of a rank that owns none.
        messages: uint8 (owners, bytes).
        owners: Ranks of the group, in increasing order.
        group: The ranks.
    """
    size = messages.shape[1]
    sizes = [size if len(received) else 0] * group.size, [size if rank in owners else 0 for rank in range(group.size)]
    all_to_all(received.view(-1), messages.view(-1), group, sizes)


def gather_from_owners(gathered: Tensor, message: Tensor, owners: Sequence[int], group: RankGroup) -> None:
    """Broadcast the messages of some ranks of a group to all of them, so that all ranks send about equally much.

    Args:
        gathered: uint8 (owners, bytes), in the order of `owners`.
        message: uint8 (bytes,), or (0,) of a rank that is none of them.
        owners: Ranks of the group, in increasing order.
    """
    ranks = dist.get_process_group_ranks(group.process_group)
    for row, owner in zip(gathered, owners, strict=True):
        if owner == group.group_rank:
            row.copy_(message)
        dist.broadcast(row, ranks[owner], group=group.process_group)


def _reduce_scatter_inner(x: Tensor, levels: Levels, error: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sum x over these levels. Returns this rank's slices of x and of the error; the whole error is set to zero."""
    if error is not None:
        error.zero_()
    for group in levels:
        own = x.view(group.size, -1)[group.group_rank]
        _reduce_scatter(x, own, group.process_group)
        x, error = own, None if error is None else error.view(group.size, -1)[group.group_rank]
    return x, error


def _reduce_scatter(x: Tensor, own: Tensor, group: ProcessGroup | None) -> None:
    """Write this rank's slice of the sum of x over one group to `own`, a view of x."""
    if x.is_cuda:
        reduce_scatter_into(own, x, group=group)
    else:  # gloo's reduce-scatter moves as many bytes as an all-reduce, an all-to-all only half of them
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=group)
        torch.sum(parts.view(-1, own.numel()), 0, out=own)


def all_reduce_or_(bits: Tensor, levels: Levels) -> None:
    """All-reduce packed bits, uint8 (b,), in place with a bitwise OR, which no GPU backend offers as a reduction.

    b: a multiple of the number of replicas.
    """
    group, outer = levels[0], levels[1:]
    received = torch.empty_like(bits)
    all_to_all(received, bits, group)
    own = bits.view(group.size, -1)[group.group_rank]
    for row in received.view(group.size, -1):
        own |= row
    if outer:
        all_reduce_or_(own, outer)
    all_gather(bits, own, group)


def all_gather_(output: Tensor, input: Tensor, levels: Levels) -> None:
    """Gather `input` (b,) of all replicas into `output` (replicas * b,), in the order of `replica_index`.

    The outermost level comes first, so that each input crosses the network once per node. Every stage writes its
    result to its final position in `output`.
    """
    start, size = replica_index(levels) * input.numel(), input.numel()
    filled = output[start : start + size]
    filled.copy_(input)
    for group in reversed(levels):
        start -= group.group_rank * size
        size *= group.size
        whole = output[start : start + size]
        all_gather(whole, filled, group)
        filled = whole

"""Exchanges between replicas: the stages of hierarchical collectives, the codec of their messages, and their streams.

A collective is a reduce-scatter on the inner levels, an exchange on the outermost one, then an all-gather. Each byte
crosses the network once per node and direction. Every rank of a node handles its own slice, so all NICs of the node are
used. The functions block; a `CommStream` runs them in the background. `ReplicaCollectives` describes their tensors.
Their argument `levels` contains this rank's group on every level, innermost first, each with a process group, or with a
`SimulatedGroup`. `divisor` is the number of replicas for a mean, and 1 for a sum.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.layout import RankGroup, replica_index
from torchtitan_scape.topology.partition import ALIGNED_BYTES
from torchtitan_scape.topology.torch_version import all_gather_into, reduce_scatter_into

LevelGroups = Sequence[RankGroup]  # innermost first

HIGH_PRIORITY = -1  # of a CUDA stream; the default priority is 0
EXIT_SECONDS = 5.0  # an exit of the process waits so long for the exchanges in flight

Jobs = queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]


class Handle:
    """An exchange in flight. Call `wait()` before its result is read; a second call has no effect."""

    def __init__(self, wait: Callable[[], Any] | None = None, finish: Callable[[], Any] | None = None) -> None:
        self._wait, self._finish = wait, finish

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
        if self._finish is not None:
            self._finish()
        self._wait = self._finish = None


class CommStream:
    """Runs exchanges one after the other, in the order in which they are started.

    Every rank must start the same exchanges in the same order. The process groups of a stream are used by no other
    code, so its collectives match across ranks whatever other threads do. On a GPU an exchange is enqueued at once on
    a separate CUDA stream. On a CPU it runs on a thread, because gloo blocks between the stages.
    """

    def __init__(self) -> None:
        self._jobs: Jobs | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        """Start `exchange`. On a CPU its exceptions are raised by `Handle.wait`."""
        return self._on_stream(exchange, device) if device.type == "cuda" else self._on_thread(exchange)

    def _on_stream(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        if self._stream is None:
            # High priority: communication kernels take free SMs before the packing kernels that run meanwhile.
            self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            exchange()
            done = stream.record_event()

        def wait(tensors: Callable[[], None] = exchange) -> None:
            # The default argument keeps the exchange and its tensors alive. Their memory belongs to the caller's
            # stream, so the allocator must not reuse it before that stream has waited.
            torch.cuda.current_stream(device).wait_event(done)

        return Handle(wait)

    def _on_thread(self, exchange: Callable[[], None]) -> Handle:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon thread: an exchange that waits for a lost peer must not prevent the process from exiting.
            thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="exchange", daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._jobs, thread)  # also at the exit of the process
        done: Future[None] = Future()
        self._jobs.put((exchange, done))
        return Handle(done.result)


def _end(jobs: Jobs, thread: threading.Thread) -> None:
    """End a thread after its exchanges: the interpreter would end it inside one, which aborts the process."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _run_jobs(jobs: Jobs) -> None:
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        exchange, done = job
        try:
            exchange()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        del job, exchange, done  # otherwise these variables keep the tensors alive until the next exchange


# ---------------------------------------------------------------------------------------------------- codecs


class Codec(Protocol):
    """Encodes FP32 values as bytes before they cross a link; block codes are in `kernels.codec`.

    A message is the code of `count` entries; messages are the rows of a matrix.

    Attributes:
        block_size: Entries that are encoded together. `count` is a multiple of it, and the messages of whole blocks
            have a multiple of 16 bytes.
    """

    block_size: int

    def message_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` entries."""

    def encode(self, values: Tensor, error: Tensor | None = None) -> Tensor:
        """Encode FP32 (rows, count). Returns uint8 (rows, message_bytes(count)).

        error: FP32 (rows, count), becomes `values` minus the decoded values; it may be `values`.
        """

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Decode uint8 (rows, message_bytes(count)) into `out`, FP32 (rows, count)."""

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of the decoded messages to `out`, FP32 (count,). Rows are added in FP32, in row order."""

    def encode_mean(
        self, messages: Tensor, count: int, divisor: float, error: Tensor | None = None, adds_error: bool = False
    ) -> Tensor:
        """Encode (sum of the decoded messages) / divisor as uint8 (1, message_bytes(count)).

        error: FP32 (count,), becomes the quantization error; with `adds_error` its value is first added to the mean.
        """


def entries_together(codec: Codec | None) -> int:
    """Return the number of entries that must not be divided between ranks; None stands for FP32."""
    return ALIGNED_BYTES // 4 if codec is None else codec.block_size


def message_size(codec: Codec | None) -> Callable[[int], int] | None:
    """Return the size of a message as a function of its entries; None for FP32."""
    return None if codec is None else codec.message_bytes


# ---------------------------------------------------------------------------------------------------- stages


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


def all_reduce_(x: Tensor, levels: LevelGroups, divisor: float) -> None:
    """All-reduce x in place: x = (sum of x over all replicas) / divisor, bitwise equal on all replicas."""
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
    levels: LevelGroups,
    divisor: float,
    codec: Codec,
    error: Tensor | None,
    carried_error: Tensor | None = None,
) -> None:
    """All-reduce x in place as `all_reduce_`, with encoded messages on the outermost level in both directions.

    The inner levels reduce in FP32. On the outermost level each rank decodes and adds the messages for its slice in
    FP32, in rank order, so that only transmitted values are rounded. All ranks decode the same messages. Summed over
    replicas, (x before - error) is (x after + carried_error after - carried_error before) * divisor.
    """
    *inner, outermost = levels
    own, own_error = _reduce_scatter_inner(x, inner, error)
    sent = _encode_rows(own, own_error, outermost, codec)
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


def pair_mean_(x: Tensor, levels: LevelGroups, partner: int | None) -> None:
    """Average x over all replicas of two units of the outermost level, such as two nodes, in place.

    partner: Position of the other unit on the outermost level; None for the mean over this unit alone.
    """
    group, outer = levels[0], levels[1:]
    if not outer:
        start_pair_mean(x, group, partner).wait()
        return
    own = x.view(group.size, -1)[group.group_rank]
    _reduce_scatter(x, own, group.process_group)
    own.div_(group.size)
    pair_mean_(own, outer, partner)
    all_gather(x, own, group)


def start_pair_mean(x: Tensor, group: RankGroup, partner: int | None) -> Handle:
    """Start the mean of x and of the partner's x, in place. All ranks of the group take part.

    It is an all-to-all in which all parts but the partner's are empty. On a GPU it contains one message in each
    direction. Point-to-point calls would need all ranks at their first use of an NCCL communicator.
    """
    sizes = [x.numel() if i == partner else 0 for i in range(group.size)]
    received = x.new_empty(sum(sizes))
    sent = x if partner is not None else x[:0]
    work = all_to_all(received, sent, group, (sizes, sizes), async_op=True)
    return Handle(work.wait, None if partner is None else lambda: x.add_(received).mul_(0.5))


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
    """All-reduce values that are already encoded, over one group."""
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
    x: Tensor, levels: LevelGroups, divisor: float, codec: Codec | None = None, error: Tensor | None = None
) -> None:
    """Reduce-scatter x: slice `replica_index` of `replicas` equal slices becomes its sum / divisor.

    With a codec, messages on the outermost level are encoded, and the result is not. The other slices of x become
    undefined.
    """
    if codec is None:
        own, _ = _reduce_scatter_inner(x, levels, None)
    else:
        *inner, outermost = levels
        whole, error = _reduce_scatter_inner(x, inner, error)
        sent, own = _encode_rows(whole, error, outermost, codec), whole.view(outermost.size, -1)[outermost.group_rank]
        received = torch.empty_like(sent)
        all_to_all(received, sent, outermost)
        codec.decode_and_sum(received, own)
    divide_(own, divisor)


def _encode_rows(x: Tensor, error: Tensor | None, group: RankGroup, codec: Codec) -> Tensor:
    """Encode the slices of x for all ranks of a group; `error` becomes the quantization error of x."""
    return codec.encode(x.view(group.size, -1), None if error is None else error.view(group.size, -1))


def send_to_owners(received: Tensor, messages: Tensor, owners: Sequence[int], group: RankGroup) -> None:
    """Send messages to their owners: received = those of all ranks for this rank, (0, bytes) if it owns none."""
    size = messages.shape[1]
    sizes = [size if len(received) else 0] * group.size, [size if rank in owners else 0 for rank in range(group.size)]
    all_to_all(received.view(-1), messages.view(-1), group, sizes)


def gather_from_owners(gathered: Tensor, message: Tensor, owners: Sequence[int], group: RankGroup) -> None:
    """Broadcast the messages of some ranks of a group to all of them, so that all ranks send about equally much."""
    ranks = dist.get_process_group_ranks(group.process_group)
    for row, owner in zip(gathered, owners, strict=True):
        if owner == group.group_rank:
            row.copy_(message)
        dist.broadcast(row, ranks[owner], group=group.process_group)


def _reduce_scatter_inner(x: Tensor, levels: LevelGroups, error: Tensor | None) -> tuple[Tensor, Tensor | None]:
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


def all_reduce_or_(bits: Tensor, levels: LevelGroups) -> None:
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


def all_gather_(output: Tensor, input: Tensor, levels: LevelGroups) -> None:
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

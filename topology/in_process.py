"""`ReplicaCollectives` of simulated replicas, which all run in one process. For simulations and tests.

Every replica runs the code of a rank in its own thread, one replica at a time: it runs until it reaches a collective,
then the next replica continues. The order is deterministic, temporaries exist only once, and shared state needs no
lock. Values are added in replica order. The ledger counts what one rank of a real run sends, with one replica per node
and one group over the network.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.dry_run import DryRunCollectives
from torchtitan_scape.topology.group_queries import gather_lists
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.pairs import partners
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.stages import divide_
from torchtitan_scape.topology.traffic import REPLICATE

T = TypeVar("T")


class InProcessCollectives(ReplicaCollectives):
    """Endpoint of one of the `SimulatedReplicas`. Its collectives work only inside `SimulatedReplicas.run`."""

    is_simulated = True

    def __init__(self, rendezvous: "_Rendezvous", replica: int, groups: ReplicaGroups) -> None:
        super().__init__(groups, RankGroup("network", rendezvous.replicas, replica))
        self._rendezvous = rendezvous
        self.is_writer = replica == 0
        self.label = f" (simulated replica {replica})"

    def _exchange(self, item: Any, combine: Callable[[list[Any]], T]) -> T:
        return self._rendezvous.exchange(self.replica, item, combine)

    def run_once(self, function: Callable[[], Tensor]) -> Tensor:
        return self._exchange(function, lambda functions: functions[0]())

    def write_once(self, outputs: Sequence[Tensor], function: Callable[[Sequence[Tensor]], None]) -> None:
        def combine(each: list[tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], None]]]) -> None:
            (first, write), *others = each
            write(first)
            for copies, _ in others:
                torch._foreach_copy_(copies, first)

        self._exchange((outputs, function), combine)

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        if codec is None:
            self._exchange(tensor, lambda tensors: _all_reduce(tensors, divisor))
        else:
            self._exchange(((tensor, error), carried_error), lambda each: _all_reduce_encoded(each, divisor, codec))
        return Handle()

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        divisor = float(self.replicas)

        def combine(each: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
            by_owner = torch.stack([messages for messages, _, _ in each], 1)
            encoded = [
                codec.encode_mean(received, count, divisor, own, adds_error)
                for received, (_, _, own) in zip(by_owner, each, strict=True)
            ]
            for _, received_means, _ in each:
                torch.cat(encoded, out=received_means)

        self._exchange((sent, means, error), combine)
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        self._exchange((tensor, error), lambda pairs: _reduce_scatter(pairs, divisor, codec))
        return Handle()

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        def combine(each: list[tuple[Tensor, Tensor]]) -> None:
            for i, owner in enumerate(owners):
                torch.stack([sent[i] for _, sent in each], out=each[owner][0])

        self._exchange((received, messages), combine)
        return Handle()

    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        messages = self._exchange(message.clone(), list)
        return Handle(lambda: torch.stack([messages[owner] for owner in owners], out=gathered))

    def _pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        self._exchange(tensor, lambda tensors: _pair_means(tensors, draw))
        return Handle()

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        # `output` is written by `Handle.wait`, as in a distributed run.
        parts = self._exchange(input.clone(), list)
        return Handle(lambda: torch.cat(parts, out=output))

    def _all_reduce_or(self, bits: Tensor) -> Handle:
        def combine(bitmaps: list[Tensor]) -> None:
            union, *others = bitmaps
            for other in others:
                union |= other
            for other in others:
                other.copy_(union)

        self._exchange(bits, combine)
        return Handle()

    @property
    def peers(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_peers(self, values: Tensor) -> Tensor:
        return self._exchange(values.clone(), torch.stack)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        def copy(tensors: list[Tensor]) -> None:
            for other in tensors:
                if other.data_ptr() != tensors[source].data_ptr():  # replicas may share one tensor
                    other.copy_(tensors[source])

        self._exchange(tensor, copy)

    def sum_over_replicas(self, values: Tensor) -> None:
        self._exchange(values, lambda tensors: _all_reduce(tensors, 1))

    def sum_over_all(self, values: Tensor) -> Tensor:
        def add(tensors: list[Tensor]) -> Tensor:
            total = torch.stack(tensors).sum(0)
            if self.groups.model is not None:
                dist.all_reduce(total, group=self.groups.model)
            return total

        return self._exchange(values, add).clone()

    def gather_objects(self, item: Any) -> list[Any]:
        return list(self._exchange(item, lambda items: gather_lists(self.groups.model, items)))

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return list(self._exchange(item, list))

    def minimum_over_all(self, values: Tensor) -> Tensor:
        value = self._exchange(values.float(), lambda each: self._minimum_over_model(torch.stack(each).amin(0)))
        self._count_flag(value)
        self.ledger.add(
            REPLICATE, "network", "flag", value.nbytes, 2.0 * (self.replicas - 1) / self.replicas * value.nbytes
        )
        return value

    def sum_over_owners(self, value: Tensor) -> Tensor:
        own = self.sum_over_model(value)
        self.ledger.add(REPLICATE, "network", "norm", own.nbytes, (self.replicas - 1) * own.nbytes)
        return self._exchange(own, lambda values: torch.stack(values).double().sum().to(own.dtype))


class OneReplica:
    """The single replica of this process, with the interface of `SimulatedReplicas`."""

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self.endpoints, self.all = [collectives], collectives

    def run(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]


class SimulatedReplicas:
    """Replicas that this process, or this group of shards, simulates.

    Args:
        replicas: Number of replicas.
        groups: Groups of the process. `model` is the group of the shards of every replica; `replicate` is None.

    Attributes:
        endpoints: Collectives of each replica, in replica order.
        all: Collectives for code outside of `run` that acts for all replicas at once. Shares the ledger of the first
            endpoint.

    Raises:
        ValueError: Fewer than two replicas, or `groups.replicate` is set.
    """

    def __init__(self, replicas: int, groups: ReplicaGroups | None = None) -> None:
        if replicas < 2:
            raise ValueError(f"{replicas} simulated replicas; there must be 2 or more, and one needs no simulation")
        groups = groups or ReplicaGroups(None, None)
        if groups.replicate is not None:
            raise ValueError(
                f"{replicas} simulated replicas and {groups.replicate.size()} real ones cannot be combined; "
                "start one group of shards only"
            )
        self._rendezvous, self._threads = _Rendezvous(replicas), _Threads(replicas - 1)
        self.endpoints = [InProcessCollectives(self._rendezvous, i, groups) for i in range(replicas)]
        self.all = DryRunCollectives(groups, replicas)
        self.all.ledger = self.endpoints[0].ledger

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(replica)` for all replicas and return the results. Raises the first error of any replica."""
        results: dict[int, T] = {}
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        grad = torch.is_grad_enabled()

        def run_replica(replica: int) -> None:
            def run() -> None:
                with _settings(stream, grad):
                    results[replica] = work(replica)

            self._rendezvous.run(replica, run)

        self._rendezvous.open()
        for replica in range(1, len(self.endpoints)):
            self._threads.start(replica - 1, partial(run_replica, replica))
        run_replica(0)  # in the calling thread, so that its thread-local settings hold for the replica that writes
        self._threads.wait()
        self._rendezvous.close()
        return [results[replica] for replica in range(len(self.endpoints))]


@contextmanager
def _settings(stream: "torch.cuda.Stream | None", grad: bool) -> Iterator[None]:
    """Use the CUDA device, stream and grad mode of the caller of `SimulatedReplicas.run`, which are thread-local.

    On one common stream the replicas need no further synchronization of the device.
    """
    if stream is not None:
        torch.cuda.set_stream(stream)  # also sets the device
    with torch.set_grad_enabled(grad):
        yield


class _Threads:
    """Threads that live as long as this object, and run one call at a time each.

    Libraries such as cuBLAS keep handles and memory for every thread; with new threads in every step these would move
    from thread to thread.
    """

    def __init__(self, count: int) -> None:
        self._calls: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = 0
        for calls in self._calls:
            threading.Thread(target=_run_calls, args=(calls, self._done), daemon=True).start()
            weakref.finalize(self, calls.put, None)

    def start(self, thread: int, call: Callable[[], None]) -> None:
        self._calls[thread].put(call)
        self._running += 1

    def wait(self) -> None:
        """Wait until all calls have returned."""
        while self._running:
            self._done.get()
            self._running -= 1


def _run_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]", done: "queue.SimpleQueue[None]") -> None:
    """Run calls until there is a None."""
    while (call := calls.get()) is not None:
        try:
            call()
        finally:
            del call  # it refers to the object that owns this thread
            done.put(None)


class _Rendezvous:
    """Runs the threads of the replicas one at a time, and collects the inputs of their collectives."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._items: list[Any] = [None] * replicas
        self._ready: list[threading.Semaphore] = []
        self._result: Any = None
        self._calls = [0] * replicas  # collectives that each replica has reached
        self._finished: list[int] = []
        self._error: BaseException | None = None

    def open(self) -> None:
        self._ready = [threading.Semaphore(0) for _ in range(self.replicas)]
        self._ready[0].release()

    def close(self) -> None:
        """Reset for the next run. Raises the error of the first replica that failed."""
        error = self._error
        self.__init__(self.replicas)  # type: ignore[misc]
        if error is not None:
            raise error

    def run(self, replica: int, work: Callable[[], None]) -> None:
        """Run a replica once all lower ones are waiting. An error ends all replicas."""
        try:
            self._wait(replica)
            work()
        except _AnotherReplicaFailed:
            pass
        except BaseException as error:
            self._error = error
        self._finished.append(replica)
        self._resume_next(replica)

    def exchange(self, replica: int, item: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return `combine(items)` to all replicas; the last replica computes it."""
        assert self._ready, "collectives of simulated replicas work inside SimulatedReplicas.run only"
        self._calls[replica] += 1
        self._check(replica, self._finished)  # a finished replica cannot be resumed
        self._items[replica] = item
        if replica == self.replicas - 1:
            self._result = combine(list(self._items))
        self._resume_next(replica)
        self._wait(replica)
        self._check(replica, range(self.replicas))
        return self._result

    def _check(self, replica: int, others: Iterable[int]) -> None:
        """Raise RuntimeError if one of the others has not reached this collective."""
        absent = [other for other in others if self._calls[other] < self._calls[replica]]
        if absent:
            raise RuntimeError(f"replica {replica} called a collective that replicas {absent} did not call")

    def _wait(self, replica: int) -> None:
        self._ready[replica].acquire()
        if self._error is not None:
            raise _AnotherReplicaFailed

    def _resume_next(self, replica: int) -> None:
        self._ready[(replica + 1) % self.replicas].release()


class _AnotherReplicaFailed(BaseException):
    """Ends the threads of the other replicas."""


def _all_reduce(tensors: Sequence[Tensor], divisor: float) -> None:
    """Write (sum in replica order) / divisor to all tensors."""
    total, *others = tensors
    for other in others:
        total += other
    divide_(total, divisor)
    for other in others:
        other.copy_(total)


def _pair_means(tensors: Sequence[Tensor], draw: int) -> None:
    """Write the mean of the tensors of each pair to both."""
    for replica, partner in enumerate(partners(len(tensors), draw)):
        if partner is not None and replica < partner:
            tensors[replica].add_(tensors[partner]).mul_(0.5)
            tensors[partner].copy_(tensors[replica])


_Pair = tuple[Tensor, Tensor | None]  # (values, quantization error) of a replica


def _encoded_sums(pairs: Sequence[_Pair], codec: Codec) -> Tensor:
    """Return the sums of the decoded values, FP32 (replicas, m), in replica order; sets the quantization errors."""
    replicas = len(pairs)
    rows = [own.view(replicas, -1) for own, _ in pairs]
    errors = [None if error is None else error.view(replicas, -1) for _, error in pairs]
    messages = torch.stack([codec.encode(own, error) for own, error in zip(rows, errors, strict=True)], 1)
    sums = torch.empty_like(rows[0])
    for received, total in zip(messages, sums, strict=True):
        codec.decode_and_sum(received, total)
    return sums


def _all_reduce_encoded(each: Sequence[tuple[_Pair, Tensor | None]], divisor: float, codec: Codec) -> None:
    """Compute `topology.stages.all_reduce_encoded` on one level. each: (pair, carried error) of every replica."""
    sums = _encoded_sums([pair for pair, _ in each], codec)
    sums.div_(sums.new_full((), divisor))  # as kernels divide; a Python number would be inverted first on a GPU
    for part, (_, carried_error) in zip(sums, each, strict=True):
        if carried_error is not None:
            part += carried_error
    rounding = torch.empty_like(sums)
    codec.decode(codec.encode(sums, rounding), sums)
    for replica, ((own, error), carried_error) in enumerate(each):
        if carried_error is not None:
            carried_error.copy_(rounding[replica])
        elif error is not None:
            error.view(len(each), -1)[replica] += rounding[replica] * divisor
        own.copy_(sums.view(-1))


def _reduce_scatter(pairs: Sequence[_Pair], divisor: float, codec: Codec | None) -> None:
    """Write every replica's slice of the result to its tensor; the other slices become NaN."""
    if codec is None:
        total = pairs[0][0].clone()
        for own, _ in pairs[1:]:
            total += own
    else:
        total = _encoded_sums(pairs, codec)
    divide_(total, divisor)
    parts = total.view(len(pairs), -1)
    for replica, (own, _) in enumerate(pairs):
        own.fill_(torch.nan)
        own.view(len(pairs), -1)[replica] = parts[replica]

"""The endpoint of a replica among replicas of one process: simulation, and tests of many replicas.

Every replica runs the code of a rank, in a thread of its own, but only one at a time: it runs until it meets the others
in a collective, then hands over to the next. So the order is always the same, temporaries exist once, and nothing that
replicas share needs a lock. What they bring is added in the order of the replicas; bytes are those that one rank of a
real run sends, a replica a node, in one ring over the network.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from topology.codecs import Codec
from topology.collectives import ReplicaCollectives, objects_of
from topology.comm_stream import Handle
from topology.dry_run import DryRunCollectives
from topology.groups import ReplicaGroups, Ring
from topology.traffic import REPLICATE

T = TypeVar("T")


class InProcessCollectives(ReplicaCollectives):
    """One of `SimulatedReplicas.endpoints`. Collectives work inside `SimulatedReplicas.run` only."""

    def __init__(self, meeting: "_Rendezvous", replica: int, groups: ReplicaGroups) -> None:
        super().__init__(groups, Ring("network", meeting.replicas, replica))
        self._meeting = meeting
        self.is_writer = replica == 0
        self.label = f" (simulated replica {replica})"

    def _meet(self, item: Any, combine: Callable[[list[Any]], T]) -> T:
        return self._meeting.meet(self.replica, item, combine)

    def run_once(self, work: Callable[[], Tensor]) -> Tensor:
        return self._meet(work, lambda works: works[0]())

    def _reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        if codec is None:
            self._meet(tensor, lambda tensors: _reduce(tensors, divisor))
        else:
            self._meet(((tensor, error), carried_error), lambda each: _reduce_coded(each, divisor, codec))
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        self._meet((tensor, error), lambda pairs: _scatter(pairs, divisor, codec))
        return Handle()

    def _gather(self, output: Tensor, own: Tensor) -> Handle:
        """What arrives is in `output` once the handle has been waited for, as on a network."""
        parts = self._meet(own.clone(), list)
        return Handle(lambda: torch.cat(parts, out=output))

    def _union(self, bits: Tensor) -> Handle:
        def union(maps: list[Tensor]) -> None:
            found, *others = maps
            for other in others:
                found |= other
            for other in others:
                other.copy_(found)

        self._meet(bits, union)
        return Handle()

    @property
    def peers(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_peers(self, values: Tensor) -> Tensor:
        return self._meet(values.clone(), torch.stack)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        def give(tensors: list[Tensor]) -> None:
            for other in tensors:
                if other.data_ptr() != tensors[source].data_ptr():  # parameters that replicas share
                    other.copy_(tensors[source])

        self._meet(tensor, give)

    def sum_over_replicas(self, values: Tensor) -> None:
        self._meet(values, lambda tensors: _reduce(tensors, 1))

    def sum_over_all(self, values: Tensor) -> Tensor:
        def add(tensors: list[Tensor]) -> Tensor:
            total = torch.stack(tensors).sum(0)
            if self.groups.model is not None:
                dist.all_reduce(total, group=self.groups.model)
            return total

        return self._meet(values, add).clone()

    def gather_objects(self, item: Any) -> list[Any]:
        return list(self._meet(item, lambda items: objects_of(self.groups.model, items)))

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return list(self._meet(item, list))

    def all_true(self, flag: Tensor) -> Tensor:
        value = self._meet(flag, lambda flags: self._true_in_model(torch.stack(flags).all(0)))
        self._count_flag(value)
        self.traffic.add(
            REPLICATE, "network", "flag", value.nbytes, 2.0 * (self.replicas - 1) / self.replicas * value.nbytes
        )
        return value > 0

    def sum_over_owners(self, value: Tensor) -> Tensor:
        own = self.sum_over_model(value)
        self.traffic.add(REPLICATE, "network", "norm", own.nbytes, (self.replicas - 1) * own.nbytes)
        return self._meet(own, lambda values: torch.stack(values).double().sum().to(own.dtype))


class OneReplica:
    """The replica of this process, which is a rank among others: `SimulatedReplicas` for the usual case."""

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self.endpoints, self.all = [collectives], collectives

    def run(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]


class SimulatedReplicas:
    """`replicas` replicas that this process plays, or its group of shards.

    Args:
        replicas: how many.
        groups: the real ones: `model` holds the shards of all the replicas alike; no `replicate`.

    Attributes:
        endpoints: of the replicas, in their order.
        all: speaks for all of them at once, outside of `run`; with the first one's ledger of bytes.

    Raises ValueError for fewer than two replicas, and where there are real replicas besides.
    """

    def __init__(self, replicas: int, groups: ReplicaGroups | None = None) -> None:
        if replicas < 2:
            raise ValueError(f"{replicas} simulated replicas; there must be 2 or more, and one needs no simulation")
        groups = groups or ReplicaGroups(None, None)
        if groups.replicate is not None:
            raise ValueError(
                f"{replicas} simulated replicas beside {groups.replicate.size()} real ones; start one group of shards "
                "only"
            )
        self._meeting = _Rendezvous(replicas)
        self.endpoints = [InProcessCollectives(self._meeting, i, groups) for i in range(replicas)]
        self.all = DryRunCollectives(groups, replicas)
        self.all.traffic = self.endpoints[0].traffic

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs `work(replica)` as every replica, in step, and returns the results; raises the first error."""
        results: dict[int, T] = {}

        def play(replica: int) -> None:
            self._meeting.play(replica, lambda: results.update({replica: work(replica)}))

        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        grad = torch.is_grad_enabled()
        threads = [
            threading.Thread(target=_in_thread, args=(stream, grad, play, replica), daemon=True)
            for replica in range(1, len(self.endpoints))
        ]
        self._meeting.open()
        for thread in threads:
            thread.start()
        play(0)  # here: what holds for the calling thread alone holds for the one that writes
        for thread in threads:
            thread.join()
        self._meeting.close()
        return [results[replica] for replica in range(len(self.endpoints))]


def _in_thread(stream: "torch.cuda.Stream | None", grad: bool, work: Callable[[int], None], replica: int) -> None:
    """The current device and stream, and whether gradients are recorded, are a thread's own: all replicas have the
    caller's, as what one of them leaves is the next one's without a word to the device."""
    if stream is not None:
        torch.cuda.set_stream(stream)  # sets its device, too
    with torch.set_grad_enabled(grad):
        work(replica)


class _Rendezvous:
    """Hands the turn from replica to replica, and what they bring to the last of them."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._items: list[Any] = [None] * replicas
        self._turns: list[threading.Semaphore] = []
        self._result: Any = None
        self._met = [0] * replicas  # how often
        self._ended: list[int] = []
        self._error: BaseException | None = None

    def open(self) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(self.replicas)]
        self._turns[0].release()

    def close(self) -> None:
        """Raises what the first replica to fail has raised."""
        error = self._error
        self.__init__(self.replicas)  # type: ignore[misc]
        if error is not None:
            raise error

    def play(self, replica: int, work: Callable[[], None]) -> None:
        """A replica's part, from its first turn until it ends. A replica that fails ends it for all."""
        try:
            self._wait(replica)
            work()
        except _AnotherFailed:
            pass
        except BaseException as error:
            self._error = error
        self._ended.append(replica)
        self._hand_on(replica)

    def meet(self, replica: int, item: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """The last replica to come computes `combine(items)`; all get its result."""
        assert self._turns, "collectives of simulated replicas work inside SimulatedReplicas.run only"
        self._met[replica] += 1
        self._check(replica, self._ended)  # whom nobody could hand the turn to
        self._items[replica] = item
        if replica == self.replicas - 1:
            self._result = combine(list(self._items))
        self._hand_on(replica)
        self._wait(replica)
        self._check(replica, range(self.replicas))
        return self._result

    def _check(self, replica: int, others: Iterable[int]) -> None:
        """Raises RuntimeError where one of the others has not come to this meeting."""
        absent = [other for other in others if self._met[other] < self._met[replica]]
        if absent:
            raise RuntimeError(f"replica {replica} is in a collective for which replicas {absent} did not come")

    def _wait(self, replica: int) -> None:
        self._turns[replica].acquire()
        if self._error is not None:
            raise _AnotherFailed

    def _hand_on(self, replica: int) -> None:
        self._turns[(replica + 1) % self.replicas].release()


class _AnotherFailed(BaseException):
    """What ends the other replicas."""


def _reduce(tensors: Sequence[Tensor], divisor: float) -> None:
    """The sum in replica order, divided, in all of them."""
    total, *others = tensors
    for other in others:
        total += other
    if divisor != 1:
        total.div_(divisor)
    for other in others:
        other.copy_(total)


_Pair = tuple[Tensor, Tensor | None]  # values and errors of a replica


def _coded_sums(pairs: Sequence[_Pair], codec: Codec) -> Tensor:
    """FP32 (replicas, m): the parts' sums in replica order of what travels; the errors become what that lost."""
    replicas = len(pairs)
    rows = [own.view(replicas, -1) for own, _ in pairs]
    lost = [None if error is None else error.view(replicas, -1) for _, error in pairs]
    messages = torch.stack([codec.encode(own, error) for own, error in zip(rows, lost, strict=True)], 1)
    sums = torch.empty_like(rows[0])
    for received, total in zip(messages, sums, strict=True):
        codec.decode_and_sum(received, total)
    return sums


def _reduce_coded(each: Sequence[tuple[_Pair, Tensor | None]], divisor: float, codec: Codec) -> None:
    """As `topology.stages` does it in one ring whose members these are: the pair, and what its owner carries."""
    sums = _coded_sums([pair for pair, _ in each], codec).div_(divisor)
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


def _scatter(pairs: Sequence[_Pair], divisor: float, codec: Codec | None) -> None:
    """Every replica's part of the mean; the rest of what it brought is undefined."""
    if codec is None:
        total = pairs[0][0].clone()
        for own, _ in pairs[1:]:
            total += own
    else:
        total = _coded_sums(pairs, codec)
    parts = total.div_(divisor).view(len(pairs), -1)
    for replica, (own, _) in enumerate(pairs):
        own.fill_(torch.nan)
        own.view(len(pairs), -1)[replica] = parts[replica]

"""`ReplicaCollectives` whose other replicas are not in other processes: simulated replicas, and a dry run.

Every simulated replica runs the code of a rank in its own thread, one replica at a time: it runs until it reaches a
collective, then the next replica continues. The order is deterministic, temporaries of a pass exist only once, and
shared state needs no lock. Values are added in replica order. The ledger counts what one rank of a real run sends, with
one replica per node and one group over the network.

In a dry run bytes are counted, and tensors keep their values. It serves many ranks in one process, and code that acts
for all simulated replicas of a process at once: its inputs have been summed already, or are equal on all replicas.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.collectives import ReplicaCollectives, T
from torchtitan_scape.topology.groups import ReplicaGroups, gather_lists
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.stages import Codec, Handle, SimulatedGroup, divide_


class InProcessCollectives(ReplicaCollectives):
    """Endpoint of one of the `SimulatedReplicas`. Its collectives work only inside `SimulatedReplicas.run`."""

    def __init__(self, rendezvous: "_Rendezvous", replica: int, groups: ReplicaGroups) -> None:
        super().__init__(groups, level=RankGroup("network", rendezvous.replicas, replica))
        self._rendezvous = rendezvous
        self.is_writer = replica == 0
        self.label = f" (simulated replica {replica})"

    def _exchange(self, item: Any, combine: Callable[[list[Any]], T]) -> T:
        return self._rendezvous.exchange(self.replica, item, combine)

    @property
    def _level(self) -> RankGroup:
        return replace(self.levels[0], process_group=SimulatedGroup(self._exchange))

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
        if codec is not None:
            return super()._all_reduce(tensor, divisor, codec, error, carried_error)
        self._exchange(tensor, lambda tensors: _sum_in_order(tensors, divisor))
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        if codec is None:
            self._exchange(tensor, lambda tensors: _sum_in_order(tensors, divisor))
        else:
            super()._reduce_scatter(tensor, divisor, codec, error)
        own = tensor.view(self.replicas, -1)[self.replica].clone()
        tensor.fill_(torch.nan).view(self.replicas, -1)[self.replica] = own  # the other slices are undefined
        return Handle()

    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        messages = self._exchange(message.clone(), list)
        return Handle(lambda: torch.stack([messages[owner] for owner in owners], out=gathered))

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        # `output` is written by `Handle.wait`, as in a distributed run.
        parts = self._exchange(input.clone(), list)
        return Handle(lambda: torch.cat(parts, out=output))

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
        self._exchange(values, lambda tensors: _sum_in_order(tensors, 1))

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

    def _minimum(self, values: Tensor) -> Tensor:
        return self._exchange(values.float(), lambda each: self._minimum_over_model(torch.stack(each).amin(0)))

    def _gather_scalar(self, value: Tensor) -> Tensor:
        return self._exchange(value, torch.stack)


class DryRunCollectives(ReplicaCollectives):
    """Endpoint of this replica, where the other replicas do not exist.

    Args:
        groups: Groups of the process; `model` holds the shards. Unless `replicas` is given, the number of replicas is
            that of `levels` or of the (fake) replicate group.
        replicas: Number of replicas, each on a separate node, in one group over the network.
    """

    def __init__(self, groups: ReplicaGroups | None = None, replicas: int = 0) -> None:
        super().__init__(groups, level=RankGroup("network", replicas, 0) if replicas else None)

    def _start(self, exchange: Callable[[tuple[RankGroup, ...]], None], device: torch.device) -> Handle:
        return Handle()

    def _pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        return Handle()

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        for each in (each for each in (error, carried_error) if each is not None):
            each.zero_()
        return Handle()

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        means.copy_(sent)
        if error is not None:
            error.zero_()
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        return self._all_reduce(tensor, divisor, codec, error, None)

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        if self.replica in owners:
            received.copy_(messages[owners.index(self.replica)].expand_as(received))
        return Handle()

    def _gather_from_owners(self, gathered: Tensor, message: Tensor, owners: Sequence[int]) -> Handle:
        if self.replica in owners:
            gathered.copy_(message.expand_as(gathered))
        else:
            gathered.zero_()
        return Handle()

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        output.view(self.replicas, -1).copy_(input.expand(self.replicas, -1))
        return Handle()

    @property
    def peers(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_peers(self, values: Tensor) -> Tensor:
        return values.expand(self.replicas, -1)

    @property
    def _peers_by_replica(self) -> list[int]:  # type: ignore[override]
        return list(range(self.replicas))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Do nothing: the values are equal on all replicas."""

    def sum_over_replicas(self, values: Tensor) -> None:
        values.mul_(self.replicas)

    def sum_over_all(self, values: Tensor) -> Tensor:
        values = values * self.replicas
        if self.groups.model is not None:
            dist.all_reduce(values, group=self.groups.model)
        return values

    def gather_objects(self, item: Any) -> list[Any]:
        """Gather from the ranks of this replica, which exist unless the backend is fake."""
        return [item] if self.is_fake else gather_lists(self.groups.model, [item])

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return [item] * self.replicas

    @property
    def _scalars(self) -> None:
        return None

    def _minimum(self, values: Tensor) -> Tensor:
        return self._minimum_over_model(values)

    def sum_over_owners(self, value: Tensor) -> Tensor:
        return self.sum_over_model(value)

    def _gather_scalar(self, value: Tensor) -> Tensor:
        return value.expand(self.replicas)


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
        self._rendezvous = _Rendezvous(replicas)
        # Threads that live as long as this object: libraries such as cuBLAS keep handles and memory for every thread.
        self._threads = [ThreadPoolExecutor(1) for _ in range(replicas - 1)]
        for thread in self._threads:
            thread.submit(int)  # starts it, so that a limit on threads is reached before replicas wait for each other
        self.endpoints = [InProcessCollectives(self._rendezvous, i, groups) for i in range(replicas)]
        self.all = DryRunCollectives(groups, replicas)
        self.all.ledger = self.endpoints[0].ledger

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(replica)` for all replicas and return the results. Raises the first error of any replica."""
        results: dict[int, T] = {}
        # Device, stream and grad mode of the caller, which are thread-local. On one common stream the replicas need no
        # further synchronization of the device.
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        grad = torch.is_grad_enabled()

        def run_replica(replica: int) -> None:
            def run() -> None:
                if stream is not None:
                    torch.cuda.set_stream(stream)  # also sets the device
                with torch.set_grad_enabled(grad):
                    results[replica] = work(replica)

            self._rendezvous.run(replica, run)

        self._rendezvous.open()
        others = [thread.submit(run_replica, replica) for replica, thread in enumerate(self._threads, 1)]
        run_replica(0)  # in the calling thread, so that its thread-local settings hold for the replica that writes
        wait(others)
        self._rendezvous.close()
        return [results[replica] for replica in range(len(self.endpoints))]


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


def _sum_in_order(tensors: Sequence[Tensor], divisor: float) -> None:
    """Write (sum in replica order) / divisor to all tensors."""
    total, *others = tensors
    for other in others:
        total += other
    divide_(total, divisor)
    for other in others:
        other.copy_(total)


def collectives_of(
    replicas: "ProcessGroup | ReplicaGroups | ReplicaCollectives | None", model: ProcessGroup | None = None
) -> ReplicaCollectives:
    """Return the endpoint for `replicas`; see `ReplicaCollectives`. With the fake backend, a dry run."""
    if isinstance(replicas, ReplicaCollectives):
        return replicas
    if dist.is_initialized() and dist.get_backend() == "fake":
        return DryRunCollectives(replicas if isinstance(replicas, ReplicaGroups) else ReplicaGroups(replicas, model))
    return ReplicaCollectives(replicas, model)

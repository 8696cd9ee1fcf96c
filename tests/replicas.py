"""N replicas in one process: threads that run the real optimizer on a stub of the collectives."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from topology.groups import Ring
from topology.lanes import Handle
from topology.ring_bytes import reduce_bytes, scatter_bytes


class Meeting:
    """Where the threads of one run exchange values; a thread that fails breaks it for all."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._barrier = threading.Barrier(replicas, timeout=60)
        self._items: list[Any] = [None] * replicas

    def gather(self, replica: int, item: Any) -> list[Any]:
        self._items[replica] = item
        self._barrier.wait()
        items = list(self._items)
        self._barrier.wait()
        return items

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCollectives(ReplicaCollectives):
    """Adds in rank order. One replica is one thread; counts its calls as the real one does its own."""

    least_columns = 7  # several chunks in small models

    def __init__(self, meeting: Meeting, replica: int) -> None:
        super().__init__(None)
        self._meeting = meeting
        self.replicas, self.replica = meeting.replicas, replica
        self.rings = (Ring("network", meeting.replicas, replica),)

    def all_reduce(
        self, tensor: Tensor, mean: bool = True, kind: str = "payload", error: Tensor | None = None
    ) -> Handle:
        if error is not None:
            return self._reduce_rounded(tensor, error)
        parts = self._meeting.gather(self.replica, tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total / self.replicas if mean else total)
        self.traffic.add("network", kind, tensor.nbytes, 2.0 * (self.replicas - 1) / self.replicas * tensor.nbytes)
        return Handle()

    def reduce_scatter(self, tensor: Tensor, kind: str = "payload", error: Tensor | None = None) -> Handle:
        sent = tensor.clone() if error is None else tensor.bfloat16().float()
        if error is not None:
            torch.sub(tensor, sent, out=error)
        own, *others = (part.view(self.replicas, -1)[self.replica] for part in self._meeting.gather(self.replica, sent))
        total = own.clone()
        for part in others:
            total += part
        tensor.fill_(torch.nan)  # what is not this replica's is undefined
        tensor.view(self.replicas, -1)[self.replica] = total / self.replicas
        self._count(kind, scatter_bytes(tensor.numel(), self.rings, error is not None))
        return Handle()

    def sum_over_owners(self, value: Tensor) -> Tensor:
        total, *others = self._meeting.gather(self.replica, value.clone())
        for part in others:
            total = total + part
        return total

    def _reduce_rounded(self, tensor: Tensor, error: Tensor) -> Handle:
        """What one ring in BF16 does: rounded when sent, summed in FP32 by the owner of a part, rounded again."""
        sent = tensor.bfloat16().float()
        total = sum(self._meeting.gather(self.replica, sent)) / self.replicas
        rounded = total.bfloat16().float()
        torch.sub(tensor, sent, out=error)
        own = error.view(self.replicas, -1)[self.replica]
        own += ((total - rounded) * self.replicas).view(self.replicas, -1)[self.replica]
        self._meeting.gather(self.replica, None)  # nobody writes before all have read
        tensor.copy_(rounded)
        self._count("payload", reduce_bytes(tensor.numel(), self.rings, True))
        return Handle()

    def all_reduce_chunked(self, source: Any, mean: bool = True, chunk_entries: int = 64) -> None:
        super().all_reduce_chunked(source, mean, chunk_entries)

    def all_gather(self, output: Tensor, own: Tensor, kind: str = "mask") -> Handle:
        """Delivers late, as the network does: the output is not touched before `wait`."""
        parts = self._meeting.gather(self.replica, own.clone())
        self.traffic.add("network", kind, own.nbytes, (self.replicas - 1) * own.nbytes)
        return Handle(lambda: output.copy_(torch.cat(parts)))

    @property
    def twins(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_twins(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.gather(self.replica, values.clone()))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._meeting.gather(self.replica, tensor.clone())[source])

    def all_true(self, flag: Tensor) -> Tensor:
        return torch.stack(self._meeting.gather(self.replica, flag)).all(0)

    def sum_over_all(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.gather(self.replica, values.clone())).sum(0)

    def sum_over_replicas(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._meeting.gather(self.replica, values.clone())).sum(0, dtype=values.dtype))

    def gather_objects(self, item: Any) -> list[Any]:
        return self._meeting.gather(self.replica, item)


def run_replicas(replicas: int, work: Callable[[ThreadCollectives], Any]) -> list[Any]:
    """Runs `work(collectives)` as every replica and returns the results; raises the first error."""
    meeting = Meeting(replicas)
    results: list[Any] = [None] * replicas
    errors: list[BaseException] = []

    def one(replica: int) -> None:
        try:
            results[replica] = work(ThreadCollectives(meeting, replica))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(replica,)) for replica in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

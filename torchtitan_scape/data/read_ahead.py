"""Batches of a step: of simulated replicas in turn, and read during the previous step."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.data.loader import Batch, NoTextError, TextDataLoader
from torchtitan_scape.data.prepared import PreparedDataLoader
from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.titan.components import IGNORE_INDEX
from torchtitan_scape.titan.data import BaseDataLoader
from torchtitan_scape.topology.groups import gather_lists


class SimulatedDataLoader(BaseDataLoader):
    """Data loader that yields `each` batches of each replica's loader in turn, repeatedly.

    Its state is the union of the states of all loaders, under the names that they have on N ranks. TorchTitan saves
    between two steps, when every loader has yielded the same number of batches.
    """

    def __init__(self, loaders: Sequence[TextDataLoader], each: int = 1) -> None:
        self.loaders, self.each = tuple(loaders), each

    def __iter__(self) -> Iterator[Batch]:
        for batches in cycle([iter(loader) for loader in self.loaders]):
            for _ in range(self.each):
                if (batch := next(batches, None)) is None:
                    return
                yield batch

    def empty_documents(self) -> int:
        return sum(loader.empty_documents() for loader in self.loaders)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for loader in self.loaders for key, value in loader.state_dict().items()}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return `TextDataLoader.saved_state` for the given number of readers."""
        return self.loaders[0].saved_state(readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state_dict)

    def load_resharded(self, states: Sequence[dict[str, Any]]) -> str:
        """Apply `TextDataLoader.load_resharded` to every replica. Return a line for the log."""
        *_, line = (loader.load_resharded(states) for loader in self.loaders)
        return line


Loader = TextDataLoader | SimulatedDataLoader | PreparedDataLoader


class HostTensor(Tensor):
    """A tensor on the host. `to(device)` copies it from pinned memory to a plain tensor; the host does not wait for it.

    Results of operations are host tensors as well.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            with torch._C.DisableTorchFunctionSubclass():
                return to_device(args[0].as_subclass(Tensor), args[1])
        return super().__torch_function__(func, types, args, kwargs or {})


def on_host(batch: Batch) -> Batch:
    """Return the batch with host tensors."""
    inputs, labels = batch
    return {name: x.as_subclass(HostTensor) for name, x in inputs.items()}, labels.as_subclass(HostTensor)


@dataclass
class StepBatches:
    """The batches of one step, the time that it took to read each, the number of labels that count, and the error that
    ended reading.
    """

    batches: list[Batch] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    error: NoTextError | None = None


class ReadAheadLoader(BaseDataLoader):
    """Data loader that can read the `per_step` batches of the next step during a step.

    Its state does not include batches that were read ahead: it is that after the last step that began.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader, self.per_step = loader, 1
        self._source: Iterator[Batch] | None = None
        self._next: StepBatches | None = None
        self._state: dict[str, Any] | None = None  # of the loader, before the next step was read
        self._seconds: list[float] = []

    def read_step(self) -> StepBatches:
        """Read the batches of the next step, if that was not done before, and return them."""
        if self._next is not None:
            return self._next
        if self._source is None:
            self._source = iter(self.loader)
        else:
            self._state = self.loader.state_dict()
        step = self._next = StepBatches()
        for _ in range(self.per_step):
            begin = time.perf_counter()
            try:
                batch = next(self._source)
            except NoTextError as error:
                step.error = error
                break
            step.batches.append(batch)
            step.tokens += int((batch[1] != IGNORE_INDEX).sum())
            step.seconds.append(time.perf_counter() - begin)
        return step

    def seconds(self) -> float:
        """Return the time that it took to read the last batch."""
        return self._seconds[-1]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one step after the other. Can be called once. Raises NoTextError as the loader does."""
        while True:
            step = self.read_step()
            self._next = self._state = None
            for batch, seconds in zip(step.batches, step.seconds, strict=True):
                self._seconds = [seconds]
                yield batch
            if step.error is not None:
                raise step.error

    def empty_documents(self) -> int:
        """Return the number of empty documents that were skipped."""
        return self.loader.empty_documents()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() if self._state is None else self._state

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return `TextDataLoader.saved_state` for the given number of readers."""
        return self.loader.saved_state(readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)

    def load_resharded(self, states: list[dict[str, Any]]) -> str:
        """Apply `TextDataLoader.load_resharded`. Return a line for the log."""
        return self.loader.load_resharded(states)


class TokenSum:
    """Counts the tokens of a step over all ranks, and ends the run on all of them if the data of one have no token.

    The sum is the first reduction of a TorchTitan step. It is computed on the host, over `group` (None for a single
    rank), and is started during the previous step, when the batches of a step have been read: the host does not wait
    for the device, and seldom for other ranks. A rank without a token yields batches without labels, so that it takes
    part in the sum. Then all ranks raise NoTextError, before the forward pass.
    """

    def __init__(self, loader: ReadAheadLoader, group: dist.ProcessGroup | None) -> None:
        self._loader, self._group = loader, group
        self._sum: tuple[dist.Work, torch.Tensor] | None = None
        self._error: NoTextError | None = None

    def start(self) -> None:
        """Read the batches of the next step and start the sum of their tokens, unless that was done. Collective."""
        step = self._loader.read_step()
        if self._group is None or self._sum is not None:
            return
        mine = [float(step.tokens), float(step.error is not None)]
        values = torch.tensor(mine, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        self._sum = work, values

    def batches(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of `source`, and after an error, batches without a label; raise if no other rank exists."""
        try:
            for batch in source:
                yield on_host(batch)
        except NoTextError as error:
            if self._group is None:
                raise
            self._error = error
        while True:
            tokens = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
            yield on_host(({"input": tokens}, torch.full_like(tokens, IGNORE_INDEX)))

    def count(self, *args: Any, **kwargs: Any) -> float:
        """Return the tokens of the step on all ranks, in place of TorchTitan's `dist_sum`, or raise NoTextError."""
        assert self._sum is not None
        (work, values), self._sum = self._sum, None
        work.wait()
        total, n_failed = values.tolist()
        if n_failed:
            errors = [f"{self._error} (rank {dist.get_rank()})"] if self._error else []
            raise NoTextError(gather_lists(self._group, errors)[0]) from self._error
        return float(total)

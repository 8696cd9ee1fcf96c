"""Batches of a step, read during the previous one, on the host."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.data.loader import NoTextError, TextDataLoader
from torchtitan_scape.data.prepared import PreparedDataLoader
from torchtitan_scape.data.simulated import Batch, SimulatedDataLoader
from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.titan.components import IGNORE_INDEX
from torchtitan_scape.titan.data import BaseDataLoader

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
    """The batches of one step.

    Attributes:
        seconds: Time that it took to read each batch.
        tokens: Labels that count.
        end: StopIteration if the data ended before the step was complete, or NoTextError.
    """

    batches: list[Batch] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    end: StopIteration | NoTextError | None = None


class ReadAheadLoader(BaseDataLoader):
    """Data loader that can read the batches of the next step during a step.

    Its state does not include batches that were read ahead: it is that after the last step that began.

    Args:
        loader: The loader of the batches.

    Attributes:
        per_step: Batches of a step.
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
            except (StopIteration, NoTextError) as error:
                step.end = error
                break
            step.batches.append(batch)
            step.tokens += int((batch[1] != IGNORE_INDEX).sum())
            step.seconds.append(time.perf_counter() - begin)
        return step

    def seconds(self) -> float:
        """Return the time that it took to read the last batch."""
        return self._seconds[-1]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one step after the other. Can be called once.

        Raises:
            NoTextError: As the loader does.
        """
        while True:
            step = self.read_step()
            self._next = self._state = None
            for batch, seconds in zip(step.batches, step.seconds, strict=True):
                self._seconds = [seconds]
                yield batch
            if isinstance(step.end, StopIteration):
                return
            if step.end is not None:
                raise step.end

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

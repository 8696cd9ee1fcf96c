"""Time of a step by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_NOT_MEASURED = nullcontext()


@dataclass
class _Stack:
    """Open phases of one stream, the innermost last, and the time at which that one began or continued."""

    open: list[str] = field(default_factory=list)
    since: Any = None


class PhaseTimer:
    """Accumulates the time spent in named phases; on a GPU with events, so that measuring does not synchronize.

    Time in a nested phase counts only for the inner phase. Set `enabled` if `take` is called regularly.

    On a GPU every stream has its own phases. A phase on a side stream, such as a collective of FSDP, does not interrupt
    the phase of the main stream, because both run at the same time: the sum of all phases may exceed the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        self._device, self._cuda = device, device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._stacks: dict[int, _Stack] = defaultdict(_Stack)  # by stream

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time counts as that of a phase."""
        return self._measured(name) if self.enabled else _NOT_MEASURED

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device) if self._cuda else None
        stack = self._stacks[stream.cuda_stream if stream is not None else 0]
        self._switch(stack, stream)
        stack.open.append(name)
        try:
            yield
        finally:
            self._switch(stack, stream)
            stack.open.pop()

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` with every call timed as a phase."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def _switch(self, stack: "_Stack", stream: Any) -> None:
        """Attribute the time since the stack's last switch to its innermost phase."""
        if stream is not None:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record(stream)
            if stack.open:
                self._events.append((stack.open[-1], stack.since, now))
        else:
            now = time.perf_counter()
            if stack.open:
                self._seconds[stack.open[-1]] += now - stack.since
        stack.since = now

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. Waits for the device."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000.0
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

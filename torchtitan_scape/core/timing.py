"""Time of a step by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class PhaseTimer:
    """Accumulates the time spent in named phases; on a GPU with events, so that measuring does not synchronize.

    Time in a nested phase counts only for the inner phase. Set `enabled` if `take` is called regularly.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        self._device, self._cuda = device, device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[str] = []  # Open phases, the innermost last.
        self._since: Any = None  # Time at which the innermost phase began or continued.

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` with every call timed as a phase."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def _switch(self) -> None:
        """Attribute the time since the last switch to the innermost open phase."""
        if self._cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
            if self._open:
                self._events.append((self._open[-1], self._since, now))
        else:
            now = time.perf_counter()
            if self._open:
                self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. Waits for the device."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000.0
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

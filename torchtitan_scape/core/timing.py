"""Where a step's time goes, by phase."""

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
    """Adds up the time spent in named phases; on a GPU by events, so that measuring waits for nothing.

    Time in a phase inside another one is the inner one's alone. Off until `enabled` is set by whoever calls `take` now
    and then.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        self._device, self._cuda = device, device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[str] = []  # phases, the innermost last
        self._since: Any = None  # when the innermost one began, or went on

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, every call of which is a phase."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def _turn(self) -> None:
        """One phase ends and another begins: the time up to here is that of the one that was on."""
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
        """Seconds by phase since the last call. Waits for the device: call it where a log line is made."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000.0
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

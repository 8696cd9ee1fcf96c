"""Where a step's time goes, by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Adds up the time spent in named phases; on a GPU by events, so that measuring waits for nothing.

    Off until `enabled` is set by whoever calls `take` now and then.
    """

    def __init__(self, device_type: str) -> None:
        self.enabled = False
        self._cuda = device_type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
        elif self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call. Waits for the device: call it where a log line is made."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000.0
        self._events.clear()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

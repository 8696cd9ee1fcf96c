"""Device and host times of a call.

A GPU runs behind its host. If events are recorded around work that the host has not issued yet, the device waits for
the host between them, and the measured time is the host's. So the device first spins for as long as the host needs to
issue the work.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
SPIN_CYCLES = 20_000_000  # to measure the cycles per millisecond
ATTEMPTS = 3  # with longer spins
LONGEST_SPIN = 200.0  # milliseconds; work with a longer host time waits for the device itself
SWEPT_BYTES = 1 << 28  # several times the cache of any device


@dataclass(frozen=True)
class Times:
    """Milliseconds of repeats on the device, and of the host until it has issued the work.

    ahead: In each repeat the host had issued all work before the device began with it; otherwise the device's times
        contain waits for the host. False on a CPU, and if the work itself waits for the device.
    """

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    ahead: bool = False

    @property
    def ms(self) -> float:
        return statistics.median(self.device)

    def figures(self) -> dict[str, Any]:
        """Return medians and extremes."""
        return {
            "ms": self.ms,
            "least_ms": min(self.device),
            "most_ms": max(self.device),
            "host_ms": statistics.median(self.host),
            "ahead": self.ahead,
        }


def device_for(smoke: bool) -> torch.device:
    """Return the GPU, or the CPU in a smoke test. Raises ValueError if there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not smoke:
        raise ValueError("torch sees no GPU; --smoke checks the script without one")
    return device


class Clock:
    """Measures calls on a device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.cuda = device.type == "cuda"
        self._cycles = self._cycles_of_a_millisecond() if self.cuda else 0.0
        self._swept: Tensor | None = None

    def __call__(self, work: Callable[[], Any]) -> Times:
        for _ in range(min(WARM_UP, self.repeats)):
            work()
        return self._on_gpu(work) if self.cuda else self._on_cpu(work)

    def spin(self, milliseconds: float) -> None:
        """Let a GPU spin from here on."""
        if self.cuda:
            torch.cuda._sleep(int(milliseconds * self._cycles))

    def sweep(self) -> None:
        """Evict the work's data from the device's cache, as the rest of a training step does."""
        if self._swept is None:
            self._swept = torch.zeros(SWEPT_BYTES // 4, device=self.device)
        self._swept.sum()

    def _on_cpu(self, work: Callable[[], Any]) -> Times:
        times = Times()
        for _ in range(self.repeats):
            begin = time.perf_counter()
            work()
            times.device.append(1e3 * (time.perf_counter() - begin))
        return Times(times.device, list(times.device))

    def _on_gpu(self, work: Callable[[], Any]) -> Times:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        spin = min(0.5 + 2e3 * (time.perf_counter() - begin), LONGEST_SPIN)
        times, ahead = Times(), True
        for _ in range(self.repeats):
            for _attempt in range(ATTEMPTS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                self.sweep()
                self.spin(spin)
                start.record()
                begin = time.perf_counter()
                work()
                host = 1e3 * (time.perf_counter() - begin)
                in_time = not start.query()
                end.record()
                end.synchronize()
                if in_time or not ahead:
                    break
                spin = min(2 * spin, LONGEST_SPIN)
            if not in_time:
                ahead, spin = False, 0.0
            times.device.append(start.elapsed_time(end))
            times.host.append(host)
        return Times(times.device, times.host, ahead)

    def _cycles_of_a_millisecond(self) -> float:
        for _ in range(2):  # the first one wakes the device up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(SPIN_CYCLES)
            end.record()
            end.synchronize()
        return SPIN_CYCLES / start.elapsed_time(end)


@contextmanager
def counted_waits(device: torch.device, found: list[list[str]]) -> Iterator[None]:
    """Append the lines of code that waited for the device, as "file:line"; nothing without a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    found.append([f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits])


def copy_bandwidth(clock: Clock, gigabytes: float) -> float:
    """Return bytes per second, read and written, of a copy on the device: the bound of streaming passes."""
    source = torch.rand(int(gigabytes * 2**28), device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (clock(lambda: target.copy_(source)).ms / 1e3)


def of(figures: dict[str, Any], least: float, entries: int, bandwidth: float) -> dict[str, Any]:
    """Return a pass's figures with the bytes that it must move, and its bandwidth."""
    rate = least / (figures["ms"] / 1e3)
    return figures | {
        "minimal_bytes": least,
        "bytes_an_entry": least / entries,
        "bytes_a_second": rate,
        "share_of_copy": rate / bandwidth,
    }

"""Device and host times of a call.

A GPU runs behind its host. If events are recorded around work that the host has not issued yet, the device waits for
the host between them, and the measured time is the host's. So the device first spins for as long as the host needs to
issue the work.
"""

import math
import statistics
import time
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3
SPIN_CYCLES = 20_000_000  # to measure the cycles per millisecond
ATTEMPTS = 3  # with longer spins
LONGEST_SPIN = 200.0  # milliseconds; work with a longer host time waits for the device itself
SWEPT_BYTES = 1 << 28  # several times the cache of any device


def find_device() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Clock:
    """Measures calls on a device.

    Attributes:
        bandwidth: Bytes per second, read and written, of a copy on the device, if `measure_copy` was called.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats, self.bandwidth = device, repeats, math.nan
        self.cuda = device.type == "cuda"
        self._cycles = self._cycles_of_a_millisecond() if self.cuda else 0.0
        self._swept: Tensor | None = None

    def __call__(self, work: Callable[[], Any], setup: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """Return the milliseconds of repeats on the device, and of the host until it has issued the work.

        setup: Called before each repeat, and not timed.
        ahead: In each repeat the host had issued all work before the device began with it; otherwise the device's times
        contain waits for the host. False on a CPU, and if the work itself waits for the device.
        """
        for _ in range(min(WARM_UP, self.repeats)):
            setup()
            work()
        if self.cuda:
            device, host, ahead = self._on_gpu(work, setup)
        else:
            device = host = [1e3 * seconds for seconds in timeit.repeat(work, setup, number=1, repeat=self.repeats)]
            ahead = False
        return {
            "ms": statistics.median(device),
            "least_ms": min(device),
            "most_ms": max(device),
            "host_ms": statistics.median(host),
            "ahead": ahead,
        }

    def measure_copy(self, gigabytes: float) -> None:
        """Measure the bound of streaming passes."""
        source = torch.rand(int(gigabytes * 2**28), device=self.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * source.nbytes / (self(lambda: target.copy_(source))["ms"] / 1e3)

    def rates(self, work: Callable[[], Any], least: float, entries: int) -> dict[str, Any]:
        """Return the times of a pass, the bytes that it must move, and its bandwidth."""
        figures = self(work)
        rate = least / (figures["ms"] / 1e3)
        return figures | {
            "minimal_bytes": least,
            "bytes_an_entry": least / entries,
            "bytes_a_second": rate,
            "share_of_copy": rate / self.bandwidth,
        }

    def spin(self, milliseconds: float) -> None:
        """Let a GPU spin from here on."""
        if self.cuda:
            torch.cuda._sleep(int(milliseconds * self._cycles))

    def sweep(self) -> None:
        """Evict the work's data from the device's cache, as the rest of a training step does."""
        if self._swept is None:
            self._swept = torch.zeros(SWEPT_BYTES // 4, device=self.device)
        self._swept.sum()

    def _on_gpu(self, work: Callable[[], Any], setup: Callable[[], Any]) -> tuple[list[float], list[float], bool]:
        setup()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        spin = min(0.5 + 2e3 * (time.perf_counter() - begin), LONGEST_SPIN)
        times, hosts, ahead = list[float](), list[float](), True
        for _ in range(self.repeats):
            for _attempt in range(ATTEMPTS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                setup()
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
            times.append(start.elapsed_time(end))
            hosts.append(host)
        return times, hosts, ahead

    def _cycles_of_a_millisecond(self) -> float:
        for _ in range(2):  # the first one wakes the device up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(SPIN_CYCLES)
            end.record()
            end.synchronize()
        return SPIN_CYCLES / start.elapsed_time(end)


def clock_of(smoke: bool, repeats: int) -> Clock:
    """Return the clock of a step, with the bandwidth of a copy; without repeats in a smoke test."""
    clock = Clock(find_device(), 1 if smoke else repeats)
    clock.measure_copy(0.001 if smoke else 4.0)
    return clock


def waits_of(work: Callable[[], Any], device: torch.device) -> list[str]:
    """Call `work`. Return the lines of code that waited for the device, as "file:line"; [] without a GPU."""
    if device.type != "cuda":
        work()
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]

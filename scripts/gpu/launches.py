"""Kernel launches of an optimizer step, the gaps between them, and the time of each kernel.

Kernels are those in the profiler's trace of the device. The host issues each step while the device is still busy, first
with a spin and then with the previous step: gaps belong to the device if its steps take longer than the host's, as with
a large model. Without a GPU the trace has no kernels.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import profile

from scripts.gpu.timing import Clock

STEPS, BUSY_MS = 3, 150.0  # longer than the host needs for a step
Kernel = tuple[str, float, float]  # name, start and end in microseconds


def kernels_of(clock: Clock, work: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of `STEPS` calls, by start."""
    work()
    with profile() as profiler:  # of the host, and of the device if there is one
        clock.spin(BUSY_MS)
        for _ in range(STEPS):
            work()
        if clock.cuda:
            torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    # `Optimizer.step` is an annotation among the kernels that would cover the gaps.
    on_device = [e for e in events if not e.is_user_annotation]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in on_device), key=lambda kernel: kernel[1])


def gaps(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return busy and idle milliseconds per step, the longest gap, and the time by kernel.

    Concurrent kernels, on several streams, count once. The spin is left out.
    """
    own = [kernel for kernel in kernels if "spin" not in kernel[0]]
    busy = idle = longest = 0.0
    until = own[0][1] if own else 0.0
    by_name: dict[str, float] = defaultdict(float)
    for name, start, end in own:
        gap = max(0.0, start - until)
        idle, longest = idle + gap, max(longest, gap)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        by_name[name[:60]] += end - start
    largest = sorted(by_name.items(), key=lambda entry: -entry[1])[:12]
    return {
        "launches": len(own) / STEPS,
        "busy_ms": busy / 1e3 / STEPS,
        "gaps_ms": idle / 1e3 / STEPS,
        "longest_gap_ms": longest / 1e3,
        "ms_by_kernel": {name: us / 1e3 / STEPS for name, us in largest},
    }

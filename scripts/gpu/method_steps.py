"""Time whole optimizer steps of several methods, against fused AdamW in the same process.

Each step is one of the first of 8 replicas, in the steady state: the check for non-finite gradients, clipping, the
method and the update. Messages are encoded and decoded, and not sent. Afterwards the profiler records the launches of
further steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from scripts.common import RunError, write
from scripts.gpu.passes import ADAMW, RATES, REPLICAS, SMOKE, FirstOfMany, dense_step, draw, free, parameters_of
from scripts.gpu.timing import Clock, clock_of, waits_of
from torchtitan_scape import AdamS, replicate
from torchtitan_scape.core.workloads import WORKLOADS, Shape, count_entries
from torchtitan_scape.kernels.dense.triton_kernels import scale_kernel
from torchtitan_scape.kernels.dense.triton_passes import DTYPES, TensorTables
from torchtitan_scape.methods.registry import METHODS

Kernel = tuple[str, float, float]  # name, start and end in microseconds
PROFILED, BUSY_MS = 3, 150.0  # steps; longer than the host needs for one
MODEL = "llama_1_8b"
REPEATS, WARM_UP = 10, 4  # steps until all blocks are compressed and all buffers exist
# Options, by name in the report. scripts/gpu/passes.py times the passes of SCAPE.
TIMED: dict[str, dict[str, Any]] = {
    "SCAPE, density 0.05, int4": {"method": "scape", "density": 0.05, "code": "int4"},
    "dense": {"method": "dense"},
    "sparta": {"method": "sparta", "interval": 3, "code": "1bit", "warmup_steps": 0},
    "sparta, unbiased bit": {"method": "sparta", "interval": 3, "code": "1bit_unbiased", "warmup_steps": 0},
    "quantized, int4": {"method": "quantized", "code": "int4"},
    "quantized, 2bit": {"method": "quantized", "code": "2bit"},
    "quantized_update, 2bit": {"method": "quantized_update", "update_code": "2bit"},
    "topk": {"method": "topk", "density": 0.01, "start": 0},
    "powersgd": {"method": "powersgd", "rank": 4, "start": 0},
    "onebit_adam": {"method": "onebit_adam", "warmup_steps": 1},
    "radius": {"method": "radius", "start": 0, "interval": 1000},
    "diloco, a step without exchange": {"method": "diloco", "inner_steps": 1000},
}


def measure(options: dict[str, Any], shapes: Sequence[Shape], clock: Clock) -> dict[str, Any]:
    """Return figures of a method's step. Raises an error of torch if it does not fit in memory."""
    model = nn.ParameterList(parameters_of(shapes, clock.device))
    inner: torch.optim.Optimizer
    if METHODS[options["method"]].method.holds_optimizer_state:
        inner = AdamS(list(model.named_parameters()), **RATES, allocate_state=False)
    else:
        inner = torch.optim.AdamW(model.parameters(), **RATES, fused=True)
    optimizer = replicate(
        model, inner, options, FirstOfMany(replicas=REPLICAS), max_norm=1.0, total_steps=1000, kernels="triton"
    )
    parameters, entries = list(model), count_entries(shapes)
    for _ in range(WARM_UP):
        draw(parameters)
        optimizer.step()
    draw(parameters)
    figures = clock.rates(optimizer.step, ADAMW * entries, entries)
    optimizer.timer.enabled = True
    for _ in range(WARM_UP):
        optimizer.step()
    figures["phases_ms"] = {name: 1e3 * seconds / WARM_UP for name, seconds in optimizer.timer.take().items()}
    optimizer.timer.enabled = False
    if clock.cuda:
        figures["waits"] = waits_of(optimizer.step, clock.device)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    return figures | {"profile": gaps(kernels_of(clock, optimizer.step))}


def kernels_of(clock: Clock, work: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of `PROFILED` calls, by start, from the profiler's trace of the device; none without a GPU.

    The host issues each step while the device is still busy, first with a spin and then with the previous step: gaps
    between kernels belong to the device if its steps take longer than the host's, as with a large model.
    """
    work()
    with profile() as profiler:  # of the host, and of the device if there is one
        clock.spin(BUSY_MS)
        for _ in range(PROFILED):
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
    by_name = Counter[str]()
    for name, start, end in own:
        gap = max(0.0, start - until)
        idle, longest = idle + gap, max(longest, gap)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        by_name[name[:60]] += end - start
    return {
        "launches": len(own) / PROFILED,
        "busy_ms": busy / 1e3 / PROFILED,
        "gaps_ms": idle / 1e3 / PROFILED,
        "longest_gap_ms": longest / 1e3,
        "ms_by_kernel": {name: us / 1e3 / PROFILED for name, us in by_name.most_common(12)},
    }


def launch_microseconds(clock: Clock, launches: int) -> float:
    """Return the host's time for a launch of a small Triton kernel, with everything prepared."""
    factor, gradients = torch.ones((), device=clock.device), [torch.zeros(8, device=clock.device)]
    tables = TensorTables().of(gradients)
    ((listed, full, _),) = tables.lists((gradients,), (gradients,))

    def launch() -> None:
        for _ in range(launches):
            tables.launch(scale_kernel, listed, full, factor, DTYPE=DTYPES[torch.float32])

    return 1e3 * clock(launch)["host_ms"] / launches


def method_steps(result: Path, smoke: bool) -> None:
    clock = clock_of(smoke, REPEATS)
    shapes = SMOKE if smoke else WORKLOADS[MODEL].shapes()
    found: dict[str, Any] = {"model": MODEL, "copy_bandwidth": clock.bandwidth, "methods": {}, "profiles": {}}
    adamw = found["fused AdamW"] = dense_step("fused AdamW", shapes, clock)
    found["launch_microseconds"] = launch_microseconds(clock, 1 if smoke else 100)
    free()
    found["with clipping"] = dense_step("fused AdamW", shapes, clock, clips=True)
    for name, options in TIMED.items():
        free()
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            figures = measure(options, shapes, clock)
        except Exception as error:  # of torch, Triton or the method; the other methods are measured nevertheless
            found["methods"][name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
            print(f"{name}: {found['methods'][name]['failed']}", flush=True)
        else:
            found["profiles"][name] = figures.pop("profile")
            found["methods"][name] = figures
            print(f"{name}: {figures['ms']:.3f} ms, {figures['ms'] / adamw['ms']:.2f} x fused AdamW", flush=True)
        write(result, found)
    if failed := [name for name, one in found["methods"].items() if "failed" in one]:
        raise RunError(f"not timed: {', '.join(failed)}")

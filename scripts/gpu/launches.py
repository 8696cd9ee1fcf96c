"""What a step of the optimizer launches, the gaps between launches, and the memory it takes over dense AdamS.

    python -m scripts.gpu.launches --result FILE
    TRITON_INTERPRET=1 python -m scripts.gpu.launches --smoke --result FILE    # a tiny model, anywhere

Kernels are those that the profiler has seen on the device. The host issues the first step while the device is kept
busy, and each one after while the device is busy with what is left of the step before: gaps are the device's own where
that takes longer than the host does, as with a large model. Without a GPU the profiler sees none.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.common import guarded, parser, write
from scripts.gpu.passes import RATES, SMOKE, draw, free, parameters_of, scape
from scripts.gpu.timing import Clock, device_for
from torchtitan_scape import AdamS, Scape, ScapeOptions
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, Shape

STEPS, BUSY_MS = 3, 60.0  # the device is kept busy for longer than the host takes for a step
DENSITY, WIRE = 0.05, "int4"
Kernel = tuple[str, float, float]  # name, start and end in microseconds


def kernels_of(clock: Clock, work: Callable[[], Any]) -> list[Kernel]:
    """What the device ran in `STEPS` calls, by start."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.cuda else [])
    work()
    with profile(activities=activities) as profiler:
        clock.spin(BUSY_MS)
        for _ in range(STEPS):
            work()
        if clock.cuda:
            torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    # `Optimizer.step` is a range of its own, which stands among the kernels and covers the gaps between them.
    on_device = [e for e in events if not e.is_user_annotation]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in on_device), key=lambda kernel: kernel[1])


def gaps(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Milliseconds a step in which something ran, and in which nothing did; the longest gap; time by kernel.

    Kernels that ran at the same time, on several streams, count once. What the device was kept busy with is left out.
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


def memory(shapes: Sequence[Shape], densities: Iterable[float], clock: Clock) -> list[dict[str, Any]]:
    """Peak bytes of training steps with SCAPE over those with dense AdamS, from the first step on; beside what the
    planner says of a single replica's masks and payload buffers."""
    rows, dense = [], _peak(shapes, clock, lambda named: AdamS(named, **RATES))
    for density in densities:
        kinds = ScapeOptions(density=density).cost().device_memory(LocalModel.of_shapes(shapes), 1)
        planned = sum(kinds[kind] for kind in ("masks", "payload", "rates of visits"))
        for warmup in (0, 4):
            options = ScapeOptions(density=density, density_warmup_steps=warmup)
            peak = _peak(shapes, clock, lambda named, options=options: Scape(named, **RATES, options=options))  # type: ignore[misc]
            row = {"density": density, "warm-up steps": warmup, "adams_bytes": dense}
            rows.append(row | {"more_bytes": peak - dense, "planned_bytes": planned})
    return rows


def _peak(shapes: Sequence[Shape], clock: Clock, make: Callable[[Any], torch.optim.Optimizer]) -> int:
    free(clock)
    base = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    parameters = parameters_of(shapes, clock.device)
    optimizer = make([(f"p{i}", p) for i, p in enumerate(parameters)])
    for _ in range(8):
        draw(parameters)
        optimizer.step()
        optimizer.zero_grad()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - base)


def run(args: argparse.Namespace) -> None:
    clock = Clock(device_for(args.smoke), 1)
    shapes = SMOKE if args.smoke else WORKLOADS[args.model].shapes()
    found: dict[str, Any] = {"model": args.model, "density": DENSITY, "wire": WIRE}
    parameters = parameters_of(shapes, clock.device)
    optimizer = scape(parameters, DENSITY, WIRE)
    found["scape"] = gaps(kernels_of(clock, optimizer.step))
    write(args.result, found)
    print(
        f"SCAPE: {found['scape']['launches']:.0f} launches a step, gaps {found['scape']['gaps_ms']:.3f} ms", flush=True
    )
    del optimizer
    free(clock)
    found["fused AdamW"] = gaps(kernels_of(clock, torch.optim.AdamW(parameters, **RATES, fused=True).step))
    write(args.result, found)
    del parameters
    found["memory"] = memory(shapes, (0.1, 0.01), clock) if clock.cuda else []
    write(args.result, found)


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--result", type=Path, required=True)
    own.add_argument("--model", choices=[*WORKLOADS], default="llama_1_8b")
    own.add_argument("--smoke", action="store_true", help="a tiny model, on whatever device there is")
    args = own.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())

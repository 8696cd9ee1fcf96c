"""Count the bytes that SCAPE's passes move through device memory, with the hardware counters of Nsight Compute.

The times of `scripts/gpu/passes.py` are compared with the bytes that a pass must move at least. These counters show
whether it moves more, and what its warps wait for. Needs ncu, which reads counters only where the driver allows it.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.common import RunError, read, write
from scripts.gpu.passes import Passes, least_bytes, scape
from scripts.gpu.processes import program, python, run_limited
from scripts.gpu.timing import find_device

# Few tensors, because every launch under the profiler takes long, but far more than fits into the cache.
SHAPES = ((4096, 8192),) * 4
DENSITY, CODE, SECONDS = 0.05, "int4", 80.0
PASSES = ("finite", "pack", "squares", "update", "rotate")
MARKER = "spin"  # of the kernel that separates passes
# Reasons for which warps wait, and shares of the device's limits.
SECTIONS = ("WarpStateStats", "Occupancy", "MemoryWorkloadAnalysis", "SpeedOfLight")
STALL = re.compile(r"smsp__average_warps?_issue_stalled_(\w+?)_per_issue_active\.ratio")
SHARES = {
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum", "nanoseconds": "gpu__time_duration.sum"}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
UNITS |= {"ns": 1.0, "us": 1e3, "ms": 1e6, "nsecond": 1.0, "usecond": 1e3, "msecond": 1e6}
SAMPLE = """"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","Mbyte","Mbyte","us"
"0","spin_kernel(long)","0","0","1"
"1","_pack","2","1","4"
"""


def run_passes(result: Path, smoke: bool) -> None:
    """Run each pass once, after a spin kernel. ncu profiles the kernels between `start` and `stop`."""
    optimizer = scape(SHAPES, DENSITY, CODE, find_device())
    every = Passes(optimizer).works
    works = [every[name] for name in PASSES]
    for work in works:
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for work in works:
        torch.cuda._sleep(1000)
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    least = least_bytes(optimizer, SHAPES)
    write(result, {"least": {name: least[name] for name in PASSES if name in least}})


def rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels in ncu's CSV: name, bytes read and written, nanoseconds, stalls and shares."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RunError(f"ncu printed no table:\n{text[-2000:]}")
    table = csv.DictReader(lines[first:])
    units = next(table)
    for cell in table:
        if None not in (*cell, *cell.values()):  # other lines have more fields or fewer
            counted = {k: float(cell[m].replace(",", "")) * UNITS[units[m]] for k, m in METRICS.items()}
            stalls = {match[1]: value(text) for column, text in cell.items() if (match := STALL.fullmatch(column))}
            shares = {name: value(cell[column]) for name, column in SHARES.items() if column in cell}
            yield {"kernel": cell["Kernel Name"], **counted, "stalls": stalls, "shares": shares}


def value(text: str) -> float:
    """Return a cell's number, NaN if it has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def by_pass(kernels: Iterator[dict[str, Any]], passes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the sums of each pass, which begins with a spin, and of its longest kernel the stalls and shares."""
    found: list[dict[str, Any]] = []
    for kernel in kernels:
        if MARKER in kernel["kernel"]:
            found.append({"launches": 0, **dict.fromkeys(METRICS, 0.0), "longest": 0.0})
        elif found:
            one = found[-1]
            one["launches"] += 1
            for key in METRICS:
                one[key] += kernel[key]
            if kernel["nanoseconds"] > one["longest"]:
                one |= {"longest": kernel["nanoseconds"], "stalls": kernel["stalls"], "shares": kernel["shares"]}
    return dict(zip(passes, found, strict=True))


def count(result: Path, smoke: bool) -> None:
    if smoke:
        write(result, {"counted": by_pass(rows(SAMPLE), ["pack"])})
        return
    profiler = program("ncu")
    if profiler is None:
        write(result, {"note": "ncu is not installed"})
        return
    part = result.with_suffix(".part-result")
    work = [python(), "-m", "scripts.gpu.step", "scripts.gpu.memory_traffic:run_passes", f"--result={part}"]
    metrics = [*(f"--section={name}" for name in SECTIONS), "--metrics", ",".join(METRICS.values())]
    profile = [profiler, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", *metrics]
    output, code = run_limited([*profile, *work], SECONDS)
    if code:
        raise RunError(f"ncu ended with exit code {code}:\n{output[-3000:]}")
    print(output[-60000:], flush=True)  # with all columns
    found = {
        "model": f"{len(SHAPES)} matrices of {SHAPES[0][0]} x {SHAPES[0][1]}",
        "density": DENSITY,
        "code": CODE,
        **read(part),
    }
    write(result, found | {"counted": by_pass(rows(output), PASSES)})

"""Count the bytes that SCAPE's passes move through device memory, with the hardware counters of Nsight Compute.

    python -m scripts.gpu.memory_traffic count --result FILE     # starts `passes` under ncu
    python -m scripts.gpu.memory_traffic count --smoke --result FILE    # parses a line without a GPU

The times of `scripts/gpu/passes.py` are compared with the bytes that a pass must move at least. These counters show
whether it moves more. Needs ncu, which reads counters only where the driver allows it.
"""

import argparse
import csv
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels.scape.passes import pack_all, squares_all, update_all
from scripts.common import RunError, read, write
from scripts.gpu.correctness import ended, environment
from scripts.gpu.machine import python, run_step
from scripts.gpu.passes import REPLICAS, Passes, parameters_of, scape
from scripts.gpu.timing import device_for
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel
from torchtitan_scape.methods.scape.options import ScapeOptions

MODEL, DENSITY, WIRE, SECONDS = "llama_500m", 0.05, "int4", 80.0
MARKER = "spin"  # of the kernel that separates passes
METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum", "nanoseconds": "gpu__time_duration.sum"}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1.0, "us": 1e3, "ms": 1e6, "nsecond": 1.0}
UNITS |= {"usecond": 1e3, "msecond": 1e6}
SAMPLE = """"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","Mbyte","Mbyte","us"
"0","spin_kernel(long)","0","0","1"
"1","_pack","2","1","4"
"""


def run_passes(args: argparse.Namespace) -> None:
    """Run each pass once, after a spin kernel. ncu profiles the kernels between `start` and `stop`."""
    shapes = WORKLOADS[MODEL].shapes()
    device = device_for(args.smoke)
    optimizer = scape(parameters_of(shapes, device), DENSITY, WIRE)
    step = Passes(optimizer)
    p = step.passes
    p.bind(replace(step.step, next_density=1.0))  # selects nothing
    works: dict[str, Callable[[], Any]] = {
        "finite": lambda: optimizer.guard._finite(step.gradients),
        "pack": lambda: pack_all(p),
        "squares": lambda: squares_all(p),
        "update": lambda: update_all(p),
    }
    for work in works.values():
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for work in works.values():
        torch.cuda._sleep(1000)
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    model, cost = LocalModel.of_shapes(shapes), ScapeOptions(density=DENSITY, wire=WIRE).cost()
    least = cost.pass_bytes(model, REPLICAS)
    least["pack"] += cost.carry_bytes(model)
    write(args.result, {"least": {name: least[name] for name in works}})


def rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels in ncu's CSV: name, bytes read and written, nanoseconds."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RunError(f"ncu printed no table:\n{text[-2000:]}")
    header, units, *body = csv.reader(lines[first:])
    for line in body:
        if len(line) == len(header):
            cell, unit = dict(zip(header, line, strict=True)), dict(zip(header, units, strict=True))
            counted = {k: float(cell[m].replace(",", "")) * UNITS[unit[m]] for k, m in METRICS.items()}
            yield {"kernel": cell["Kernel Name"], **counted}


def by_pass(kernels: Iterator[dict[str, Any]], passes: list[str]) -> dict[str, dict[str, float]]:
    """Return the sums of each pass, which begins with a spin."""
    found: list[dict[str, Any]] = []
    for kernel in kernels:
        if MARKER in kernel["kernel"]:
            found.append({"launches": 0, **dict.fromkeys(METRICS, 0.0)})
        elif found:
            found[-1]["launches"] += 1
            for key in METRICS:
                found[-1][key] += kernel[key]
    return dict(zip(passes, found, strict=True))


def count(args: argparse.Namespace) -> None:
    if args.smoke:
        write(args.result, {"counted": by_pass(rows(SAMPLE), ["pack"])})
        return
    program = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if program is None:
        write(args.result, {"note": "ncu is not installed"})
        return
    part = args.result.with_suffix(".part-result")
    work = [python(), "-m", "scripts.gpu.memory_traffic", "passes", f"--result={part}"]
    metrics = ["--metrics", ",".join(METRICS.values())]
    profile = [program, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", *metrics]
    output, code = ended([*profile, *work], environment(False), SECONDS)
    if code:
        raise RunError(f"ncu ended with exit code {code}:\n{output[-3000:]}")
    order = read(part)
    found = {"model": MODEL, "density": DENSITY, "wire": WIRE, "least": order["least"]}
    write(args.result, found | {"counted": by_pass(rows(output), list(order["least"]))})


WORK = {"count": count, "passes": run_passes}

if __name__ == "__main__":
    sys.exit(run_step(__doc__, lambda args: WORK[args.what](args), {"what": dict(choices=[*WORK])}))

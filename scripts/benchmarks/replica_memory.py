"""Peak memory of real replicas beyond parameters and gradients, measured on a CPU, and the prediction.

    python -m scripts.benchmarks.replica_memory --replicas 8 --base ../other-worktree

N processes with gloo hold a Llama each, and take steps with random gradients. "peak" is the high-water mark of the
resident memory of a process (VmHWM) during the steps, "held" the resident memory between two steps, both without what
the process has before the model exists and without parameters and gradients; the largest of all replicas. Persistent
memory is predicted by `PlannedRun`, in this working tree and in that of `--base`.
"""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from scripts.benchmarks.harness import Benchmark, main
from scripts.common import ROOT, markdown
from torchtitan_scape import Muon, replicate
from torchtitan_scape.core.workloads import Workload
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.planner.run import PlannedRun

MODEL = Workload("small Llama", 4, 512, 8, 8, 1408, 8192, 256, 64)
SERVE = "--serve"
STEPS = {"dense": 2, "quantized": 2, "quantized_update": 12}  # by method; the bases change after ten


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def rank_main(rank: int, replicas: int, method: str, port: int, queue: Any) -> None:
    """Measure one replica, and put (peak, held) in bytes into the queue."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=replicas)
    dist.all_reduce(torch.ones(1))
    before = resident("VmRSS")
    model = nn.ParameterDict()
    for name, shape in zip(MODEL.local(1).names, MODEL.shapes(), strict=True):
        model[name.replace(".", "/")] = nn.Parameter(torch.randn(shape) * 0.02)
    named = [(name.replace("/", "."), parameter) for name, parameter in model.items()]
    optimizer = replicate(model, Muon(named, lr=0.01), method, dist.group.WORLD, max_norm=1.0, total_steps=100)
    given = sum(2 * parameter.nbytes for _, parameter in named)
    held = peak = 0
    for step in range(STEPS[method]):
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.normal_(generator=torch.Generator().manual_seed(1000 * step + rank))
        if step == 1:  # the first step creates what it needs
            Path("/proc/self/clear_refs").write_text("5")
        optimizer.step()
        held = resident("VmRSS")
        peak = resident("VmHWM")
    queue.put((peak - before - given, held - before - given))
    dist.barrier()
    dist.destroy_process_group()


def measured(replicas: int) -> dict[str, Any]:
    """Return peak, held and predicted bytes per parameter by method, of this working tree."""
    found, context, model = {}, mp.get_context("spawn"), MODEL.local(1)
    for number, method in enumerate(STEPS):
        queue = context.SimpleQueue()
        mp.spawn(rank_main, (replicas, method, 29600 + number, queue), nprocs=replicas)
        each = [queue.get() for _ in range(replicas)]
        kinds = PlannedRun(METHODS[method].options(), "Muon").device_memory(model, replicas)
        predicted = {kind: n / model.entries for kind, n in kinds.items() if kind not in ("parameters", "gradients")}
        peak, held = (max(values) / model.entries for values in zip(*each, strict=True))
        found[method] = {"peak": peak, "held": held, "predicted": predicted}
    return found


def measure(args: Namespace, _: list[str]) -> dict[str, Any]:
    trees = {"this": ROOT} | ({"base": Path(args.base).resolve()} if args.base else {})
    answers = {}
    for name, tree in trees.items():
        command = [sys.executable, __file__, SERVE, str(args.replicas)]
        environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        answer = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
        answers[name] = json.loads(answer.stdout.splitlines()[-1])
    return {"replicas": args.replicas, "entries": MODEL.local(1).entries, "trees": answers}


def table(facts: dict[str, Any]) -> str:
    rows = []
    for tree, methods in facts["trees"].items():
        for method, one in methods.items():
            kinds = one["predicted"]
            lasting = sum(n for kind, n in kinds.items() if kind != "chunks in flight")
            row = {"working tree": tree, "method": method}
            row |= {"peak": f"{one['peak']:.2f}", "between steps": f"{one['held']:.2f}"}
            row |= {"predicted, with chunks": f"{sum(kinds.values()):.2f}", "without": f"{lasting:.2f}"}
            rows.append(row | {"predicted by kind": ", ".join(f"{kind} {n:.2f}" for kind, n in kinds.items())})
    return f"""## Memory beyond parameters and gradients, bytes per parameter

`python -m scripts.benchmarks.replica_memory`: {facts["replicas"]} replicas, {facts["entries"]:,} parameters, Muon.

{markdown(rows)}
"""


ARGUMENTS: dict[str, dict[str, Any]] = {
    "--replicas": {"type": int, "default": 8},
    "--base": {"help": "another working tree to measure as well"},
}

if __name__ == "__main__":
    if SERVE in sys.argv:
        print(json.dumps(measured(int(sys.argv[-1]))))
        sys.exit(0)
    sys.exit(
        main("scripts.benchmarks.replica_memory", __doc__, {"replica_memory": Benchmark(measure, table, ARGUMENTS)})
    )

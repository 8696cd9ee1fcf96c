"""Host time of a whole optimizer step with empty kernels, of this working tree and of another one.

    python -m scripts.benchmarks.host_time scape quantized_update --base ../other-worktree

Every step runs on a CPU as one of N replicas with the Triton kernels' host code. Launches and collectives return at
once, so that what remains is the time that a GPU's host needs to enqueue a step, and PyTorch's own operators on small
tensors. The model has as many tensors as the workload; their sizes, and those of chunks, are `SCALE` times smaller.

Each working tree runs in a process of its own, and the two alternate, because the speed of a shared machine changes.
The time of a step is the median over rounds; a method that exchanges every few steps is timed over whole periods.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.benchmarks.step_operators import OPTIONS, OneOfManyRanks, StepCounter, as_one_rank, triton_everywhere
from scripts.common import ROOT, RunError, markdown, run_command
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology import partition
from torchtitan_scape.topology.collectives import OneReplica

SCALE = 1024
_SIDE = 32  # matrices have SCALE times fewer entries
_SIZES = ("CHUNK_ENTRIES", "PAIR_BYTES", "_ROUNDING", "_MIN_ENTRIES")
_WARM_UP = 6  # steps, or periods: all tables and lists are built
SERVE = "--serve"


@contextmanager
def empty_kernels() -> Iterator[None]:
    """Replace launches and collectives by functions that return at once, and divide the sizes of chunks by SCALE."""

    def zeros(*shape: Any, memory_format: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*shape, **options)

    with ExitStack() as stack:
        stack.enter_context(as_one_rank(StepCounter()))
        stack.enter_context(triton_everywhere())
        stack.enter_context(replaced(launching, "launch", lambda *_, **__: None))
        # Results that no kernel writes must be finite.
        stack.enter_context(replaced(torch, "empty", zeros))
        for name in _SIZES:
            stack.enter_context(replaced(partition, name, max(1, getattr(partition, name) // SCALE)))
        yield


class HostSteps:
    """The steps of a method on small parameters with empty kernels; use it inside `empty_kernels`."""

    def __init__(self, method: str, workload: str, replicas: int) -> None:
        model, entry = get_workload(workload).local(1), METHODS[method]
        shapes = [[max(8, n // _SIDE // 8 * 8) for n in shape] for shape in model.shapes]
        named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in zip(model.names, shapes, strict=True)]
        ranks: Any = OneOfManyRanks(replicas)
        ranks.minimum_over_all = ranks.sum_over_owners = lambda values: values
        inner: Any
        if entry.options.holds_optimizer_state:
            inner = AdamS(named, lr=1e-2, allocate_state=False, kernels="triton")
        else:
            inner = torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2, fused=True)
        options = entry.options(**OPTIONS.get(method, {}))
        common: dict[str, Any] = {"max_norm": 1.0, "reduction": "sum", "total_steps": 100_000, "kernels": "triton"}
        self._optimizer = ReplicaOptimizer(inner, options, OneReplica(ranks), **common)
        self.period = getattr(self._optimizer.options, "inner_steps", 1)
        guard: Any = self._optimizer.guard
        guard.last_applied = lambda: True
        guard.finish_previous_step = lambda: True
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)

    def seconds(self, periods: int) -> float:
        """Take steps, and return the mean host time of one."""
        begin = time.perf_counter()
        for _ in range(periods * self.period):
            self._optimizer.step()
        return (time.perf_counter() - begin) / (periods * self.period)


def serve(workload: str, replicas: int) -> None:
    """Read requests [method, periods] from standard input, and answer each with the seconds of a step."""
    known: dict[str, HostSteps] = {}
    with empty_kernels():
        for line in sys.stdin:
            method, periods = json.loads(line)
            if method not in known:
                known[method] = HostSteps(method, workload, replicas)
                known[method].seconds(_WARM_UP)
            print(json.dumps(known[method].seconds(periods)), flush=True)


class WorkingTree:
    """A process that takes the steps of one working tree."""

    def __init__(self, root: Path, workload: str, replicas: int) -> None:
        self._root = root
        # This file, because another working tree may not have it; all that it imports is of that tree.
        command = [sys.executable, __file__, SERVE, workload, str(replicas)]
        environment = os.environ | {"PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=root, **pipes)

    def seconds(self, method: str, periods: int) -> float:
        """Return the host time of a step. Raises RunError if the process has failed."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([method, periods]), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise RunError(f"the step of {method} failed in {self._root}")
        return float(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(trees: list[WorkingTree], method: str, rounds: int, periods: int) -> list[float]:
    """Return the median host time of a step in milliseconds in each tree, which alternate."""
    times = [[tree.seconds(method, periods) for tree in trees] for _ in range(rounds)]
    return [1e3 * statistics.median(column) for column in zip(*times, strict=True)]


def run(args: argparse.Namespace) -> None:
    trees = [WorkingTree(root, args.model, args.replicas) for root in ([args.base] if args.base else []) + [ROOT]]
    rows = []
    try:
        for method in args.methods:
            *before, after = compare(trees, method, args.rounds, args.periods)
            rows.append({"method": method})
            if before:
                rows[-1] |= {"before, ms": f"{before[0]:.2f}"}
            rows[-1] |= {"after, ms" if before else "host, ms": f"{after:.2f}"}
            if before:
                rows[-1] |= {"ratio": f"{after / before[0]:.2f}"}
    finally:
        for tree in trees:
            tree.close()
    print(markdown(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        options = {
            "methods": dict(nargs="+", choices=list(METHODS), help="methods"),
            "--base": dict(type=Path, default=None, help="another working tree, whose times are those before"),
            "--model": dict(default="llama_1_8b", help="the workload whose tensors are counted"),
            "--replicas": dict(type=int, default=8, help="number of replicas"),
            "--rounds": dict(type=int, default=15, help="rounds, in each of which both working trees are timed"),
            "--periods": dict(type=int, default=4, help="steps, or periods of local steps, per round"),
        }
        sys.exit(run_command(__doc__, run, options))

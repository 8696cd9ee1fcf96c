"""What a method costs beside the network: CPU seconds of a step against dense training, in real processes.

    python -m scripts.benchmarks.method_overhead [options of the trainer]

The embedded recipe's model and batch in --replicas processes that talk over gloo, a thread each. CPU time of a whole
process, so that it counts neither who waits nor what else runs on the machine; what the collectives copy and add is in
it. Forward and backward are taken from dense runs. In all others every step gets the gradients of the first one: what
else is in a step is its own (finite check, exchange, clip, update), and data and trainer, which are the same for all.
A method whose exchanges repeat is measured over a round; radius over rounds of 16 steps, and its refreshes count as if
one came every `sync.radius.interval` steps. Overhead: what is more than with the same optimizer in dense training, in
shares of the dense step. Means over the ranks. Writes results/method_overhead/table.md and cells.json.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from scripts.common import EMBEDDED, RESULTS, command_of, guarded, markdown, ms, names, parser, read, torchrun, write
from scripts.common import versions as versions_of
from scripts.methods import parse
from torchtitan_scape.config import parsing
from torchtitan_scape.core.parameters import local
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.trainer.trainer import ScapeTrainer

METHODS = [
    *("adamw", "adams", "radius-0.4", "radius-0.1", "quantized-int8", "quantized-int4", "quantized-e2m1"),
    *("diloco-30", "diloco-30-e2m1", "streaming_diloco-100", "sparseloco-30", "sparta-3-1bit"),
    *("topk-0.01", "powersgd-4", "scape-0.1", "scape-0.047-int4"),
]
WARM_UP, REAL, LEAST = 3, 6, 24  # steps; LEAST of those that are measured
Cell = dict[str, Any]


class OverheadTrainer(ScapeTrainer):
    """The trainer; `seconds` are the CPU's of every step without forward and backward, `compute` of these.

    real: steps that have a forward and a backward pass.
    """

    def __init__(self, job_config: Any, real: int) -> None:
        super().__init__(job_config)
        self._real = real
        self.seconds: list[float] = []
        self.compute: list[float] = []

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        if len(self.compute) < self._real:
            begin = time.process_time()
            self._loss = super().forward_backward_step(**kwargs)
            self.compute.append(time.process_time() - begin)
            self._kept = [(p, p.grad, local(p.grad).clone()) for p in self.model_parts[0].parameters()]  # type: ignore[arg-type]
        else:
            for parameter, gradient, values in self._kept:
                local(gradient).copy_(values)  # type: ignore[arg-type]  # the step before used its storage up
                parameter.grad = gradient
        return self._loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        done, begin = len(self.compute), time.process_time()
        super().train_step(data_iterator)
        self.seconds.append(time.process_time() - begin - sum(self.compute[done:]))


def rounds(name: str) -> tuple[int, int]:
    """Steps after which exchanges repeat, as measured and in a run."""
    named = parse(name)
    return (named.settles, RadiusOptions().interval) if named.settles else (named.period, named.period)


def mean_of(seconds: Sequence[float], measured: int, period: int) -> float:
    """Of a step, where what is measured repeats after so many of them, and else after `period`."""
    usual = statistics.median(seconds)
    if measured == 1:
        return usual
    return usual + (statistics.fmean(seconds) - usual) * measured / period


def rank(wanted: Cell) -> None:
    """Measures all methods in this group of processes; rank 0 writes the cells."""
    cells: dict[str, Cell] = {}
    for name in wanted["methods"]:
        named, (measured, period) = parse(name), rounds(name)
        before = max(WARM_UP, named.settles)
        steps = -(-LEAST // measured) * measured
        config = parsing.parse(
            [
                f"--job.config_file={EMBEDDED}",
                f"--job.dump_folder={wanted['folder']}/{name}",
                f"--training.steps={before + steps}",
                f"--metrics.log_freq={10 * (before + steps)}",
                *("--metrics.no-enable-tensorboard", "--validation.no-enable", "--sync.consistency_interval=0"),
                "--sample.characters=0",
                *(*named.options, *named.at_once, *wanted["rest"]),
            ]
        )
        trainer = OverheadTrainer(config, REAL if name == "adamw" else 1)
        with patch("time.sleep"):
            trainer.train()
        own = {"seconds": trainer.seconds[before:], "compute": trainer.compute[1:]}
        trainer.close()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        cells[name] = {
            "usual": statistics.fmean(statistics.median(one["seconds"]) for one in ranks),
            "mean": statistics.fmean(mean_of(one["seconds"], measured, period) for one in ranks),
            "compute": statistics.fmean(statistics.median(one["compute"]) for one in ranks) if own["compute"] else None,
            "seconds": [one["seconds"] for one in ranks],
        }
    if dist.get_rank() == 0:
        write(Path(wanted["folder"], "cells.json"), cells)


def table(cells: dict[str, Cell]) -> str:
    compute, rows = cells["adamw"]["compute"], []
    for name, cell in cells.items():
        named = parse(name)
        dense = cells["adams" if "--optimizer.name=AdamS" in named.options else "adamw"]["mean"]
        row = {"method": named.label, "usual step, ms": ms(cell["usual"]), "mean, ms": ms(cell["mean"])}
        row["more than dense, ms"] = ms(cell["mean"] - dense)
        rows.append(row | {"overhead, %": f"{100 * (cell['mean'] - dense) / (compute + dense):+.1f}"})
    return markdown(rows)


def run(methods: Sequence[str], replicas: int, output: Path, rest: list[str]) -> None:
    methods = ["adamw", "adams", *(name for name in methods if name not in ("adamw", "adams"))]
    for name in methods:
        parse(name)
    with tempfile.TemporaryDirectory(prefix="method_overhead_") as folder:
        wanted = {"folder": folder, "methods": methods, "rest": rest}
        environment = {"METHOD_OVERHEAD": json.dumps(wanted), "CUDA_VISIBLE_DEVICES": ""}
        torchrun(replicas, ["-m", "scripts.benchmarks.method_overhead"], Path(folder, "log"), **environment)
        cells = read(Path(folder, "cells.json"))
    command = command_of("scripts.benchmarks.method_overhead")
    what = f"{replicas} replicas, each a process of one thread; milliseconds of CPU time a step and rank, in which"
    text = f"""# What methods cost beside the network

`{command}`: {what}
forward and backward, {ms(cells["adamw"]["compute"])} ms, are not. Mean: over a round of exchanges. Overhead: what is
more than dense, of dense training's forward, backward and step.

{table(cells)}
"""
    write(output / "cells.json", {"command": command, "versions": versions_of(), "replicas": replicas, "cells": cells})
    write(output / "table.md", text)
    print(text)


def main() -> int:
    if "METHOD_OVERHEAD" in os.environ:
        rank(json.loads(os.environ["METHOD_OVERHEAD"]))
        return 0
    own = parser(__doc__)
    own.add_argument("--methods", type=names, default=METHODS, help="as scripts/methods.py names them, with commas")
    own.add_argument("--replicas", type=int, default=4)
    own.add_argument("--output", type=Path, default=RESULTS / "method_overhead", help="cells.json, table.md")
    args, rest = own.parse_known_args()
    return guarded(lambda: run(args.methods, args.replicas, args.output, rest), "stopped; nothing is stored")


if __name__ == "__main__":
    sys.exit(main())

"""Costs of methods, `[observe]` and the consistency check, relative to a training step. Options go to the trainer.

    python -m scripts.benchmarks.overhead methods [options]    # CPU time of methods against dense training
    python -m scripts.benchmarks.overhead observe [options]    # CPU time of `[observe]`
    torchrun --nproc_per_node=2 -m scripts.benchmarks.overhead consistency --job.config_file train_configs/embedded.toml

methods: The embedded recipe in --replicas processes with one thread each, over gloo. CPU time of a process excludes
waiting and other programs, and includes what collectives copy and add. Dense runs supply the time of forward and
backward pass; all other runs reuse the gradients of their first step. The rest of a step is the method's (finite check,
exchange, clip, update) or equal for all. Means are over ranks, and over rounds of the method's exchanges.

observe: One process simulates two replicas. The default windows and histograms are spread over a run of 100,000 steps.

consistency: Any recipe, on CPU or GPU. Steps alternate with checks and with a plain read of the same memory
(torch.sum over 64-bit words, in the chunks of the check), which is a lower bound.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scripts.benchmarks.harness import QUIET, Benchmark, main, measure_in_ranks, seconds_of, train
from scripts.common import ALONE, EMBEDDED, markdown, ms, names
from scripts.study.grid import GRIDS, Grid, as_arguments
from torchtitan_scape.config.job_config import Observe
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core import consistency
from torchtitan_scape.core.parameters import local
from torchtitan_scape.core.text import size_text
from torchtitan_scape.titan.trainer import init_logger
from torchtitan_scape.trainer.trainer import ScapeTrainer

MODULE = "scripts.benchmarks.overhead"


def arguments(folder: str, steps: int, *options: str) -> list[str]:
    own = (f"--job.config_file={EMBEDDED}", f"--job.dump_folder={folder}", f"--training.steps={steps}")
    return [*own, *QUIET, "--metrics.log_freq=10000", *options]


# ------------------------------------------------------------------------------------------------- methods

METHODS = Grid(GRIDS / "network_bound.toml").methods
COMPARED = [name for name, declared in METHODS.items() if "peer" not in declared and "sync.overlap" not in declared]
REFRESH = 200  # steps between two refreshes of Radius in a long run
WARM_UP, REAL, LEAST = 3, 6, 24  # steps: warm-up; with forward and backward in dense runs; measured at least


class OverheadTrainer(ScapeTrainer):
    """Trainer that reuses gradients.

    Attributes:
        seconds: CPU time of each step without forward and backward.
        compute: CPU time of each forward and backward pass, in the first `real` steps.
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
                local(gradient).copy_(values)  # type: ignore[arg-type]  # the previous step overwrote its storage
                parameter.grad = gradient
        return self._loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        done, begin = len(self.compute), time.process_time()
        super().train_step(data_iterator)
        self.seconds.append(time.process_time() - begin - sum(self.compute[done:]))


def rounds(name: str) -> tuple[int, int]:
    """Return the steps after which a method's exchanges repeat, (as measured, in a long run)."""
    declared: dict[str, Any] = METHODS[name]
    measured = declared.get("period", declared.get("settles", 1))
    return measured, REFRESH if "settles" in declared else measured


def mean_of(seconds: Sequence[float], measured: int, period: int) -> float:
    """Return the mean of a step in rounds of `period` steps, from steps in rounds of `measured` steps."""
    usual = statistics.median(seconds)
    if measured == 1:
        return usual
    return usual + (statistics.fmean(seconds) - usual) * measured / period


def measure_rank(request: dict[str, Any]) -> dict[str, Any]:
    """Measure all methods in this group of processes; return the cells by method."""
    cells: dict[str, Any] = {}
    for name in request["methods"]:
        measured, period = rounds(name)
        before = max(WARM_UP, measured if period > measured else 0)
        options = [part for key, value in METHODS[name].items() if "." in key for part in as_arguments(key, value)]
        steps = before + -(-LEAST // measured) * measured
        options += ["--sync.consistency_interval=0", *request["rest"]]
        config = parse(arguments(f"{request['folder']}/{name}", steps, *options))
        trainer = OverheadTrainer(config, REAL if name == "adamw" else 1)
        train(trainer)
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
    return cells


def measure_methods(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    methods = list(dict.fromkeys(["adamw", "adams", *args.methods]))  # others are compared with the first two
    if unknown := set(methods) - set(COMPARED):
        raise ValueError(f"--methods {sorted(unknown)[0]}: known are {', '.join(COMPARED)}")
    with tempfile.TemporaryDirectory(prefix="overhead_") as folder:
        cells = measure_in_ranks(MODULE, args.replicas, folder, {"methods": methods, "rest": rest})
    return {"replicas": args.replicas, "cells": cells}


def method_rows(cells: dict[str, Any]) -> list[dict[str, str]]:
    compute, rows = cells["adamw"]["compute"], []
    for name, cell in cells.items():
        dense = cells["adams" if METHODS[name]["optimizer.name"] == "AdamS" else "adamw"]["mean"]
        row = {"method": METHODS[name]["label"], "usual step, ms": ms(cell["usual"]), "mean, ms": ms(cell["mean"])}
        row["more than dense, ms"] = ms(cell["mean"] - dense)
        rows.append(row | {"overhead, %": f"{100 * (cell['mean'] - dense) / (compute + dense):+.1f}"})
    return rows


def methods_table(facts: dict[str, Any]) -> str:
    return f"""## What methods cost beside the network

`{facts["command"]}`: {facts["replicas"]} replicas, each a process of one thread; milliseconds of CPU time a step and \
rank, in which
forward and backward, {ms(facts["cells"]["adamw"]["compute"])} ms, are not. Mean: over a round of exchanges. \
Overhead: what is
more than dense, of dense training's forward, backward and step.

{markdown(method_rows(facts["cells"]))}
"""


# ------------------------------------------------------------------------------------------------- observe

STEPS, WINDOW, HISTOGRAMS = 26, (6, 10), (19, 22)
LONG_RUN = 100_000  # steps of the papers' runs


def timed(seconds: dict[int, float], step: Callable[[], int], work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` with its CPU seconds added to those of the present step."""

    def call(*args: Any) -> Any:
        begin = time.process_time()
        result = work(*args)
        seconds[step()] += time.process_time() - begin
        return result

    return call


def measure_observe(_: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Return CPU seconds of the observation by kind of step (mean), and of a step without it (median)."""
    torch.set_num_threads(1)
    os.environ |= ALONE
    options = [
        *("--sync.method=dense", "--optimizer.name=AdamW", "--topology.simulate_replicas=2", "--observe.enable"),
        *(f"--observe.windows=[{list(WINDOW)}]", f"--observe.histograms={list(HISTOGRAMS)}"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = ScapeTrainer(parse(arguments(folder, STEPS, *options, *rest)))
        observation = trainer.observation
        assert observation is not None
        observing: dict[int, float] = defaultdict(float)
        steps: dict[int, float] = defaultdict(float)
        for name in ("before_step", "synchronized", "after_step"):
            setattr(observation, name, timed(observing, lambda: trainer.step, getattr(observation, name)))
        trainer.train_step = timed(steps, lambda: trainer.step, trainer.train_step)  # type: ignore[method-assign]
        train(trainer)
    within = range(WINDOW[0], sum(WINDOW))
    outside = [step for step in range(3, STEPS + 1) if step not in within and step not in HISTOGRAMS]
    found = {
        "step": statistics.median(steps[step] for step in outside),
        "outside": statistics.fmean(observing[step] for step in outside if step < STEPS),
        "first": observing[within[0]],
        "window": statistics.fmean(observing[step] for step in within[1:]),
        "histogram": statistics.fmean(observing[step] for step in HISTOGRAMS),
        "entries": sum(shard.entries for one in observation.tensors for shard in one.shards),
    }
    defaults = Observe()
    total = len(defaults.histograms) * found["histogram"] + LONG_RUN * found["outside"]
    total += sum(found["first"] + (count - 1) * found["window"] for _, count in defaults.windows)
    trainer.close()
    return {**found, "share": total / (LONG_RUN * found["step"])}


def observe_table(facts: dict[str, Any]) -> str:
    step, mean = facts["step"], facts["share"] * facts["step"]
    kinds = {
        "a step in a window": (ms(facts["window"]), f"{100 * facts['window'] / step:.2f} %"),
        "the first one of a window": (ms(facts["first"]), f"{100 * facts['first'] / step:.2f} %"),
        "a step with histograms": (ms(facts["histogram"]), f"{100 * facts['histogram'] / step:.2f} %"),
        "a step that is not looked at": (f"{1e3 * facts['outside']:.4f}", "0.00 %"),
        f"mean over {LONG_RUN:,} steps": (f"{1e3 * mean:.4f}", f"{100 * facts['share']:.4f} %"),
    }
    rows = [{"": kind, "ms": value, "of a step": share} for kind, (value, share) in kinds.items()]
    return f"""## What [observe] costs

Made by `{facts["command"]}`: a step takes {ms(step)} ms of one core; {facts["entries"]:,} of 2.2 M entries are looked \
at.

{markdown(rows)}
"""


# --------------------------------------------------------------------------------------------- consistency

CHECK_WARM_UP, CHECKS = 5, 25


class CostTrainer(ScapeTrainer):
    """Trainer that checks and reads after every step, in addition to the step."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.seconds: dict[str, list[float]] = {"step": [], "check": [], "read": []}

    def train_step(self, data_iterator: Any) -> None:
        step = seconds_of(super().train_step, data_iterator)
        if self.step > CHECK_WARM_UP:
            dist.barrier()
            self.seconds["step"].append(step)
            self.seconds["check"].append(seconds_of(self.replica_optimizer.check_consistency, self.step))
            self.seconds["read"].append(seconds_of(self.read))

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for one in self.replica_optimizer.replicated_tensors() for _, tensor in one.parts]

    def read(self) -> None:
        words = [t.detach().reshape(-1).view(torch.uint8) for t in self.tensors()]
        for chunk in (c for w in words for c in w.split(consistency._CHUNK_BYTES) if c.numel() >= 8):
            chunk = chunk[: chunk.numel() // 8 * 8]
            (chunk if chunk.storage_offset() % 8 == 0 else chunk.clone()).view(torch.int64).sum()


def measure_consistency(_: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    steps = CHECK_WARM_UP + CHECKS
    config = parse([*rest, f"--training.steps={steps}", "--validation.no-enable", f"--metrics.log_freq={steps}"])
    interval, config.sync.consistency_interval = config.sync.consistency_interval, 0
    init_logger()
    trainer = CostTrainer(config)
    train(trainer)
    median = {name: statistics.median(values) for name, values in trainer.seconds.items()}
    facts = {
        "recipe": f"{config.model.title}, {config.sync.method}, {trainer.layout.describe()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in trainer.model_parts[0].parameters()),
        "bytes_read": sum(tensor.nbytes for tensor in trainer.tensors()),
        "median_seconds": median,
        "interval": interval,
        "share_of_a_step": median["check"] / max(1, interval) / median["step"],
        "seconds": trainer.seconds,
    }
    trainer.close()
    dist.destroy_process_group()
    return facts


def consistency_table(facts: dict[str, Any]) -> str:
    median = facts["median_seconds"]
    row = {
        "read by a check": size_text(facts["bytes_read"]),
        "step, ms": f"{1e3 * median['step']:.1f}",
        "check, ms": f"{1e3 * median['check']:.2f}",
        "plain read of the same memory, ms": f"{1e3 * median['read']:.2f}",
        "interval": facts["interval"],
        "of a step, %": f"{100 * facts['share_of_a_step']:.4f}",
    }
    return f"""## What the consistency check costs

{facts["recipe"]}; {facts["device"]}, medians of {CHECKS} steps and checks in one run.

{markdown([row])}
"""


BENCHMARKS = {
    "methods": Benchmark(
        measure_methods,
        methods_table,
        takes_trainer_options=True,
        arguments={
            "--methods": dict(type=names, default=COMPARED, help="methods of grids/network_bound.toml, with commas"),
            "--replicas": dict(type=int, default=4),
        },
    ),
    "observe": Benchmark(measure_observe, observe_table, takes_trainer_options=True),
    "consistency": Benchmark(measure_consistency, consistency_table, takes_trainer_options=True),
}

if __name__ == "__main__":
    sys.exit(main(MODULE, __doc__, BENCHMARKS, measure_rank))

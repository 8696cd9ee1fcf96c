"""The quality study's queue, and what it stores of a run. quality_study.py starts it."""

import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.studies.compare_methods import scalars
from scripts.studies.quality_cells import CURVE_POINTS, ROOT, Cell, Grid, Set, as_argument, best_learning_rate
from scripts.studies.scaling_sweep import write

TRAINER = (sys.executable, "-m", "torchtitan_scape.train")
# What torchrun would set for a single process: its own imports cost as much as a short run.
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
ALONE |= {"TOKENIZERS_PARALLELISM": "false"}
LOG_LINES = 12  # shown of a failed run
POLL = 0.2  # seconds between looks at the children


# ----------------------------------------------------------------------------------------- what is stored


class Store:
    """OUTPUT/cells: one JSON a cell, found by its identity whatever the method was called when it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cells"
        self._paths = {path.stem.rpartition("-")[2]: path for path in sorted(self.folder.glob("*.json"))}
        self._contents = {key: _read(path) for key, path in self._paths.items()}

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """A finished cell. None where it has not run, failed, or cannot be read."""
        content = self._contents.get(cell.key)
        return None if content is None or "error" in content else content

    def loss(self, cell: Cell) -> float | None:
        content = self.read(cell)
        return None if content is None else content["validation_loss"]

    def keep(self, cell: Cell, content: dict[str, Any]) -> None:
        path = self._paths.setdefault(cell.key, self.folder / f"{cell.name}.json")
        self._contents[cell.key] = {**cell.head(), **content}
        write(path, self._contents[cell.key])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def result(cell: Cell, out: Path, log: str, parameters: int) -> dict[str, Any]:
    """What is stored of a run that ended well. Raises ValueError where it is not what was asked for."""
    found = re.search(r"size: ([\d,]+) total parameters", log)
    count = int(found[1].replace(",", "")) if found else parameters
    if count != parameters:
        raise ValueError(f"the model has {count} parameters, the grid says {parameters}")
    summary = json.loads((out / "summary.json").read_text())
    if summary["steps"] != cell.steps or not math.isfinite(summary["validation_loss"]):
        raise ValueError(f"ended at step {summary['steps']} with validation loss {summary['validation_loss']}")
    sent = summary["bytes_sent_per_step_and_rank"]
    tags = {"training": "loss_metrics/global_avg_loss", "validation": "validation_metrics/loss"}
    tags |= {level: f"sync/bytes_sent/{level}" for level in sent}
    curves = scalars(out, tags)
    corpus = re.search(r"digest ([0-9a-f]+)", log)
    return {
        "parameters": parameters,
        "corpus": corpus[1] if corpus else None,
        "validation_loss": summary["validation_loss"],
        "training_loss": summary["training_loss"],
        "tokens": summary["tokens"],
        "seconds_per_step": round(summary["seconds_per_step"], 6),
        "bytes_per_step": sum(sent.values()),
        "dense_bytes_per_step": summary["dense_bytes_per_step_and_rank"],
        "skipped_steps": summary["skipped_steps"],
        "validation": [[step, round(loss, 6)] for step, loss in curves["validation"]],
        "training": thin(curves["training"]),
        "bytes": cumulative([curves[level] for level in sent], cell.steps, [step for step, _ in curves["validation"]]),
    }


def thin(curve: list[tuple[int, float]], points: int = CURVE_POINTS) -> list[list[float]]:
    """At most `points` points, each the mean step and loss of neighbours; the first step stays alone."""
    rest = curve[1:]
    group = max(1, -(-len(rest) // max(1, points - 1)))
    groups = [curve[:1], *(rest[i : i + group] for i in range(0, len(rest), group))]
    means = [(sum(step for step, _ in g) / len(g), sum(loss for _, loss in g) / len(g)) for g in groups if g]
    return [[round(step, 1), round(loss, 4)] for step, loss in means]


def cumulative(levels: list[list[tuple[int, float]]], steps: int, at: list[int]) -> list[list[int]]:
    """(step, bytes that a rank has sent up to its end) at the steps `at`.

    levels: of every link level, (step, bytes a step since the point before). After the last point its rate holds.
    """
    totals = []
    for step in at:
        total = 0.0
        for curve in levels:
            before, rate = 0, 0.0
            for until, rate in curve:
                total += rate * (min(until, step) - min(before, step))
                before = until
            total += rate * max(0, step - before)
        totals.append([step, round(total)])
    return totals


def versions() -> dict[str, str]:
    names = ("torch", "torchtitan")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


# ------------------------------------------------------------------------------------------------ queue


@dataclass
class Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    begin: float
    out: Path


class Queue:
    """Runs the missing cells of `sets`, `jobs` at a time; learning rates first, other seeds where they are tuned."""

    def __init__(
        self,
        grid: Grid,
        sets: Sequence[Set],
        output: Path,
        jobs: int = 2,
        threads: int = 1,
        trainer: Sequence[str] = TRAINER,
        work: Path = ROOT / "outputs" / "quality_study",
    ) -> None:
        if jobs < 1 or threads < 1:
            raise ValueError(f"--jobs {jobs} --threads {threads}: both must be 1 or more")
        self.grid, self.sets, self.store, self.work = grid, sets, Store(output), work
        self.jobs, self.threads, self.trainer = jobs, threads, list(trainer)
        self.failed: dict[str, str] = {}
        self.running: list[Running] = []

    def tuning(self, one: Set, method: str) -> list[Cell]:
        return [self.grid.cell(one, method, rate, one.seeds[0]) for rate in one.learning_rates]

    def seeds(self, one: Set, method: str) -> list[Cell] | None:
        """The other seeds' cells; None while a learning rate has not run. Failed learning rates are passed over."""
        cells = self.tuning(one, method)
        losses = {cell.learning_rate: self.store.loss(cell) for cell in cells}
        if any(losses[cell.learning_rate] is None and cell.key not in self.failed for cell in cells):
            return None
        best = best_learning_rate(losses)
        return [] if best is None else [self.grid.cell(one, method, best, seed) for seed in one.seeds[1:]]

    def known(self) -> Iterator[Cell]:
        """Every cell that is known by now, in the order of the queue."""
        for one in self.sets:
            for method in one.methods:
                yield from self.tuning(one, method)
            for method in one.methods:
                yield from self.seeds(one, method) or []

    def missing(self) -> list[Cell]:
        """Known cells that neither ran nor failed nor run, each once."""
        taken = {*self.failed, *(one.cell.key for one in self.running)}
        found = {c.key: c for c in self.known() if c.key not in taken and self.store.read(c) is None}
        return list(found.values())

    def done(self) -> int:
        return len({cell.key for cell in self.known() if self.store.read(cell) is not None})

    def counts(self) -> tuple[int, dict[str, int]]:
        """(cells in all, tokens that are not yet trained, by set); what runs counts as not trained."""
        done, left, total = set(), dict.fromkeys((one.name for one in self.sets), 0), 0
        for one in self.sets:
            for method in one.methods:
                others = self.seeds(one, method)
                cells = [*self.tuning(one, method), *(others or [])]
                unknown = len(one.seeds) - 1 if others is None else 0
                total += unknown
                left[one.name] += unknown * one.steps * one.batch
                for cell in cells:
                    if cell.key in done:
                        continue
                    done.add(cell.key)
                    total += 1
                    if self.store.read(cell) is None and cell.key not in self.failed:
                        left[one.name] += cell.tokens
        return total, left

    def remaining(self) -> str:
        """The time that is left, from seconds a token of finished cells, of the same set where it has one."""
        _, left = self.counts()
        rates: dict[str, list[float]] = {}
        for one in self.sets:
            for cell in (c for m in one.methods for c in [*self.tuning(one, m), *(self.seeds(one, m) or [])]):
                if content := self.store.read(cell):
                    rates.setdefault(one.name, []).append(content["wall_seconds"] / cell.tokens)
        every = [rate for found in rates.values() for rate in found]
        if not every:
            return "time left unknown"
        seconds = sum(n * _mean(rates.get(name, every)) for name, n in left.items())
        now = time.monotonic()
        for run in self.running:
            seconds -= min(now - run.begin, run.cell.tokens * _mean(rates.get(run.cell.set_name, every)))
        return f"about {seconds / self.jobs / 60:.0f} min left"

    def run(self) -> int:
        """Runs all that is missing. Returns how many cells failed. Children end with it, whatever happens."""
        try:
            while True:
                for one in [one for one in self.running if one.process.poll() is not None]:
                    self.running.remove(one)
                    self.collect(one)
                if len(self.running) < self.jobs and (missing := self.missing()):
                    self.start(missing[0])
                elif not self.running:
                    return len(self.failed)
                else:
                    time.sleep(POLL)
        finally:
            self.end()

    def end(self) -> None:
        """Ends what still runs, by its process ids."""
        for one in self.running:
            one.process.terminate()
        for one in self.running:
            try:
                one.process.wait(5)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()

    def start(self, cell: Cell) -> None:
        out = self.work / cell.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        environment = os.environ | ALONE | {"OMP_NUM_THREADS": str(self.threads)}
        with open(out / "log.txt", "wb") as log:
            process = subprocess.Popen(
                [*self.trainer, *self.arguments(cell), f"--job.dump_folder={out}"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its children by their ids
            )
        self.running.append(Running(cell, process, time.monotonic(), out))

    def arguments(self, cell: Cell) -> list[str]:
        return [f"--job.config_file={self.grid.recipe}", *(as_argument(k, v) for k, v in cell.overrides.items())]

    def collect(self, one: Running) -> None:
        log = (one.out / "log.txt").read_text(errors="replace")
        seconds = time.monotonic() - one.begin
        try:
            if one.process.returncode:
                told = re.findall(r"error: (.*)", log)
                raise ValueError(f"exit code {one.process.returncode}" + (f": {told[-1]}" if told else ""))
            content = result(one.cell, one.out, log, self.grid.parameters)
        except (ValueError, OSError, KeyError, TypeError) as error:
            why = without_paths(f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))
            self.failed[one.cell.key] = why
            self.store.keep(one.cell, {"error": why})
            last = "\n".join("    " + line for line in log.splitlines()[-LOG_LINES:])
            print(f"failed: {one.cell.title}: {why}\n{last}\n    log: {one.out / 'log.txt'}", flush=True)
            return
        given = " ".join(["python -m torchtitan_scape.train", *self.arguments(one.cell)])
        content |= {"wall_seconds": round(seconds, 1), "command": without_paths(given), "versions": versions()}
        self.store.keep(one.cell, content)
        total, _ = self.counts()
        text = f"[{self.done()}/{total}] {one.cell.title}: {content['validation_loss']:.4f} in {seconds:.0f} s"
        print(f"{text}; {self.remaining()}", flush=True)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

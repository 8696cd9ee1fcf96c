"""The quality study: the loss that methods reach at several budgets, from many short runs of a small recipe.

    python -m scripts.studies.quality_study run --jobs 2  # every set of scripts/studies/quality_grid.toml
    python -m scripts.studies.quality_study run --sets 20-large,20-small
    python -m scripts.studies.quality_study list  # what there is to run, and how long it will take
    python -m scripts.studies.quality_study report  # tables and plots, from the stored cells alone

run     trains what is missing; a run that was stopped goes on where it was. Every method gets the same learning rates
        with the first seed, and the other seeds at its best one. A cell is known by the values of all its options:
        sets share cells, and a changed grid or recipe trains what is new. What the options do not show (the code, the
        versions) is stored beside the result and not compared: remove cells that a change of the code made obsolete.
        Failed runs are reported, do not stop the others, and are tried again next time.
report  writes table.md and plots beside the cells. Numbers come from the cells; the grid is not read.

Every run is one process with one thread, which plays all replicas in turn.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.common import ALONE, OUTPUTS, RESULTS, ROOT, Curve, guarded, losses, names, parser, versions, without_paths
from scripts.studies.quality_cells import CURVE_POINTS, GRID, Cell, Grid, Set, Store, as_argument
from scripts.studies.quality_report import write_report
from scripts.studies.quality_tuning import Tuning

TRAINER = (sys.executable, "-m", "torchtitan_scape.train")
ENVIRONMENT = ALONE | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LOG_LINES = 12  # shown of a failed run
POLL = 0.2  # seconds between looks at the children


# ----------------------------------------------------------------------------------------- what is stored


def result(cell: Cell, out: Path, log: str, parameters: int) -> dict[str, Any]:
    """What is stored of a run that ended well. Raises ValueError where it is not what was asked for."""
    found = re.search(r"size: ([\d,]+) total parameters", log)
    count = int(found[1].replace(",", "")) if found else parameters
    if count != parameters:
        raise ValueError(f"the model has {count} parameters, the grid says {parameters}")
    summary = json.loads((out / "summary.json").read_text())
    if summary["steps"] != cell.of.steps or not math.isfinite(summary["validation_loss"]):
        raise ValueError(f"ended at step {summary['steps']} with validation loss {summary['validation_loss']}")
    sent = summary["bytes_sent_per_step_and_rank"]
    curves = losses(out, **{level: f"sync/bytes_sent/{level}" for level in sent})
    corpora = re.findall(r"digest ([0-9a-f]+)", log)  # the last is what is trained on; ranks compare another cut of it
    validated = [step for step, _ in curves["validation"]]
    return {
        "parameters": parameters,
        "corpus": corpora[-1] if corpora else None,
        "validation_loss": summary["validation_loss"],
        "training_loss": summary["training_loss"],
        "tokens": summary["tokens"],
        "seconds_per_step": round(summary["seconds_per_step"], 6),
        "bytes_per_step": sum(sent.values()),
        "dense_bytes_per_step": summary["dense_bytes_per_step_and_rank"],
        "skipped_steps": summary["skipped_steps"],
        "validation": [[step, round(loss, 6)] for step, loss in curves["validation"]],
        "training": thin(curves["training"]),
        "bytes": cumulative([curves[level] for level in sent], validated),
    }


def thin(curve: Curve, points: int = CURVE_POINTS) -> list[list[float]]:
    """At most `points` points, each the mean step and loss of neighbours; the first step stays alone."""
    rest = curve[1:]
    size = max(1, -(-len(rest) // max(1, points - 1)))
    groups = [curve[:1], *(rest[i : i + size] for i in range(0, len(rest), size))]
    return [[round(fmean(s for s, _ in g), 1), round(fmean(loss for _, loss in g), 4)] for g in groups if g]


def cumulative(levels: Sequence[Curve], at: Sequence[int]) -> list[list[int]]:
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
        jobs: int,
        work: Path,
        trainer: Sequence[str] = TRAINER,
        shared: Sequence[Path] = (),
    ) -> None:
        if jobs < 1:
            raise ValueError(f"--jobs {jobs}: give 1 or more")
        self.grid, self.sets, self.store, self.work = grid, sets, Store(output, shared), work
        self.jobs, self.trainer = jobs, list(trainer)
        self.failed: set[str] = set()
        self.running: list[Running] = []

    # What there is to run: cells by identity, since sets share them.

    def tuning(self, one: Set, method: str) -> Tuning:
        return Tuning(self.grid, one, method, self.store.loss, self.failed)

    def seeds(self, tuning: Tuning, guess: bool) -> list[Cell]:
        """The other seeds' cells at the best learning rate; failed rates are passed over.

        While a rate has not run: none, or with `guess` as many as there will be.
        """
        best = (tuning.declared[0] if guess else None) if not tuning.done else tuning.best
        one = tuning.one
        rest = one.seeds[1:] if best else ()
        return [self.grid.cell(one, best.method, best.learning_rate, seed, best.also) for seed in rest if best]

    def cells(self, guess: bool = False) -> dict[str, Cell]:
        """Every cell that is known by now, in the order of the queue.

        Sets of one budget that follow each other are one after all: the first learning rate of all methods, the others,
        what is to be tuned further, and the other seeds.
        """
        found: list[Cell] = []
        for _, sets in itertools.groupby(self.sets, key=lambda one: (one.steps, one.batch, one.replicas)):
            tunings = [self.tuning(one, method) for one in sets for method in one.methods]
            for cells in itertools.zip_longest(*(tuning.declared for tuning in tunings)):
                found += [cell for cell in cells if cell is not None]
            found += [cell for tuning in tunings for cell in tuning.cells]
            found += [cell for tuning in tunings for cell in self.seeds(tuning, guess)]
        return {cell.key: cell for cell in found}

    def missing(self) -> list[Cell]:
        """Known cells that neither ran nor failed nor run."""
        taken = self.failed | {one.cell.key for one in self.running}
        return [cell for key, cell in self.cells().items() if key not in taken and self.store.read(cell) is None]

    def done(self) -> int:
        return sum(self.store.read(cell) is not None for cell in self.cells().values())

    def remaining(self) -> str:
        """The time that is left, from seconds a token of finished cells, of the same set where it has one."""
        cells, rates = self.cells(guess=True), dict[str, list[float]]()
        for cell in cells.values():
            if content := self.store.read(cell):
                rates.setdefault(cell.of.name, []).append(content["wall_seconds"] / cell.tokens)
        if not rates:
            return "time left unknown"
        every = [rate for found in rates.values() for rate in found]
        left = [cell for key, cell in cells.items() if key not in self.failed and self.store.read(cell) is None]
        seconds = sum(cell.tokens * fmean(rates.get(cell.of.name, every)) for cell in left)
        return f"about {seconds / self.jobs / 60:.0f} min left"

    # Running it.

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
        with open(out / "log.txt", "wb") as log:
            process = subprocess.Popen(
                [*self.trainer, *arguments(self.grid, cell), f"--job.dump_folder={out}"],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its children by their ids
            )
        self.running.append(Running(cell, process, time.monotonic(), out))

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
            self.failed.add(one.cell.key)
            self.store.keep(one.cell, {"error": why})
            last = "\n".join("    " + line for line in log.splitlines()[-LOG_LINES:])
            print(f"failed: {one.cell.title}: {why}\n{last}\n    log: {one.out / 'log.txt'}", flush=True)
            return
        given = " ".join(["python -m torchtitan_scape.train", *arguments(self.grid, one.cell)])
        content |= {"wall_seconds": round(seconds, 1), "command": without_paths(given), "versions": versions()}
        self.store.keep(one.cell, content)
        text = f"{one.cell.title}: {content['validation_loss']:.4f} in {seconds:.0f} s"
        print(f"[{self.done()}/{len(self.cells(guess=True))}] {text}; {self.remaining()}", flush=True)


def arguments(grid: Grid, cell: Cell) -> list[str]:
    """The trainer's command line."""
    return [f"--job.config_file={grid.recipe}", *(as_argument(k, v) for k, v in cell.overrides.items())]


# ---------------------------------------------------------------------------------------------- command


def run(args: argparse.Namespace, trainer: Sequence[str]) -> int:
    if args.command == "report":
        print(f"wrote {write_report(args.output)}")
        return 0
    return work_off(args, trainer, "quality_study")


def work_off(args: argparse.Namespace, trainer: Sequence[str], study: str, shared: Sequence[Path] = ()) -> int:
    """The commands run and list of a study. shared: outputs of others, whose cells it takes as they are."""
    grid, work = Grid(args.grid), args.work.resolve()
    queue = Queue(grid, grid.choose(names(args.sets)), args.output, args.jobs, work, trainer, shared)
    listed = args.command == "list"
    if listed:
        print("".join(f"{cell.title}\n" for cell in queue.missing()), end="")
    print(f"{len(queue.cells(guess=True))} cells, {queue.done()} of them done; {queue.remaining()}", flush=True)
    if listed:
        return 0
    failed = queue.run()
    print(f"{queue.done()} cells done, {failed} failed; next: python -m scripts.studies.{study} report", flush=True)
    return 1 if failed else 0


def queue_options(command: argparse.ArgumentParser, study: str) -> None:
    command.add_argument("--sets", default="", help="names, with commas between; all by default")
    command.add_argument("--jobs", type=int, default=2, help="runs at a time")
    command.add_argument("--work", type=Path, default=OUTPUTS / study, help="logs of the runs")


def main(arguments: Sequence[str] | None = None, trainer: Sequence[str] = TRAINER) -> int:
    own = parser(__doc__)
    commands = own.add_subparsers(dest="command", required=True)
    for name in ("run", "list", "report"):
        one = commands.add_parser(name)
        one.add_argument("--output", type=Path, default=RESULTS / "quality_study")
        if name != "report":
            one.add_argument("--grid", type=Path, default=GRID)
            queue_options(one, "quality_study")
    args = own.parse_args(arguments)
    return guarded(lambda: run(args, trainer))


if __name__ == "__main__":
    sys.exit(main())

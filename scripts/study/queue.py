"""The queue of a study: which runs there are, as tuning goes on, and those that are missing, resumable after a stop."""

import itertools
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.common import ROOT, RunError, versions, without_paths
from scripts.study import sittings
from scripts.study.grid import BudgetSet, Grid, Options, RunSpec
from scripts.study.launchers import ENVIRONMENT, process_command, program_of, result
from scripts.study.store import Store

LOG_LINES = 12  # printed of a failed run
POLL = 0.2  # seconds between two looks at the children


@dataclass
class _Running:
    spec: RunSpec
    process: subprocess.Popen[bytes]
    begin: float
    out: Path
    earlier: float  # seconds of earlier sittings


class Queue:
    """Run the missing runs of `sets` as processes on this host, `jobs` at a time.

    A run is identified by the values of all its options: sets share runs, and stored runs are not repeated.
    """

    def __init__(self, grid: Grid, sets: Sequence[BudgetSet], store: Store, jobs: int, work: Path) -> None:
        if jobs < 1:
            raise ValueError(f"--jobs {jobs}: give 1 or more")
        self.grid, self.sets, self.store, self.jobs, self.work = grid, sets, store, jobs, work
        self.failed: set[str] = set()
        self.stopped: set[str] = set()  # by a signal; the next command continues them
        self.running: list[_Running] = []

    def runs(self, guess: bool = False) -> dict[str, RunSpec]:
        """Return all runs that are known so far, by key, in the order of the queue.

        Consecutive sets of one budget are merged: first every method's first learning rate, then the others, then
        further runs of the tuning, then the other seeds. With `guess`, other seeds count before the tuning is done.
        """
        found: list[RunSpec] = []
        budgets = itertools.groupby(self.sets, lambda one: (one.tuned, one.steps, one.batch, one.replicas))
        for (tuned, *_), sets in budgets:
            pairs = [(one, method) for one in sets for method in one.methods]
            if not tuned:
                found += [spec for one, method in pairs for spec in self.grid.specs(one, method)]
                continue
            tunings = [(one, self.tuning(one, method)) for one, method in pairs]
            for specs in itertools.zip_longest(*(runs[: len(one.learning_rates)] for one, runs in tunings)):
                found += [spec for spec in specs if spec is not None]
            found += [spec for _, runs in tunings for spec in runs]
            found += [spec for one, runs in tunings for spec in self.other_seeds(one, runs, guess)]
        return {spec.key: spec for spec in found}

    def tuning(self, one: BudgetSet, method: str) -> list[RunSpec]:
        """Return the known runs of a method with the first seed: the set's learning rates, then at most `further` more.

        If the best rate is at an edge of the rates tried, a further run takes the next rate beyond it. Otherwise it
        takes the best rate with another value of the options that the grid declares under `also`.
        """

        def spec(rate: float | None, also: Options | None = None) -> RunSpec:
            return self.grid.spec(one, method, rate, one.seeds[0], also)

        found, others = [spec(rate) for rate in one.learning_rates], self.grid.also(method)
        most = len(found) + one.further
        while len(found) < most and not self.waits_for(found) and (best := self.best_of(found)):
            if (rate := beyond(best, found)) is not None:
                found.append(spec(rate, best.also))
            elif others:
                found.append(spec(best.learning_rate, others.pop(0)))
            else:
                break
        return found

    def waits_for(self, runs: Sequence[RunSpec]) -> bool:
        return any(self.store.loss(spec) is None and spec.key not in self.failed for spec in runs)

    def best_of(self, runs: Sequence[RunSpec]) -> RunSpec | None:
        """Return the run of the lowest finite loss so far; of equal losses the one of the lower rate."""
        losses = [(loss, spec.learning_rate, spec) for spec in runs if (loss := self.store.loss(spec)) is not None]
        finite = [found for found in losses if math.isfinite(found[0])]
        return min(finite, key=lambda found: found[:2])[-1] if finite else None

    def other_seeds(self, one: BudgetSet, runs: Sequence[RunSpec], guess: bool) -> list[RunSpec]:
        """Return the runs of the other seeds at the best rate of the tuning `runs`.

        While the tuning is not done: none, or with `guess` as many as there will be.
        """
        best = (runs[0] if guess else None) if self.waits_for(runs) else self.best_of(runs)
        if best is None:
            return []
        return [self.grid.spec(one, best.method, best.learning_rate, seed, best.also) for seed in one.seeds[1:]]

    def missing(self) -> list[RunSpec]:
        """Return the known runs that are neither stored nor running and have not failed in this process."""
        taken = self.failed | self.stopped | {one.spec.key for one in self.running}
        return [spec for key, spec in self.runs().items() if key not in taken and self.store.result(key) is None]

    def done(self) -> int:
        return sum(self.store.result(key) is not None for key in self.runs())

    def remaining(self) -> str:
        """Return the time left, from the mean seconds per step of finished runs, by set where possible."""
        specs, rates = self.runs(guess=True), dict[str, list[float]]()
        for key, spec in specs.items():
            if seconds := (self.store.result(key) or {}).get("wall_seconds"):
                rates.setdefault(spec.of.name, []).append(seconds / spec.steps)
        if not (every := [rate for found in rates.values() for rate in found]):
            return "time left unknown"
        left = [s for key, s in specs.items() if key not in self.failed and self.store.result(key) is None]
        seconds = sum(spec.steps * fmean(rates.get(spec.of.name, every)) for spec in left)
        return f"about {seconds / self.jobs / 60:.0f} min left"

    def run(self) -> None:
        """Run everything that is missing. Ends the children whatever happens."""
        try:
            while True:
                for one in [one for one in self.running if one.process.poll() is not None]:
                    self.running.remove(one)
                    self._collect(one)
                if len(self.running) < self.jobs and (spec := self._next()):
                    self._start(spec)
                elif not self.running:
                    return
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

    def _next(self) -> RunSpec | None:
        """Return the next run to start: not one that continues from the checkpoint of a running one."""
        running = [(one.spec.of, one.spec.method) for one in self.running]
        return next((s for s in self.missing() if (s.of, s.about.get("start_from")) not in running), None)

    def _start(self, spec: RunSpec) -> None:
        out = self.work / spec.name
        try:
            earlier = sittings.begin(spec, out)
            command = process_command(spec, out)
        except ValueError as error:
            self.fail(spec, str(error))
            return
        with open(out / sittings.LOG, "ab") as log:
            # In a session of its own: Ctrl-C reaches this process alone, which ends its children.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(_Running(spec, process, time.monotonic(), out, earlier))

    def _collect(self, one: _Running) -> None:
        log, code = (one.out / sittings.LOG).read_text(errors="replace"), one.process.returncode
        if sittings.stopped(code):
            self.stopped.add(one.spec.key)
            print(f"stopped: {one.spec.title}: exit code {code}; the same command continues it", flush=True)
            return
        try:
            if code:
                errors = re.findall(r"error: (.*)", log)
                raise ValueError(f"exit code {code}" + (f": {errors[-1]}" if errors else ""))
            content = result(one.spec, one.out, log, self.store.path.parent)
        except (ValueError, OSError, KeyError, TypeError) as error:
            last = "\n".join("    " + line for line in log.splitlines()[-LOG_LINES:])
            text = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            self.fail(one.spec, text, f"\n{last}\n    log: {one.out / sittings.LOG}")
        else:
            self.keep(one.spec, content, one.earlier + time.monotonic() - one.begin)
            sittings.end(one.spec, one.out)

    def run_in_turn(self, prepare: Callable[[BudgetSet], Callable[[RunSpec], dict[str, Any]]]) -> None:
        """Run everything that is missing, one run after the other.

        Args:
            prepare: Returns the function that measures a run of a set. RunError and ValueError are the run's failure.
        """
        for one in self.sets:
            measure = None
            for spec in [spec for spec in self.missing() if spec.of is one]:
                measure = measure or prepare(one)
                print(f"[{self.done() + 1}/{len(self.runs())}] {spec.title} ...", flush=True)
                begin = time.monotonic()
                try:
                    content = measure(spec)
                except (RunError, ValueError) as error:
                    self.fail(spec, str(error))
                else:
                    self.keep(spec, content, time.monotonic() - begin)

    def keep(self, spec: RunSpec, content: dict[str, Any], seconds: float) -> None:
        """Store a run's result and print it, with the progress."""
        command = without_paths(" ".join(["python -m", program_of(spec), *spec.arguments]))
        self.store.keep(spec, content | {"wall_seconds": round(seconds, 1)}, command, versions())
        if "step_seconds" in content:
            text = f"{1e3 * content['step_seconds']:.1f} ms per step"
        else:
            text = f"validation loss {content['validation_loss']:.4f}"
        print(f"[{self.done()}/{len(self.runs(guess=True))}] {spec.title}: {text}; {self.remaining()}", flush=True)

    def fail(self, spec: RunSpec, reason: str, details: str = "") -> None:
        """Store and print the reason of a failure. This process does not try the run again."""
        self.failed.add(spec.key)
        content = spec.head | {"error": without_paths(reason)}
        self.store.keep(spec, content, without_paths(" ".join(spec.arguments)), versions())
        print(f"failed: {spec.title}: {reason}{details}", flush=True)


def beyond(best: RunSpec, tried: Sequence[RunSpec]) -> float | None:
    """Return the next learning rate if `best` has the lowest or the highest of at least two rates tried; else None.

    Only rates that were tried with the same further options count.
    """
    rates = sorted({spec.learning_rate for spec in tried if spec.also == best.also and spec.learning_rate is not None})
    if len(rates) < 2 or best.learning_rate not in (rates[0], rates[-1]):
        return None
    edge, neighbor = (rates[0], rates[1]) if best.learning_rate == rates[0] else (rates[-1], rates[-2])
    return float(f"{edge * edge / neighbor:.6g}")

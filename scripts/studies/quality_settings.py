"""What the quality study's report compares: methods in settings, from the stored cells alone."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.studies.quality_cells import best_learning_rate
from scripts.studies.quality_costs import MACHINES, elapsed, method_of, shares

Cell = dict[str, Any]
Curve = list[tuple[float, float]]
BETA2 = 0.95  # of train_configs/study.toml
NEEDED = ("method", "label", "steps", "batch", "replicas", "learning_rate", "seed", "tuning_seed", "setting", "variant")


class OfRuns:
    """What the runs of a method say of it. runs: stored cells, by seed."""

    runs: dict[int, Cell]

    @property
    def first(self) -> Cell:
        """The run of the lowest seed."""
        return next(iter(self.runs.values()))

    @property
    def options(self) -> dict[str, Any]:
        return self.first["options"]

    @property
    def is_dense(self) -> bool:
        return self.options["sync.method"] == "dense"

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run["validation_loss"] for seed, run in self.runs.items()}


@dataclass
class Entry(OfRuns):
    """A method in a setting: its runs at its best learning rate, by seed, and what led to it."""

    label: str
    best: float
    tuning: dict[float, float | None]
    runs: dict[int, Cell]

    @property
    def steps(self) -> int:
        return self.first["steps"]

    @property
    def is_baseline(self) -> bool:
        """Dense AdamS as the study's recipe has it, not with another b2."""
        recipe = self.options.get("optimizer.beta2", BETA2) == BETA2
        return self.is_dense and recipe and self.options["optimizer.name"] == "AdamS"

    @property
    def density(self) -> float | None:
        """None of a method that has none."""
        declared = self.options.get(f"sync.{self.options['sync.method']}.density")
        return 1.0 if self.is_dense else None if declared is None else float(declared)

    @property
    def order(self) -> tuple[bool, float, int, str]:
        """Dense methods first, then by falling density (or what is sent), then by name."""
        return not self.is_dense, -(self.steady if self.density is None else self.density), len(self.label), self.label

    @cached_property
    def shares(self) -> tuple[float, float]:
        """Bytes a step over those of a dense exchange: at the target density, and in the mean over the run."""
        return shares(self.first)

    @property
    def steady(self) -> float:
        return self.shares[0]

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or the highest that was tried."""
        return self.best in (min(self.tuning), max(self.tuning))

    @property
    def rate(self) -> str:
        """The best learning rate, and whether it is at the edge."""
        return f"{self.best:g}" + (" (edge)" if self.at_edge else "")

    def curve(self) -> Curve:
        """(step, validation loss), the mean over the seeds."""
        curves = [run["validation"] for run in self.runs.values()]
        return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=False)]

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """By machine: predicted seconds after each number of steps. Empty for a method without a cost model."""
        if method_of(self.options, self.steps) is None:
            return {}
        return {machine: elapsed(self.options, machine, self.steps) for machine in MACHINES}


@dataclass
class Setting:
    """Runs that may be compared: one recipe, batch, number of steps and of replicas."""

    key: str
    title: str
    slug: str
    steps: int
    batch: int
    replicas: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def baseline(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.is_baseline), None)

    def spread_of_dense(self) -> float:
        """The sample standard deviation of dense AdamS's final losses, in percent of their mean; 0 for one seed."""
        losses = list(self.baseline.losses.values()) if self.baseline else []
        return 100 * statistics.stdev(losses) / statistics.mean(losses) if len(losses) > 1 else 0.0

    def gaps(self, entry: Entry) -> list[float]:
        """Final loss above dense AdamS of the same seed, in percent, by the seeds that both have."""
        dense = self.baseline.losses if self.baseline else {}
        return [100 * (loss / dense[seed] - 1) for seed, loss in entry.losses.items() if seed in dense]


def read_cells(folder: Path) -> tuple[list[Cell], list[Cell]]:
    """(finished, failed) cells. One that cannot be read is a failed one."""
    finished: list[Cell] = []
    failed: list[Cell] = []
    for path in sorted(folder.glob("*.json")):
        try:
            cell = json.loads(path.read_text())
            lacking = [key for key in NEEDED if key not in cell]
            if not lacking and "error" not in cell:
                lacking = [key for key in ("validation_loss", "validation", "bytes") if key not in cell]
        except (ValueError, TypeError) as error:
            cell, lacking = {}, [f"a readable content ({error})"]
        if lacking:
            cell = {"error": f"{path.name} lacks {', '.join(lacking)}"}
        (failed if "error" in cell else finished).append(cell)
    return finished, failed


def settings_of(finished: Sequence[Cell], failed: Sequence[Cell] = ()) -> list[Setting]:
    """The settings, small budgets first, with their methods: dense ones first, then by falling density."""
    settings: dict[str, Setting] = {}
    for cell in finished:
        steps, batch, replicas = cell["steps"], cell["batch"], cell["replicas"]
        if cell["setting"] not in settings:
            budget = steps * batch / cell["parameters"]
            title = f"{budget:.3g} tokens a parameter: {steps:,} steps x {batch:,} tokens, {replicas} replica"
            title += "s" if replicas > 1 else ""
            slug = f"{steps}x{batch}-r{replicas}"
            settings[cell["setting"]] = Setting(cell["setting"], title, slug, steps, batch, replicas)
    runs_of = {key: [cell for cell in finished if cell["setting"] == key] for key in settings}
    titled = [(one.title, runs_of[key]) for key, one in settings.items()]
    for one in settings.values():
        if others := [_shared(runs) for title, runs in titled if title == one.title and runs is not runs_of[one.key]]:
            own = {k: v for k, v in _shared(runs_of[one.key]).items() if any(o.get(k, v) != v for o in others)}
            one.title += f" ({', '.join(f'{k} = {v}' for k, v in own.items()) or f'options {one.key}'})"
            one.slug += f"-{one.key}"
        cells = runs_of[one.key]
        labels = {(cell["variant"], cell["label"]) for cell in cells}
        for variant in dict.fromkeys(cell["variant"] for cell in cells):
            runs = [cell for cell in cells if cell["variant"] == variant]
            lost = [cell for cell in failed if cell.get("setting") == one.key and cell.get("variant") == variant]
            entry = _entry(runs, lost)
            if entry is not None:
                if len({v for v, label in labels if label == entry.label}) > 1:
                    entry.label += f" ({variant})"
                one.entries.append(entry)
        one.entries.sort(key=lambda entry: entry.order)
    found = [one for one in settings.values() if one.entries]
    return sorted(found, key=lambda one: (one.steps * one.batch, -one.batch, one.replicas, one.title))


def _shared(cells: Sequence[Cell]) -> dict[str, Any]:
    """The options that have one value in all of these runs."""
    first = cells[0]["options"]
    return {key: value for key, value in first.items() if all(cell["options"].get(key) == value for cell in cells)}


def _entry(runs: Sequence[Cell], lost: Sequence[Cell]) -> Entry | None:
    """None without a run of the seed that learning rates are tuned with."""
    tuned = runs[0]["tuning_seed"]
    tuning: dict[float, float | None] = {c["learning_rate"]: None for c in lost if c["seed"] == tuned}
    tuning |= {cell["learning_rate"]: cell["validation_loss"] for cell in runs if cell["seed"] == tuned}
    best = best_learning_rate(tuning)
    if best is None:
        return None
    chosen = {cell["seed"]: cell for cell in runs if cell["learning_rate"] == best}
    return Entry(runs[0]["label"], best, dict(sorted(tuning.items())), dict(sorted(chosen.items())))


def reached(curve: Curve, target: float) -> float | None:
    """The step at which the curve falls to `target`, between its points by a straight line."""
    before: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def at(seconds: Sequence[float], step: float) -> float:
    """`seconds` at a step that need not be whole."""
    whole = min(int(step), len(seconds) - 1)
    after = seconds[min(whole + 1, len(seconds) - 1)]
    return seconds[whole] + (step - whole) * (after - seconds[whole])


def percent(share: float) -> str:
    """Three digits."""
    return f"{100 * share:.3g}"

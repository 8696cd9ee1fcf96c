"""Tables of the quality study, from its stored cells alone. quality_study.py calls it; quality_plots.py draws."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.studies.quality_cells import best_learning_rate
from scripts.studies.quality_costs import MACHINES, describe, elapsed, method_of, step_seconds
from scripts.studies.scaling_report import markdown

Cell = dict[str, Any]
Curve = list[tuple[float, float]]
MARGIN = 0.01  # above dense AdamS's final loss
NEEDED = ("method", "label", "steps", "batch", "replicas", "learning_rate", "seed", "tuning_seed", "setting", "variant")


@dataclass
class Entry:
    """A method in a setting: its runs at its best learning rate, by seed, and what led to it."""

    label: str
    best: float
    tuning: dict[float, float | None]
    runs: dict[int, Cell]
    _seconds: dict[str, list[float]] = field(default_factory=dict, repr=False)

    @property
    def options(self) -> dict[str, Any]:
        return next(iter(self.runs.values()))["options"]

    @property
    def steps(self) -> int:
        return next(iter(self.runs.values()))["steps"]

    @property
    def is_dense(self) -> bool:
        return self.options["sync.method"] == "dense"

    @property
    def is_baseline(self) -> bool:
        return self.is_dense and self.options["optimizer.name"] == "AdamS"

    @property
    def density(self) -> float:
        return 1.0 if self.is_dense else float(self.options["sync.scape.density"])

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run["validation_loss"] for seed, run in self.runs.items()}

    @property
    def sent(self) -> float:
        """Bytes a step against a dense exchange, the mean over the run."""
        return statistics.mean(run["bytes_per_step"] / (run["dense_bytes_per_step"] or 1) for run in self.runs.values())

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or the highest that was tried."""
        return self.best in (min(self.tuning), max(self.tuning))

    def curve(self) -> Curve:
        """(step, validation loss), the mean over the seeds."""
        curves = [run["validation"] for run in self.runs.values()]
        return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=False)]

    def seconds(self, machine: str) -> list[float]:
        """Predicted seconds after each number of steps."""
        if machine not in self._seconds:
            self._seconds[machine] = elapsed(self.options, machine, self.steps)
        return self._seconds[machine]


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
    titles = [one.title for one in settings.values()]
    for one in settings.values():
        if titles.count(one.title) > 1:
            one.title += f" (options {one.key})"
            one.slug += f"-{one.key}"
        cells = [cell for cell in finished if cell["setting"] == one.key]
        labels = {(cell["variant"], cell["label"]) for cell in cells}
        for variant in dict.fromkeys(cell["variant"] for cell in cells):
            runs = [cell for cell in cells if cell["variant"] == variant]
            lost = [cell for cell in failed if cell.get("setting") == one.key and cell.get("variant") == variant]
            entry = _entry(runs, lost)
            if entry is not None:
                if len({v for v, label in labels if label == entry.label}) > 1:
                    entry.label += f" ({variant})"
                one.entries.append(entry)
        one.entries.sort(key=lambda e: (not e.is_dense, -e.density, len(e.label), e.label))
    found = [one for one in settings.values() if one.entries]
    return sorted(found, key=lambda one: (one.steps * one.batch, -one.batch, one.replicas, one.title))


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


# ------------------------------------------------------------------------------------------------ tables


def spread(values: Sequence[float], form: str) -> str:
    """Mean and sample standard deviation; no deviation of a single one."""
    if not values:
        return "-"
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}"


def main_table(one: Setting) -> str:
    rows = []
    for entry in one.entries:
        gaps = one.gaps(entry)
        rows.append(
            {
                "method": entry.label,
                "best learning rate": f"{entry.best:g}" + (" (edge)" if entry.at_edge else ""),
                "final validation loss": spread(list(entry.losses.values()), ".4f"),
                "gap to dense AdamS, %": "0" if entry.is_baseline else spread(gaps, "+.2f"),
                "sent per step against dense, %": f"{100 * entry.sent:.1f}" if one.replicas != 1 else "-",
                "seeds": str(len(entry.runs)),
            }
        )
    return markdown(rows)


def tuning_table(one: Setting) -> str:
    rates = sorted({rate for entry in one.entries for rate in entry.tuning})
    rows = []
    for entry in one.entries:
        row = {"method": entry.label}
        for rate in rates:
            loss = entry.tuning.get(rate)
            text = ("failed" if rate in entry.tuning else "-") if loss is None else f"{loss:.4f}"
            row[f"{rate:g}"] = f"**{text}**" if rate == entry.best else text
        rows.append(row)
    warning = ""
    if edge := [entry.label for entry in one.entries if entry.at_edge]:
        warning = f"\n\n**The best learning rate is at the edge of the grid** for {'; '.join(edge)}: widen it."
    return markdown(rows) + warning


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


def time_table(one: Setting) -> str:
    """Predicted seconds to dense AdamS's final loss + 1 %."""
    if one.baseline is None:
        return ""
    target = (1 + MARGIN) * statistics.mean(one.baseline.losses.values())
    rows = []
    for entry in one.entries:
        step = reached(entry.curve(), target)
        row = {"method": entry.label, f"steps to {target:.4f}": "not reached" if step is None else f"{step:,.0f}"}
        for machine, (title, _) in MACHINES.items():
            last = step_seconds(machine, method_of(entry.options, entry.steps))
            row[f"{title}: last step, ms"] = f"{1e3 * last:,.0f}"
            seconds = None if step is None else at(entry.seconds(machine), step)
            row[f"{title}: s to {target:.4f}"] = "-" if seconds is None else f"{seconds:,.0f}"
        rows.append(row)
    return markdown(rows)


def replicas_table(settings: Sequence[Setting]) -> str:
    """Pairs of settings that differ in replicas alone, by method."""
    rows = []
    for few in settings:
        for many in settings:
            if (few.steps, few.batch) != (many.steps, many.batch) or few.replicas >= many.replicas:
                continue
            for entry in few.entries:
                twin = next((other for other in many.entries if other.label == entry.label), None)
                if twin is None:
                    continue
                rows.append(
                    {
                        "budget": f"{few.steps:,} steps x {few.batch:,} tokens",
                        "method": entry.label,
                        "replicas": f"{few.replicas}, {many.replicas}",
                        "final validation loss, fewer": spread(list(entry.losses.values()), ".4f"),
                        "more": spread(list(twin.losses.values()), ".4f"),
                        "gap to dense AdamS, %, fewer": spread(few.gaps(entry), "+.2f"),
                        "gap, more": spread(many.gaps(twin), "+.2f"),
                    }
                )
    return markdown(rows)


def provenance(cells: Sequence[Cell]) -> str:
    """What the cells were made with, and a warning where it is not one thing."""
    versions = {", ".join(f"{k} {v}" for k, v in sorted(cell["versions"].items())) for cell in cells}
    corpora = {str(cell["corpus"]) for cell in cells}
    parameters = {cell["parameters"] for cell in cells}
    text = (
        f"{len(cells)} runs of a model of {', '.join(f'{count:,}' for count in sorted(parameters))} parameters; "
        f"{'; '.join(sorted(versions))}; corpus digest {', '.join(sorted(corpora))}."
    )
    mixed = [name for name, found in (("versions", versions), ("corpora", corpora)) if len(found) > 1]
    return text + (f" **The runs do not share their {' and '.join(mixed)}.**" if mixed else "")


def failures(failed: Sequence[Cell]) -> str:
    rows = []
    for cell in failed:
        named = "label" in cell
        run = f"lr {cell['learning_rate']:g}, seed {cell['seed']}, {cell['steps']} x {cell['batch']}" if named else "-"
        rows.append({"method": cell["label"] if named else "-", "run": run, "error": cell["error"]})
    return markdown(rows)


def write_report(folder: Path) -> Path:
    """Writes table.md and the plots into `folder`, which holds cells/. Raises ValueError where no cell is finished."""
    from scripts.studies.quality_plots import draw

    finished, failed = read_cells(folder / "cells")
    settings = settings_of(finished, failed)
    if not settings:
        raise ValueError(f"{folder / 'cells'} has no finished cell; run scripts/studies/quality_study.py run first")
    figures = draw(folder, settings)
    parts = [
        "# Quality at several budgets",
        f"Made by `python -m scripts.studies.quality_study report`. {provenance(finished)} "
        f"Losses are in nats a token, on the "
        "same validation batches for all. Learning rates were tuned with one seed for every method, from one list, and "
        "the seeds run at the best; a seed changes the start, not the order of the data. Mean ± sample standard "
        "deviation over the seeds; gaps are paired by seed.",
        describe(),
    ]
    if "gap.png" in figures:
        parts.append("![Final gap to dense AdamS against density](gap.png)")
    for one in settings:
        parts += [f"## {one.title}", main_table(one), "Learning rates, one seed, final validation loss:"]
        parts.append(tuning_table(one))
        if times := time_table(one):
            parts += [f"Predicted seconds to dense AdamS's final loss + {100 * MARGIN:g} %:", times]
        parts += [f"![{caption}]({name})" for name, caption in figures.items() if f"-{one.slug}." in name]
    if replicas := replicas_table(settings):
        note = (
            "Every replica validates on its own part of the text, so that other numbers of replicas are validated on "
            "other text: compare the gaps, not the losses."
        )
        parts += ["## Replicas", note, replicas]
    if failed:
        parts += ["## Failed", failures(failed)]
    path = folder / "table.md"
    partial = path.with_suffix(".part")
    partial.write_text("\n\n".join(parts) + "\n")
    partial.rename(path)
    return path

"""Loss curves against a baseline, and index frequencies, from a study's runs or from dump folders of the trainer.

The first run is the baseline. Gaps are losses minus the baseline's at the same step, on the same data.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import losses, markdown, megabytes, ms, number
from scripts.plots import COLORS, figure, save
from scripts.study.grid import BudgetSet, Grid
from scripts.study.launchers import arrays_of
from scripts.study.observations import gaps, smooth
from scripts.study.store import Store
from torchtitan_scape.observe.record import Frequency, read_frequencies

MEAN_OF = 10  # logged steps
Runs = dict[str, dict[str, Any]]  # by label, the baseline first: the summary of a run, with its curves


def runs_of(grid: Grid, store: Store, one: BudgetSet) -> Runs:
    """Return the finished runs of a set that have curves, in the order of its methods."""
    specs = [spec for method in one.methods for spec in grid.specs(one, method)]
    results = {spec.label: store.result(spec.key) or {} for spec in specs}
    found = {label: result for label, result in results.items() if "curves" in result}
    return found if found and next(iter(results)) in found else {}  # gaps need the baseline


def runs_in(folders: Sequence[Path]) -> Runs:
    """Return the runs of dump folders, by name. Raises ValueError for a folder without a finished run."""
    found = Runs()
    if len({folder.name for folder in folders}) < len(folders):
        raise ValueError(f"two of the folders {', '.join(map(str, folders))} have one name; rename one")
    for folder in folders:
        try:
            summary = json.loads((folder / "summary.json").read_text())
        except (OSError, ValueError):
            raise ValueError(f"{folder}/summary.json cannot be read; give dump folders of finished runs") from None
        try:
            found[folder.name] = summary | {"curves": losses(folder)}
        except KeyError as error:
            raise ValueError(f"{error.args[0]}; train with --metrics.enable_tensorboard") from None
    return found


def loss_table(runs: Runs) -> str:
    """Return final losses, gaps, and the time of all steps at the mean step time of a run's last process."""
    rows, base = [], next(iter(runs.values()))
    for label, run in runs.items():
        gap = smooth(gaps(base["curves"], run["curves"]), MEAN_OF)
        if not gap:
            raise ValueError(f"{label} and {next(iter(runs))} logged no common step; compare runs of one log_freq")
        row = {"run": label, "steps": str(run["steps"])}
        row["training loss"] = f"{statistics.fmean(loss for _, loss in run['curves']['training'][-MEAN_OF:]):.4f}"
        at, most = max(gap[MEAN_OF - 1 :] or gap, key=lambda point: point[1])
        row["gap, last"] = "0" if run is base else f"{gap[-1][1]:+.4f}"
        row["gap, largest"] = "0" if run is base else f"{most:+.4f} at step {at}"
        validation, reference = run["validation_loss"], base["validation_loss"]
        known = None not in (validation, reference)
        row["validation loss"] = number(validation, ".4f")
        row["perplexity"] = f"{math.exp(validation):.2f}" if known else "-"
        row["perplexity gap"] = f"{math.exp(validation) - math.exp(reference):+.2f}" if known else "-"
        row["step, ms"] = ms(run["seconds_per_step"])
        row["all steps, days"] = f"{run['steps'] * run['seconds_per_step'] / 86400:.3g}"
        sent, axis = run["bytes_sent_per_step_and_rank"], run.get("shard_axis_bytes_per_step_and_rank") or {}
        row["sent per step and rank, MB"] = megabytes(sum(sent.values()) + sum(axis.values()))
        rows.append(row)
    return markdown(rows)


def draw_losses(runs: Runs, title: str, path: Path) -> None:
    """Draw training losses, their gaps to the baseline as means of 10 points, and gaps of validation losses."""
    base = next(iter(runs.values()))["curves"]
    drawn, axes = figure(1, 3, (16.0, 4.6), title)
    for i, (label, run) in enumerate(runs.items()):
        curves, style = run["curves"], {"color": COLORS[i % len(COLORS)], "linewidth": 1.2, "label": label}
        style["linestyle"] = "-" if i < len(COLORS) else "--"
        lines = [smooth(curves["training"], MEAN_OF), smooth(gaps(base, curves), MEAN_OF)]
        validated = dict(map(tuple, base["validation"]))
        lines.append([(step, loss - validated[step]) for step, loss in curves["validation"] if step in validated])
        for axis, line in zip(axes[0], lines, strict=True):
            axis.plot(*zip(*line, strict=True) if line else ([], []), **style)
    titles = ("training loss", "gap of training losses", "gap of validation losses")
    for axis, name in zip(axes[0], titles, strict=True):
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step")
    save(drawn, path, [axes[0][0]])


def frequencies_of(grid: Grid, store: Store, one: BudgetSet) -> list[Frequency]:
    """Return the index frequencies of a set with a single run; sets of several runs show losses."""
    specs = [spec for method in one.methods for spec in grid.specs(one, method)]
    line = store.lines.get(specs[0].key) if len(specs) == 1 else None
    if line is None:
        return []
    arrays = arrays_of(store.path.parent, f"{line['set']}/{line['method']}/")
    return read_frequencies(arrays)  # type: ignore[arg-type]


def frequency_table(frequencies: Sequence[Frequency]) -> str:
    """Return the share of the entries that are selected in many steps, and their share of all selections."""
    rows = []
    for one in frequencies:
        steps, entries = np.arange(one.steps + 1), one.entries
        row = {"tensor": one.tensor, "steps": f"{one.first} to {one.first + one.steps - 1}"}
        row |= {"entries": f"{entries.sum():,}", "never selected": f"{100 * entries[0] / entries.sum():.1f} %"}
        for share in (0.5, 0.9):
            often = steps >= share * one.steps
            text = f"in {100 * share:g} % of the steps"
            row[f"entries selected {text}"] = f"{100 * (entries * often).sum() / entries.sum():.2f} %"
            of_selections = (steps * entries * often).sum() / max(1, (steps * entries).sum())
            row[f"share of the selections, {text}"] = f"{100 * of_selections:.1f} %"
        rows.append(row)
    return markdown(rows)


def draw_frequencies(frequencies: Sequence[Frequency], title: str, path: Path) -> None:
    """Draw, for each window, the frequency of every index over its rank, as the Radius paper's Figure 1."""
    windows = list(dict.fromkeys((one.first, one.steps) for one in frequencies))
    drawn, axes = figure(1, len(windows), (6.4 * len(windows), 4.4), title, sharey=True)
    for axis, (first, steps) in zip(axes[0], windows, strict=True):
        for i, one in enumerate(one for one in frequencies if one.first == first):
            below = 100 * np.cumsum(one.entries[::-1]) / one.entries.sum()
            style = {"color": COLORS[i % len(COLORS)], "label": one.tensor}
            axis.step(below, np.arange(one.steps, -1, -1) / one.steps, where="pre", **style)
        axis.axvline(100 * frequencies[0].density, color="gray", linestyle="--", linewidth=1)
        axis.set(xscale="log", xlim=(0.01, 100), xlabel="indices, the most frequent first (%)")
        axis.set_title(f"steps {first} to {first + steps - 1}", fontsize=10)
    axes[0][0].set_ylabel("share of the steps in which an index is selected")
    save(drawn, path, [axes[0][0]])


def parts(grid: Grid, store: Store) -> list[str]:
    found = []
    for one in grid.sets:
        if frequencies := frequencies_of(grid, store, one):
            found += [f"## {one.name}: index frequencies", frequency_table(frequencies)]
        elif runs := runs_of(grid, store, one):
            found += [f"## {one.name}: losses", loss_table(runs)]
    return found


def draw(grid: Grid, store: Store, folder: Path) -> dict[str, str]:
    captions = {}
    for one in grid.sets:
        path = folder / f"{one.name}.png"
        if frequencies := frequencies_of(grid, store, one):
            density = 100 * frequencies[0].density
            draw_frequencies(frequencies, f"{one.name}: largest {density:g} % of the gradient", path)
            captions[path.name] = f"Index frequencies, {one.name}"
        elif runs := runs_of(grid, store, one):
            draw_losses(runs, f"{one.name}: gaps to {next(iter(runs))}", path)
            captions[path.name] = f"Losses, {one.name}"
    return captions


def compare(folders: Sequence[Path], plot: Path | None) -> None:
    """Print the losses of dump folders; the first is the baseline. Draw them into `plot` if it is given."""
    runs = runs_in(folders)
    print(loss_table(runs))
    if plot is not None:
        draw_losses(runs, f"Gaps to {next(iter(runs))}", plot)
        print(f"\nwrote {plot}")

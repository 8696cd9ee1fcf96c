"""The figures of the reports, from a study's stored lines."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.plots import COLORS, LINEAR, MARKERS, figure, gap_axis, log_above, look, save
from scripts.study import costs, curves, line_figures, observations, sweep_figures
from scripts.study.entries import Budget, Entry, best_below, budgets_of, relative
from scripts.study.grid import Grid
from scripts.study.store import Store
from torchtitan_scape.kernels.codec.formats import FORMATS

START = 0.1  # share of the steps before which losses are not drawn
BYTE_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # percent
SECOND_TICKS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1)
# Places of a label, in points from its mark, the nearest first.
PLACES = [(x * r, y * r) for r in (6, 10, 16, 24) for y in (-0.4, 0.8, -1.6) for x in (1, -1)]
KINDS = ("training", "validation")
Captions = dict[str, str]  # by file name


def loss_against_seconds(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw the gap over the predicted seconds of the run, for the first budget with the most methods."""
    found = [one for one in budgets_of(grid, store)[0] if one.dense("AdamW") and one.others]
    if not found:
        return {}
    one = max(found, key=lambda budget: len(budget.entries))
    title = f"Loss of the small model ({one.title}), predicted step time of {costs.MODEL}"
    drawn, axes = figure(2, 2, (16.4, 13.0), title)
    for axis, machine in zip(axes.flat, costs.MACHINES, strict=True):
        times = {entry.label: relative(one, entry, machine) for entry in one.entries}
        _panel(axis, one, "AdamW", one.others, lambda e, t=times: t[e.label], _families([one]))  # type: ignore[misc]
        axis.set_title(machine, fontsize=10)
        axis.set_xlabel("predicted seconds of the run over those of dense AdamW")
        _ticks(axis, SECOND_TICKS, 0.93 * min(times.values()), 1.07 * max(times.values()))
    _name_marks(drawn, list(axes.flat), [(one, "AdamW")] * len(costs.MACHINES))
    save(drawn, folder / "loss_against_seconds.png", axes.flat)
    return {"loss_against_seconds.png": "Loss against predicted seconds"}


def loss_against_bytes(grid: Grid, store: Store, folder: Path, frontier: bool = False) -> Captions:
    """Draw the gap over bytes. The frontier joins the best methods for their bytes, in budgets with coded payloads."""
    name, found = "frontier.png" if frontier else "loss_against_bytes.png", budgets_of(grid, store)[0]
    if frontier:
        found = [one for one in found if any(entry.payload_code in FORMATS for entry in one.others)]
    else:
        found = [one for one in found if one.dense("AdamW") and one.others]
    if not found:
        return {}
    base, parameters = grid.report["gaps"][0], found[0].entries[0].first["parameters"]
    drawn, axes = _panels(found, 2, 8.2, 0.6, 6.2, f"Bytes that replicas send, and the loss: {parameters:,} parameters")
    for axis, one in zip(axes.flat, found, strict=False):
        shown = [e for e in one.others if e.method not in grid.report.get("not_on_frontier", ())]
        _panel(axis, one, base, shown, lambda entry: 100 * entry.shares[0], _families(found))
        axis.set_xlabel("sent per step, masks and scales included (% of dense FP32 bytes)")
        _ticks(axis, BYTE_TICKS, 0.7 * min(100 * entry.shares[0] for entry in shown), 180)
        if frontier:
            best = [e for e in shown if best_below(one, e.shares[0], grid.report) is e]
            points = sorted((100 * e.shares[0], statistics.mean(e.gaps(one.dense(base)))) for e in best)
            axis.plot(*zip(*points, strict=True), color="#000000", linewidth=1.2, alpha=0.6, label="best for its bytes")
            axis.axhspan(-one.scatter, one.scatter, color="#000000", alpha=0.08, label="± one deviation of dense AdamS")
    _name_marks(drawn, axes.flat[: len(found)], [(one, base) for one in found])
    save(drawn, folder / name, axes.flat[: len(found)])
    return {name: "Loss against bytes"}


def _panels(
    found: Sequence[Budget], most: int, width: float, margin: float, height: float, title: str = ""
) -> tuple[Any, Any]:
    """Return a figure with a panel for each budget, at most `most` in a row, and its axes."""
    columns = min(most, len(found))
    rows = -(-len(found) // columns)
    drawn, axes = figure(rows, columns, (max(6.4, width * columns), margin + height * rows), title)
    for axis, one in itertools.zip_longest(axes.flat, found):
        if one:
            axis.set_title(one.title.replace(": ", ":\n", 1), fontsize=10)
        else:
            axis.set_axis_off()
    return drawn, axes


def _families(found: Sequence[Budget]) -> list[str]:
    return sorted({family(entry) for one in found for entry in one.others})


def family(entry: Entry) -> str:
    """Return the name that methods share which differ in the bytes that they send."""
    code = entry.payload_code
    return f"SCAPE, {code}" if code else f"{entry.label.split(',')[0].split()[0]}, {entry.optimizer}"


def _panel(
    axis: Any, one: Budget, base: str, shown: Sequence[Entry], x: Callable[[Entry], float], families: list[str]
) -> None:
    """Draw methods as marks, hollow for one seed; small dots are seeds. Dense training is a line."""
    reference, low, high = one.dense(base), 0.0, 0.0
    for entry in (entry for entry in one.entries if entry.is_dense and entry.gaps(reference)):
        gap = statistics.mean(entry.gaps(reference))
        low, high = min(low, gap), max(high, gap)
        axis.axhline(gap, color="#000000", linewidth=0.8, linestyle="-" if entry is reference else "--")
    for entry in (entry for entry in shown if entry.gaps(reference)):
        gaps, number = entry.gaps(reference), families.index(family(entry))
        low, high = min(low, *gaps), max(high, *gaps)
        style = {"color": COLORS[1 + number % (len(COLORS) - 1)], "marker": MARKERS[number % len(MARKERS)]}
        axis.plot([x(entry)] * len(gaps), gaps, ".", color=style["color"], markersize=4, alpha=0.7)
        face = "white" if len(gaps) == 1 else style["color"]
        mark = {"linestyle": "none", "markersize": 8, "markeredgewidth": 2, "markerfacecolor": face}
        axis.plot([x(entry)], [statistics.mean(gaps)], label=family(entry), gid=entry.label, **mark, **style)
    log_above(axis, LINEAR)
    gap_axis(axis, low, high)
    axis.set_ylabel(f"final validation loss above dense {base}\n(%; logarithmic above {LINEAR:g})")


def _name_marks(drawn: Any, axes: Sequence[Any], panels: Sequence[tuple[Budget, str]]) -> None:
    """Label every mark, and every dense line on the right, where the label covers no other label if possible."""
    drawn.draw_without_rendering()
    for axis, (one, base) in zip(axes, panels, strict=True):
        reference, right = one.dense(base), axis.get_xlim()[1]
        dense = [e for e in one.entries if e.is_dense and e.gaps(reference)]
        marks = [(e.label, right, statistics.mean(e.gaps(reference)), "#000000") for e in dense]
        named = [line for line in axis.get_lines() if line.get_gid()]
        marks += [(line.get_gid(), line.get_xdata()[0], line.get_ydata()[0], line.get_color()) for line in named]
        taken: list[Any] = []
        for label, x, y, color in sorted(marks, key=lambda mark: mark[2]):
            note = axis.annotate(label, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=7, color=color)
            for place in ((-3, 1), *((-90 * i, 1) for i in range(1, 5))) if x == right else PLACES:
                note.set_position(place)
                note.set_ha("left" if place[0] > 0 else "right")
                box, frame = note.get_window_extent(), axis.get_window_extent()
                fits = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
                if fits and not any(box.overlaps(other) for other in taken):
                    break
            taken.append(note.get_window_extent())


def _ticks(axis: Any, at: Sequence[float], low: float, high: float) -> None:
    axis.set(xscale="log", xlim=(low, high), xticks=[tick for tick in at if low <= tick <= high])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")


def steps(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw training and validation losses over the steps of the budget with the most tokens."""
    one = max(budgets_of(grid, store)[0], key=lambda budget: budget.steps * budget.batch)
    curves = {e.label: (e.first["training"], e.curve(), e.is_dense) for e in one.entries}
    name = f"steps-{one.steps}x{one.batch}-r{one.replicas}.png"
    _loss_curves(curves, one.title, START * one.steps, folder / name)
    return {name: "Loss against steps"}


def loss(grid: Grid, store: Store, folder: Path) -> Captions:
    runs = [line["result"] for line in store.own.values() if "curves" in line["result"]]
    curves = {run["label"]: (*(run["curves"][k] for k in KINDS), run["method"] == "dense") for run in runs}
    _loss_curves(curves, "", 0, folder / "loss.png")
    return {"loss.png": "Training and validation loss"}


def _loss_curves(curves: dict[str, tuple[Any, Any, bool]], title: str, start: float, path: Path) -> None:
    drawn, axes = figure(1, len(KINDS), (10.8, 5.0), title)
    for i, (label, (training, validation, is_dense)) in enumerate(curves.items()):
        for axis, curve, marker in ((axes[0][0], training, None), (axes[0][1], validation, MARKERS[i % len(MARKERS)])):
            points = [(step, value) for step, value in curve if step >= start]
            axis.plot(*zip(*points, strict=True), label=label, markersize=4, **look(i, is_dense) | {"marker": marker})
    for axis, name in zip(axes[0], KINDS, strict=True):
        axis.set(title=name.capitalize(), xlabel="step", ylabel=f"{name} loss (nats per token)")
    save(drawn, path, [axes[0][1]])


FIGURES: dict[str, Callable[[Grid, Store, Path], Captions]] = {
    "frontier": partial(loss_against_bytes, frontier=True),
    "loss_against_bytes": loss_against_bytes,
    "loss_against_seconds": loss_against_seconds,
    "loss_for_bytes": line_figures.loss_for_bytes,
    "sizes": line_figures.sizes,
    "steps": steps,
    "loss": loss,
    "figure_1": sweep_figures.figure_1,
    "figure_10": sweep_figures.figure_10,
    "figure_11": sweep_figures.figure_11,
    "figure_12": sweep_figures.figure_12,
    "observations": observations.draw,
    "curves": curves.draw,
}

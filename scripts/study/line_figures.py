"""Figures whose lines and marks have their names beside them, large enough for the README: gaps to dense training.

A grid declares them under [report]: `lines` has the lines by name, each with its methods and the text beside their
marks; `texts` names the training texts by dataset or its path; `published` is a JSON file of published gaps.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import ROOT
from scripts.plots import COLORS, LINEAR, figure, gap_axis, log_above, save
from scripts.study.entries import Budget, budgets_of
from scripts.study.grid import Grid
from scripts.study.store import Store

WIDTH, PANEL = 6.4, 3.9  # inches: of a figure, and the height of a panel; texts are readable at two thirds of it
NAMES, TEXTS = 11, 9.5  # points
BYTE_TICKS = (0.1, 0.3, 1, 3, 10, 30, 100)  # percent
MARKERS = "osD^vphd<>"  # shapes with an area: hollow and filled ones look different
DASHES = ("-", "--", ":", "-.")  # from the most replicas to the fewest
LINE_COLORS = (*COLORS[1:], "#8B4513", "#7B3FA0")
DENSE = "#000000"
REFERENCE = "#777777"  # of published gaps
NOTE = "error bars: range over seeds; hollow marks: one seed"
# Places of a label, in points from its mark, the nearest first.
PLACES = [(x * r, y * r) for r in (9, 14, 22, 32) for x, y in itertools.product((1, -1, 0), (1, -1, 0)) if x or y]


@dataclass
class Point:
    """A mark: its place, the gaps of its seeds in percent, and the text beside it."""

    x: float
    gaps: list[float]
    text: str = ""

    @property
    def mean(self) -> float:
        return statistics.mean(self.gaps)


@dataclass
class Label:
    """A text, and the places in data coordinates that it may stand beside, the best first."""

    text: str
    at: Sequence[tuple[float, float]]
    color: str
    size: float = NAMES


def loss_for_bytes(grid: Grid, store: Store, folder: Path) -> dict[str, str]:
    """Draw the gap over the bytes of a step, a panel for each budget and a line for each family of methods."""
    base = grid.report["gaps"][0]
    panels = [(one, lines) for one in budgets_of(grid, store)[0] if (lines := _lines(grid, one, base))]
    if not panels:
        return {}
    drawn, axes = figure(len(panels), 1, (WIDTH, 0.7 + PANEL * len(panels)), sharex=True)
    labels = []
    for axis, (one, lines) in zip(axes.flat, panels, strict=True):
        of_lines = [_draw(axis, name, points, **_style(grid, name)) for name, points in lines.items()]
        dense = Label(f"dense {base}", [(tick, 0.0) for tick in reversed(BYTE_TICKS)], DENSE)
        labels.append([*itertools.chain(*of_lines), dense])
        title = f"{_millions(one.parameters)} parameters, {one.replicas} replicas, {one.steps:,} steps, {one.text}"
        axis.set_title(title, fontsize=NAMES)
        axis.set(xscale="log", xlim=(0.08, 130))
        axis.set_xticks(BYTE_TICKS, [f"{tick:g}" for tick in BYTE_TICKS])
        _set_gaps(axis, base, [gap for points in lines.values() for point in points for gap in point.gaps])
    axes[-1][0].set_xlabel(f"bytes per step, % of dense FP32\n({NOTE})", fontsize=NAMES)
    _write_labels(drawn, axes.flat, labels)
    save(drawn, folder / "loss_for_bytes.png")
    return {"loss_for_bytes.png": "Loss against bytes"}


def sizes(grid: Grid, store: Store, folder: Path) -> dict[str, str]:
    """Draw the gap over the parameters, a panel for each text and a line for each method and number of replicas."""
    base, panels = grid.report["gaps"][0], dict[str, dict[tuple[str, int], list[Point]]]()
    for one in budgets_of(grid, store)[0]:
        for name, points in _lines(grid, one, base).items():
            line = panels.setdefault(one.text, {}).setdefault((name, one.replicas), [])
            line += [Point(one.parameters, point.gaps, point.text) for point in points]
    if not panels:
        return {}
    replicas = sorted({count for lines in panels.values() for _, count in lines}, reverse=True)
    published = (
        json.loads((ROOT / grid.report["published"]).read_text()) if "published" in grid.report else {"gaps": []}
    )
    drawn, axes = figure(len(panels), 1, (WIDTH, 0.7 + PANEL * len(panels)), sharex=True)
    labels = list[list[Label]]()
    for axis, (text, lines) in zip(axes.flat, panels.items(), strict=True):
        labels.append([])
        for (name, count), points in lines.items():
            dashes = DASHES[replicas.index(count) % len(DASHES)]
            of_line = _draw(axis, name, points, linestyle=dashes, **_style(grid, name))
            labels[-1] += of_line if count == max(n for other, n in lines if other == name) else []
        labels[-1] += [Label(f"dense {base}", [(10.0**n, 0.0) for n in (9, 8, 7, 6)], DENSE)]
        labels[-1] += _draw_published(axis, published) if published["gaps"] else []
        for count, dashes in zip(replicas, DASHES, strict=False):
            axis.plot([], [], color=DENSE, linestyle=dashes, label=f"{count} replicas")
        axis.legend(fontsize=TEXTS, loc="upper right")
        axis.set_title(text, fontsize=NAMES)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: _millions(value))
        gaps = [gap for points in lines.values() for point in points for gap in point.gaps]
        _set_gaps(axis, base, gaps + [point["gap"] for point in published["gaps"]])
    axes[-1][0].set_xlabel(f"parameters\n({NOTE})", fontsize=NAMES)
    _write_labels(drawn, axes.flat, labels)
    save(drawn, folder / "sizes.png")
    return {"sizes.png": "Loss against the size of the model"}


def _lines(grid: Grid, one: Budget, base: str) -> dict[str, list[Point]]:
    """Return the points of the grid's lines in a budget, over bytes in percent; lines without points are left out."""
    reference, entries = one.dense(base), {entry.method: entry for entry in one.entries}
    found: dict[str, list[Point]] = {}
    for name, methods in grid.report.get("lines", {}).items():
        for method, text in methods.items():
            if method not in grid.methods:
                raise ValueError(f"[report.lines] {name}: there is no method {method!r}")
            if (entry := entries.get(method)) and (gaps := entry.gaps(reference)):
                found.setdefault(name, []).append(Point(100 * entry.shares[0], gaps, text))
    return found


def _style(grid: Grid, name: str) -> dict[str, str]:
    """Return color and marker of a line, the same in all panels."""
    number = list(grid.report["lines"]).index(name)
    return {"color": LINE_COLORS[number % len(LINE_COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def _millions(count: float) -> str:
    value, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _draw(axis: Any, name: str, points: list[Point], color: str, marker: str, linestyle: str = "-") -> list[Label]:
    """Draw a line with error bars over the seeds, hollow marks for one seed, and return its labels."""
    points = sorted(points, key=lambda point: point.x)
    places = [(point.x, point.mean) for point in points]
    bars = [[p.mean - min(p.gaps) for p in points], [max(p.gaps) - p.mean for p in points]]
    axis.errorbar(*zip(*places, strict=True), yerr=bars, color=color, linestyle=linestyle, linewidth=1.8, capsize=4)
    for place, point in zip(places, points, strict=True):
        face = "white" if len(point.gaps) == 1 else color
        axis.plot(*place, color=color, marker=marker, markersize=8, markeredgewidth=2, markerfacecolor=face)
    texts = [Label(p.text, [place], color, TEXTS) for place, p in zip(places, points, strict=True) if p.text]
    middles = [(math.sqrt(a * b), (y + z) / 2) for (a, y), (b, z) in itertools.pairwise(places)]
    return [*texts, Label(name, [*reversed(places), *middles], color)]


def _draw_published(axis: Any, published: dict[str, Any]) -> list[Label]:
    """Draw gaps that others have published, in grey."""
    places = [(point["parameters"], point["gap"]) for point in published["gaps"]]
    axis.plot(*zip(*places, strict=True), color=REFERENCE, marker="o", markersize=6, linewidth=1.2)
    return [Label(published["label"], [places[len(places) // 2]], REFERENCE, TEXTS)]


def _set_gaps(axis: Any, base: str, gaps: Iterable[float]) -> None:
    """Set the axis of the gaps, and draw dense training at 0."""
    found = [0.0, *gaps]
    low, high = min(found), max(found)
    if high > 2 * LINEAR:
        log_above(axis, LINEAR)
        low -= 0.5  # space for labels, also above
    gap_axis(axis, low, 1.1 * high)
    axis.axhline(0.0, color=DENSE, linewidth=1)
    axis.set_ylabel(f"final loss above dense {base}, %", fontsize=NAMES)
    axis.tick_params(labelsize=TEXTS)


def _write_labels(drawn: Any, axes: Iterable[Any], labels: Iterable[list[Label]]) -> None:
    """Write the labels of each axis where they cover least, far from lines of other colors and near their own."""
    drawn.draw_without_rendering()
    for axis, of_axis in zip(axes, labels, strict=True):
        ink, frame, legend = _ink(axis), axis.get_window_extent(), axis.get_legend()
        taken = [legend.get_window_extent()] if legend else []
        for label in sorted(of_axis, key=lambda label: len(label.at)):
            weight = "bold" if label.size == NAMES else "normal"
            style = {"fontsize": label.size, "fontweight": weight, "color": label.color}
            note = axis.annotate(label.text, label.at[0], xytext=(0, 0), textcoords="offset points", **style)
            costs = dict[tuple[Any, Any], float]()
            for at, place in itertools.product(label.at, PLACES):
                _move(note, at, place)
                box = note.get_window_extent()
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
                overlaps = outside + sum(map(box.padded(3).overlaps, taken))
                covered = sum(_count(points, box, 2) for points in ink.values())
                others = (points for color, points in ink.items() if color not in (DENSE, label.color))
                near = sum(_count(points, box, 9) for points in others)
                costs[at, place] = 1000 * overlaps + 2 * covered + 0.5 * near + 0.5 * max(map(abs, place))
            _move(note, *min(costs, key=costs.__getitem__))
            taken.append(note.get_window_extent())


def _move(note: Any, at: tuple[float, float], place: tuple[float, float]) -> None:
    note.xy = at
    note.set_position(place)
    note.set_ha({1: "left", 0: "center", -1: "right"}[np.sign(place[0])])
    note.set_va({1: "bottom", 0: "center", -1: "top"}[np.sign(place[1])])


def _count(points: Any, box: Any, margin: float) -> int:
    """Return the number of points within `margin` pixels of a box."""
    inside = (points > (box.x0 - margin, box.y0 - margin)) & (points < (box.x1 + margin, box.y1 + margin))
    return int(inside.all(axis=1).sum())


def _ink(axis: Any) -> dict[str, Any]:
    """Return points 4 pixels apart on lines, error bars and markers of an axis by color, in pixels, (points, 2)."""
    from matplotlib.colors import to_hex

    lines = [line for line in axis.get_lines() if len(line.get_xydata())]
    paths = [(line.get_color(), line.get_transform().transform(line.get_xydata())) for line in lines]
    for bars in axis.collections:
        paths += [(to_hex(bars.get_color()[0]), axis.transData.transform(one)) for one in bars.get_segments()]
    found = dict[str, list[Any]]()
    for color, path in paths:
        parts = [np.linspace(a, b, 2 + int(np.hypot(*(b - a)) / 4)) for a, b in itertools.pairwise(path)]
        marks = [path + shift for shift in itertools.product((-6, 0, 6), repeat=2)]
        found.setdefault(to_hex(color).upper(), []).extend([*parts, *marks])
    return {color: np.concatenate(parts) for color, parts in found.items()}

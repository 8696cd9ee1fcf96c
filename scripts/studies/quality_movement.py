"""The table and the plots of quality_mechanism.py, from its stored cells."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.common import markdown, write
from scripts.plots import look, save, subplots
from scripts.studies.quality_probe import SHORT, Row

RULES = ("AdamS, dense", "the paper's rule", "one wait a tensor, moment kept", "the default rule")
FEW = 30  # visits, of which the mean displacement is not drawn
Points = list[tuple[float, float]]


def rule(cell: Row) -> int:
    """Which of RULES: the order, and the look in plots."""
    options = cell["options"]
    if options["sync.method"] == "dense":
        return 0
    if not options.get("sync.scape.wait_scaling", True):
        return 1
    return 2 if options.get("sync.scape.wait_by") == "tensor" else 3


def density(cell: Row) -> float:
    return float(cell["options"]["sync.scape.density"]) if rule(cell) else 1.0


def net(cell: Row) -> dict[int, float]:
    """Mean net displacement of an entry by window in steps."""
    return {int(window): value for window, value in cell["figures"]["net"].items()}


def between(moved: dict[int, float], window: float) -> float:
    """Displacement over so many steps, along power laws between the windows that are known."""
    return float(np.exp(np.interp(math.log(window), np.log(list(moved)), np.log(list(moved.values())))))


def curves(cell: Row, dense: Row) -> dict[str, Points]:
    """What the plots show of a cell."""
    moved = net(cell)
    found: dict[str, Points] = {
        "visits": list(moved.items()),
        "distances": [(window, far / net(dense)[window]) for window, far in moved.items()],
    }
    if rule(cell):
        bins = cell["figures"]["visits"]
        counts = list(itertools.accumulate(count for _, _, count, _ in bins))
        found["shares"] = [(high, count / counts[-1]) for (_, high, _, _), count in zip(bins, counts, strict=True)]
        found["visits"] = [(math.sqrt(low * high), far) for low, high, count, far in bins if count >= FEW]
        found |= cell["figures"]["curves"]
    return found


# By file: caption, and of every row of panels the curves, the axes' labels, and the vertical scale.
PLOTS = {
    "movement.png": (
        "Waits, how far a visit moves an entry, and how far entries get, beside dense AdamS over as many steps",
        [
            ("shares", "wait (steps)", "share of the visits\nwith this wait or a shorter one", "linear"),
            ("visits", "wait before the visit; window of dense AdamS (steps)", "net displacement (lr)", "log"),
            ("distances", "window (steps)", "net displacement of all entries (lr)\n/ dense AdamS's", "log"),
        ],
    ),
    "time.png": (
        "Residuals, and the mask in use against the best one",
        [
            ("residual", "step", "residual norm", "linear"),
            ("overlap_used", "step", "share of the mask\nthat is in the best one", "linear"),
        ],
    ),
}


def draw(folder: Path, cells: Sequence[Row], dense: Row) -> None:
    """A column a density, a colour a rule, dense AdamS dashed."""
    densities = sorted({density(cell) for cell in cells if rule(cell)}, reverse=True)
    for file, (_, rows) in PLOTS.items():
        figure, axes = subplots([f"density {d:g}" for d in densities], len(rows), 0.6 + 3 * len(rows), [1] * len(rows))
        for line, (name, x, y, scale) in zip(axes, rows, strict=True):
            for axis, value in zip(line, densities, strict=True):
                for cell in [dense, *(cell for cell in cells if rule(cell) and density(cell) == value)]:
                    i, points = rule(cell), curves(cell, dense).get(name)
                    if points:
                        style = look(i, dense=not i) | ({"marker": ""} if x == "step" else {})
                        axis.plot(*zip(*points, strict=True), label=RULES[i], markersize=4, linewidth=1.4, **style)
                axis.set(xlabel=x, xscale="linear" if x == "step" else "log", yscale=scale)
                axis.grid(alpha=0.3)
                for one in (axis.xaxis, axis.yaxis):
                    one.set_major_formatter(lambda value, _: f"{value:g}")
                if scale == "linear":
                    axis.set_ylim(bottom=0)
            line[0].set_ylabel(y)
        save(figure, folder / file, axes.flat)


ROWS = (
    ("learning rate", "learning_rate", "g"),
    ("final validation loss", "validation_loss", ".4f"),
    ("wait at entry, 10 / 50 / 90 % quantile (steps)", "quantiles", ""),
    ("wait at entry, mean (steps)", "wait", ".1f"),
    ("factor on the step, mean", "factor", ".1f"),
    ("correlation of log factor and log wait", "correlation", ".2f"),
    ("displacement in a visit / dense AdamS's over the wait (lr)", "visit", ".2f"),
    ("entries that never enter", "never", ".1%"),
    (f"waits of up to {SHORT} steps, share of those that enter", "short", ".1%"),
    ("of these, in the direction of their entry before", "same_sign", ".1%"),
    ("new slots, share of the mask", "new_slots", ".1%"),
    ("new slots, share of the squared update", "new_norm", ".1%"),
    ("path / dense AdamS's (lr)", "net_1", ".2f"),
    ("net displacement over 10 steps / dense AdamS's (lr)", "net_10", ".2f"),
    ("net displacement over 200 steps / dense AdamS's (lr)", "net_200", ".2f"),
    ("the same with the learning rates", "far", ".2f"),
    ("net displacement over 50 steps / path", "straight", ".2f"),
    ("residual norm", "residual", ".2f"),
    ("share of the mask that is in the best one, when selected", "overlap_selected", ".1%"),
    ("share of the mask that is in the best one, in use", "overlap_used", ".1%"),
)


def derived(cell: Row, dense: Row) -> Row:
    """What the table shows of a cell."""
    figures, moved, shown = cell["figures"], net(cell), curves(cell, dense)
    found = {key: cell[key] for key in ("learning_rate", "validation_loss")} | figures.get("means", {})
    found |= {f"net_{window}": ratio for window, ratio in shown["distances"]}
    if 200 in moved:
        found["far"] = found["net_200"] * cell["learning_rate"] / dense["learning_rate"]
        found["straight"] = moved[50] / (50 * moved[1])
    if rule(cell):
        known = [(math.sqrt(low * high), n, far) for low, high, n, far in figures["visits"] if high <= max(net(dense))]
        alike = sum(n * between(net(dense), wait) for wait, n, _ in known)
        found["visit"] = sum(n * far for _, n, far in known) / alike
        found["quantiles"] = " / ".join(map(str, found["quantiles"]))
    return found


def report(folder: Path, about: str) -> None:
    """Writes table.md, which `about` explains, and the plots beside it.

    Raises ValueError where cells of dense AdamS or of SCAPE lack, or a method has two.
    """
    cells = [json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))]
    cells.sort(key=lambda cell: (-density(cell), rule(cell)))
    if not cells or rule(cells[0]) or not rule(cells[-1]):
        raise ValueError(f"{folder / 'cells'} lacks dense AdamS or SCAPE; first run quality_mechanism run")
    if len({cell["label"] for cell in cells}) < len(cells):
        raise ValueError(f"{folder / 'cells'} has two runs of a method; remove the one that is obsolete")
    dense = cells[0]
    draw(folder, cells, dense)
    values = {cell["label"]: derived(cell, dense) for cell in cells}
    rows = []
    for name, key, form in ROWS:
        pairs = [(label, found.get(key)) for label, found in values.items()]
        rows.append({"": name} | {label: "-" if v is None else format(v, form) for label, v in pairs})
    run = f"{dense['steps']} steps of {dense['batch']:,} tokens, {dense['replicas']} simulated replicas"
    parts = [
        "# How updates move entries",
        f"Made by `python -m scripts.studies.quality_mechanism report`: {run}, seed {dense['seed']}, "
        f"the recipe of the quality study; {dense['figures']['entries']:,} sparsified entries.",
        about,
        markdown(rows),
        *(f"![{caption}]({name})\n\n{caption}." for name, (caption, _) in PLOTS.items()),
    ]
    write(folder / "table.md", "\n\n".join(parts) + "\n")

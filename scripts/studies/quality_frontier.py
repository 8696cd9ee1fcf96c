"""Loss for bytes: the best setting that the quality study found for every share of the dense bytes.

A page with a figure, from the stored cells alone. quality_report.py calls `write_frontier`.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels.codec.formats import FORMATS
from scripts.common import markdown, spread, write
from scripts.plots import COLOURS, MARKERS, figure, log_above, save
from scripts.studies.quality_cells import as_stored
from scripts.studies.quality_costs import counted_shares
from scripts.studies.quality_settings import Entry, Setting, percent

PAGE, FIGURE = "frontier.md", "frontier.png"
BUDGETS = (0.003, 0.005, 0.012, 0.025, 0.05, 0.12)  # shares of the dense bytes
(WIRE,) = as_stored({"sync.scape.wire": ""})
(STALENESS,) = as_stored({"sync.scape.staleness_scaling": ""})
# Options that methods of one rule may differ in.
APART = (WIRE, *(f"sync.scape.{name}" for name in ("density", "density_warmup_steps", "block_size", "chunk_bytes")))
LINEAR = 5.0  # percent; the gap's axis is logarithmic above
TICKS = (-20, -15, *range(-10, 6), 7, 10, 15, 20, 30, 40, 60, 100)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
PURPOSE = """\
Replicas that train one model on several nodes must agree on every step, and what they send for it is what limits them.
Dense training sends all gradients in FP32. SCAPE sends a few entries of each block of the moments, chosen anew in
every step, in a few bits each, and keeps what it did not send for later steps. This page says what that costs in loss,
for every share of the dense bytes."""
READING = """\
Bytes: what a replica sends in a step at the target density, masks and scales included, over dense FP32 gradients (a
ring all-reduce); "whole run" includes the dense first step and the density warm-up. Gap: final validation loss above
that of dense AdamS with the recipe's b2 = 0.95, paired by seed, mean ± sample standard deviation; each method at its
best learning rate, and (edge) where that is the lowest or the highest that was tried. Small dots are seeds, a hollow
mark is one seed alone, which may be a percent off. The line joins what is best for its bytes, by the gap plus its
standard error. Dense methods that are tuned further (AdamW, another b2) stand at 100 %, below 0: to match dense AdamS
is not to match the best that dense training can do."""


@dataclass
class Point:
    """A method in a setting: `family` is what it shares with those that differ in what they send alone."""

    entry: Entry
    family: str
    gaps: list[float]

    @property
    def gap(self) -> float:
        return statistics.mean(self.gaps)

    @property
    def name(self) -> str:
        """How much it sends, beside its mark."""
        rank, block = self.option("rank"), self.option("block_size")
        text = f"rank {rank}" if rank else f"{self.entry.density or 0:.2g}"
        return text if block in (None, 1024) else f"{text} of {block}"

    def option(self, name: str) -> Any:
        return self.entry.options.get(f"sync.{self.entry.options['sync.method']}.{name}")


@dataclass
class Frontier:
    """The methods of a setting by what they send."""

    setting: Setting

    @cached_property
    def points(self) -> list[Point]:
        """Those that share seeds with dense AdamS, the least bytes first. Variants of the rule are left out."""
        rules = [rule(entry) for entry in self.setting.entries if is_coded(entry)]
        entries = [(family(entry, rules), entry, self.setting.gaps(entry)) for entry in self.setting.entries]
        found = [Point(entry, name, gaps) for name, entry, gaps in entries if name and gaps]
        return sorted(found, key=lambda point: (point.entry.steady, point.gap))

    @property
    def sparse(self) -> list[Point]:
        return [point for point in self.points if not point.entry.is_dense]

    def best(self, budget: float) -> Point | None:
        """The best of what sends at most `budget`, a share of the dense bytes.

        By the gap and its standard error, dense AdamS's scatter taken for all: one lucky seed is no best setting.
        """
        scatter = self.setting.spread_of_dense()
        fits = (point for point in self.sparse if point.entry.steady <= budget)
        return min(fits, key=lambda point: point.gap + scatter / math.sqrt(len(point.gaps)), default=None)

    @cached_property
    def line(self) -> list[Point]:
        """Those that are best for their bytes."""
        return [point for point in self.sparse if self.best(point.entry.steady) is point]


def is_coded(entry: Entry) -> bool:
    return entry.options.get(WIRE) in FORMATS


def rule(entry: Entry) -> dict[str, Any]:
    return {k: v for k, v in entry.options.items() if k.startswith("sync.") and k not in APART}


def family(entry: Entry, rules: Sequence[dict[str, Any]]) -> str | None:
    """None for a variant of SCAPE that is neither coded, nor of a rule that is coded elsewhere, nor the paper's."""
    wire = entry.options.get(WIRE)
    if entry.is_dense:
        return entry.label
    if wire is None:
        return f"{entry.label.replace(',', ' ').split()[0]}, {entry.options['optimizer.name']}"
    if not entry.options[STALENESS]:
        return "SCAPE, the paper's rule" if entry.options["sync.scape.selection"] == "tensor" else None
    known = is_coded(entry) or rule(entry) in rules
    return {"float32": "SCAPE, FP32", "bfloat16": "SCAPE, BF16"}.get(wire, f"SCAPE, {wire}") if known else None


def main_table(one: Frontier) -> str:
    rows = []
    for point in reversed(one.points):
        entry, by_tensor = point.entry, point.option("selection") == "tensor"
        rows.append(
            {
                "method": entry.label + (" *" if point in one.line else ""),
                "bytes, % of dense: steady": percent(point.entry.steady),
                "whole run": percent(entry.shares[1]),
                "density": "-" if entry.density is None else f"{entry.density:.4g}",
                "block": "-" if entry.is_dense else "tensor" if by_tensor else point.option("block_size") or "-",
                "wire": entry.options.get(WIRE, "float32"),
                "learning rate": entry.rate,
                "seeds": ", ".join(map(str, entry.losses)),
                "final validation losses": ", ".join(f"{loss:.4f}" for loss in entry.losses.values()),
                "gap to dense AdamS, %": "0" if entry.is_baseline else spread(point.gaps, "+.2f"),
            }
        )
    return markdown(rows)


def budget_table(one: Frontier) -> str:
    rows: list[dict[str, str]] = []
    dense = min((p for p in one.points if p.entry.is_dense), key=lambda point: point.gap).entry
    for budget in BUDGETS:
        if point := one.best(budget):
            losses = point.entry.losses
            over = [100 * (loss / dense.losses[seed] - 1) for seed, loss in losses.items() if seed in dense.losses]
            rows.append(
                {
                    "at most, % of dense": percent(budget),
                    "best setting found": point.entry.label,
                    "seeds": str(len(point.gaps)),
                    "steady, %": percent(point.entry.steady),
                    "whole run, %": percent(point.entry.shares[1]),
                    "gap to dense AdamS, %": spread(point.gaps, "+.2f"),
                    f"to {dense.label}, at {dense.rate}, %": spread(over, "+.2f"),
                }
            )
    return markdown(rows)


def counted(frontiers: Sequence[Frontier]) -> str:
    """How the bytes were told, and how far the closed form is from what coded runs counted."""
    entries = [point.entry for one in frontiers for point in one.sparse if is_coded(point.entry)]
    worst = max(abs(entry.steady / counted_shares(entry.first)[0] - 1) for entry in entries)
    return (
        "Made by `python -m scripts.studies.quality_study report`. What is selected in blocks is counted by the "
        "planner's closed form, as some runs are older than the masks' code; what coded ones counted is within "
        f"{100 * worst:.1f} % of it. A model of {entries[0].first['parameters']:,} parameters, simulated replicas."
    )


def draw(frontiers: Sequence[Frontier], path: Path) -> None:
    columns = min(2, len(frontiers))
    rows = -(-len(frontiers) // columns)
    drawn, grid = figure(rows, columns, (7.6 * columns, 1.0 + 5.4 * rows))
    axes, size = list(grid.flat), frontiers[0].points[0].entry.first["parameters"]
    drawn.suptitle(f"What replicas send, and what it costs in loss: SCAPE and others, {size:,} parameters")
    points = [point for one in frontiers for point in one.points if not point.entry.is_baseline]
    ordered = sorted((p.entry.is_dense, not p.family.startswith("SCAPE"), p.family) for p in points)
    families = list(dict.fromkeys(name for *_, name in ordered))

    def style(point: Point) -> dict[str, Any]:
        i = families.index(point.family)
        mark = "_" if point.entry.is_dense else MARKERS[i % len(MARKERS)]
        return {"color": COLOURS[1 + i % (len(COLOURS) - 1)], "marker": mark}

    for axis, one in zip(axes, frontiers, strict=False):
        panel(axis, one, style)
    for axis in axes[len(frontiers) :]:
        axis.set_axis_off()
    save(drawn, path, axes[: len(frontiers)])


def panel(axis: Any, one: Frontier, style: Callable[[Point], dict[str, Any]]) -> None:
    width = one.setting.spread_of_dense()
    axis.axhspan(-width, width, color="#000000", alpha=0.08, label="AdamS, dense: ± one deviation of its seeds")
    axis.axhline(0, color="#000000", linestyle="--", linewidth=1, label="AdamS, dense")
    line = [(100 * point.entry.steady, point.gap) for point in one.line]
    axis.plot(*zip(*line, strict=True), color="#000000", linewidth=1.2, alpha=0.6, label="best for its bytes")
    named = set[tuple[str, str]]()
    for point in one.points:
        x = 100 * point.entry.steady
        if point.entry.is_baseline:
            axis.plot([x], [0], "o", color="#000000", markersize=6)
            continue
        look = style(point) | {"linestyle": "none", "markeredgewidth": 2}
        look |= {"markerfacecolor": "white"} if len(point.gaps) == 1 else {}
        axis.plot([x] * len(point.gaps), point.gaps, ".", color=look["color"], markersize=4, alpha=0.7)
        axis.plot([x], [point.gap], label=point.family, markersize=16 if point.entry.is_dense else 8, **look)
        if point.entry.is_dense or (point.family, point.name) in named:
            continue
        named.add((point.family, point.name))
        below = point in one.line
        place: dict[str, Any] = {"xytext": (-5, -6) if below else (5, 6), "ha": "right" if below else "left"}
        place |= {"va": "top" if below else "bottom", "textcoords": "offset points", "fontsize": 8}
        axis.annotate(point.name, (x, point.gap), color=look["color"], **place)
    found = [gap for point in one.points for gap in point.gaps]
    low, high = min(0.0, *found) - 1, max(0.0, *found)
    log_above(axis, LINEAR)
    axis.set_ylim(low, high + 1 if high < LINEAR else 1.3 * high)
    axis.set_yticks([tick for tick in TICKS if low <= tick <= axis.get_ylim()[1]])
    axis.yaxis.set_major_formatter("{x:+.0f}")
    left = min(0.2, 55 * one.points[0].entry.steady)
    axis.set_xscale("log")
    axis.set_xlim(left, 180)
    axis.set_xticks([tick for tick in SHARES if tick >= left])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_title(one.setting.title.replace(": ", ":\n", 1), fontsize=10)
    axis.set_xlabel("sent per step, masks and scales included (% of dense FP32 bytes)")
    axis.set_ylabel(f"final validation loss above dense AdamS\n(%; logarithmic above {LINEAR:g})")
    axis.grid(alpha=0.3)


def write_frontier(folder: Path, settings: Sequence[Setting]) -> bool:
    """Writes frontier.md and frontier.png of the settings with coded runs; False where there are none."""
    frontiers = [one for one in map(Frontier, settings) if any(is_coded(point.entry) for point in one.points)]
    for name in (PAGE, FIGURE):
        (folder / name).unlink(missing_ok=True)
    if not frontiers:
        return False
    draw(frontiers, folder / FIGURE)
    parts = ["# Loss for bytes", PURPOSE, f"![Loss against bytes]({FIGURE})", READING, counted(frontiers)]
    for one in frontiers:
        parts += [f"## {one.setting.title}", budget_table(one), "All settings (* lies on the line):", main_table(one)]
    write(folder / PAGE, "\n\n".join(parts) + "\n")
    return True

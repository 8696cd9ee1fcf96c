"""Figures of runs on several ranks, of the kinds of Figures 1, 10, 11 and 12 of the SCAPE paper (arXiv:2607.01678).

On Vista, the paper's machine, its values are drawn beside those of this project, and marked as the paper's. They are
those that its text states; its figures have more, without numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common import markdown, number
from scripts.plots import figure, look, save
from scripts.study.grid import Grid
from scripts.study.store import Store
from scripts.study.sweep_tables import PHASES, Cell, Row, cells_by_recipe, section

PHASE_COLORS = {"compute": "#0072B2", "exposed": "#E69F00", "optimizer": "#009E73", "other": "#BBBBBB"}
PAPER_STYLE = {"linestyle": "none", "marker": "*", "markersize": 13, "markerfacecolor": "none", "zorder": 5}
MACHINE = "vista"
_MEMORY = "peak_memory_bytes"
Captions = dict[str, str]  # by file name


@dataclass(frozen=True)
class PaperValues:
    """A configuration of the paper: milliseconds and efficiency (%) on 64 GPUs, MB of a GPU on 4; 0 where not stated.

    Sections V-D to V-F.
    """

    step: float = 0.0
    efficiency: float = 0.0
    memory: float = 0.0


PAPER = {
    ("llama_500m", "adams"): PaperValues(1753.66, 30.98),
    ("llama_500m", "scape-0.1"): PaperValues(1077.40, 46.11),
    ("llama_500m", "scape-0.01"): PaperValues(908.19, 54.56),
    ("llama_500m", "scape-0.01-offload"): PaperValues(efficiency=63.69),
    ("llama_1_8b", "adams"): PaperValues(4804.44, 17.58),
    ("llama_1_8b", "adams-sharded"): PaperValues(efficiency=21.48),
    ("llama_1_8b", "scape-0.1"): PaperValues(1983.08, 37.15, 68290),
    ("llama_1_8b", "scape-0.1-sharded"): PaperValues(memory=75832),
    ("llama_1_8b", "scape-0.1-offload"): PaperValues(memory=69474),
    ("llama_1_8b", "scape-0.01"): PaperValues(1473.45, 47.83),
    ("llama_1_8b", "scape-0.01-offload"): PaperValues(efficiency=55.04),
}
PAPER_SIZES = {"step": 64, "efficiency": 64, "memory": 4}


@dataclass(frozen=True)
class Panel:
    """The cells of a set and recipe."""

    title: str
    cells: list[Cell]
    machine: str

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(cell["method"] for cell in self.cells))

    @property
    def sizes(self) -> list[int]:
        return sorted({cell["size"] for cell in self.cells})

    def of(self, method: str) -> list[Cell]:
        """Return the cells of a method by size."""
        return sorted((cell for cell in self.cells if cell["method"] == method), key=lambda cell: cell["size"])

    def paper(self, method: str, value: str) -> float:
        """Return the paper's value of a method; 0 if there is none, or on another machine."""
        found = PAPER.get((self.cells[0]["recipe"], method)) if self.machine == MACHINE else None
        return getattr(found, value) if found else 0.0


def panels_of(grid: Grid, store: Store) -> list[Panel]:
    return [
        Panel(f"{one.name}, {recipe}", cells, one.launch.get("machine", ""))
        for one, recipe, cells in cells_by_recipe(grid, store)
    ]


def efficiency(cells: Sequence[Cell]) -> list[float]:
    """Return the strong-scaling efficiency in percent, relative to the first of the cells, the smallest size."""
    first = cells[0]["step_seconds"] * cells[0]["size"]
    return [100 * first / (cell["step_seconds"] * cell["size"]) for cell in cells]


def _draw_lines(axis: Any, panel: Panel, value: str, ours: dict[str, list[float]], **options: Any) -> None:
    """Draw a line of every method over the ranks, and the paper's values as stars of the same color."""
    for i, method in enumerate(panel.methods):
        cells = panel.of(method)
        style = look(i, cells[0]["dense"])
        bars = {"yerr": _quartiles(cells), "capsize": 3} if value == "step" else {}
        axis.errorbar(
            [cell["size"] for cell in cells], ours[method], label=cells[0]["label"], markersize=5, **bars, **style
        )
        if theirs := panel.paper(method, value):
            axis.plot([PAPER_SIZES[value]], [theirs], color=style["color"], **PAPER_STYLE)
    if any(panel.paper(method, value) for method in panel.methods):
        axis.plot([], [], color="#000000", label="the paper's value", **PAPER_STYLE)
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.sizes, [str(size) for size in panel.sizes])
    axis.minorticks_off()
    axis.set(title=panel.title, ylim=(0, None), xlabel="ranks", **options)


def _width(panels: Sequence[Panel]) -> float:
    """Return the inches of a row of panels with the methods' names on the left of each."""
    longest = max(len(cell["label"]) for panel in panels for cell in panel.cells)
    return max(6.4, (4.6 + 0.085 * longest) * len(panels))


def _quartiles(cells: Sequence[Cell]) -> list[list[float]]:
    ends = [(c["step_seconds"], c.get("quartiles") or [c["step_seconds"]] * 2) for c in cells]
    return [[1e3 * max(mid - q[0], 0) for mid, q in ends], [1e3 * max(q[1] - mid, 0) for mid, q in ends]]


def _stack_phases(axis: Any, labels: Sequence[str], cells: Sequence[Cell], horizontal: bool) -> None:
    starts = [0.0] * len(cells)
    for phase, name in PHASES.items():
        lengths = [1e3 * (cell["phases"].get(phase) or 0.0) for cell in cells]
        before = {"left" if horizontal else "bottom": starts}
        (axis.barh if horizontal else axis.bar)(labels, lengths, color=PHASE_COLORS[phase], label=name, **before)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axis.set_axisbelow(True)  # bars hide the grid
    axis.grid(False, axis="y" if horizontal else "x")


def figure_1(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw the parts of a dense step over ranks, of the distributed optimizer if it ran, as the paper does."""
    panels = [panel for panel in panels_of(grid, store) if any(cell["dense"] for cell in panel.cells)]
    if not panels:
        return {}
    drawn, axes = figure(1, len(panels), (max(6.4, 4.6 * len(panels)), 4.4), "Scaling bottleneck of dense training")
    for axis, panel in zip(axes[0], panels, strict=True):
        dense = [method for method in panel.methods if panel.of(method)[0]["dense"]]
        cells = panel.of("adams-sharded" if "adams-sharded" in dense else dense[0])
        _stack_phases(axis, [str(cell["size"]) for cell in cells], cells, horizontal=False)
        axis.set(title=f"{panel.title}\n{cells[0]['label']}", xlabel="ranks", ylabel="step (ms, medians of the phases)")
    save(drawn, folder / "figure_1.png", axes[0])
    return {"figure_1.png": "Parts of a dense step"}


def figure_10(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw step times over ranks, and the parts of a step at the largest size."""
    panels = panels_of(grid, store)
    if not panels:
        return {}
    low = 0.9 + 0.34 * max(len(panel.methods) for panel in panels)
    drawn, axes = figure(2, len(panels), (_width(panels), 4.8 + low), height_ratios=(3.6, low))
    for (top, bottom), panel in zip(axes.T, panels, strict=True):
        ours = {method: [1e3 * cell["step_seconds"] for cell in panel.of(method)] for method in panel.methods}
        _draw_lines(top, panel, "step", ours, ylabel="step (ms, median and quartiles)")
        cells = [cell for cell in panel.cells if cell["size"] == panel.sizes[-1]]
        _stack_phases(bottom, [cell["label"] for cell in cells], cells, horizontal=True)
        bottom.invert_yaxis()
        bottom.set(xlabel=f"step with {panel.sizes[-1]} ranks (ms, medians of the phases)")
    axes[1][0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8, columnspacing=1, handlelength=1.2)
    save(drawn, folder / "figure_10.png", axes[0])
    return {"figure_10.png": "Per-step time; dense methods are dashed"}


def figure_11(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw the efficiency over ranks, relative to the smallest size of the same method."""
    panels = panels_of(grid, store)
    if not panels:
        return {}
    drawn, axes = figure(1, len(panels), (max(6.4, 5.4 * len(panels)), 5.2))
    for axis, panel in zip(axes[0], panels, strict=True):
        ours = {method: efficiency(panel.of(method)) for method in panel.methods}
        _draw_lines(axis, panel, "efficiency", ours, ylabel="strong-scaling efficiency (%)")
    save(drawn, folder / "figure_11.png", axes[0])
    return {"figure_11.png": "Strong-scaling efficiency; dense methods are dashed"}


def figure_12(grid: Grid, store: Store, folder: Path) -> Captions:
    """Draw the peak memory of a rank at the smallest size."""
    panels = [panel for panel in panels_of(grid, store) if any(cell.get(_MEMORY) for cell in panel.cells)]
    if not panels:
        return {}
    height = 1.4 + 0.34 * max(len(panel.methods) for panel in panels)
    drawn, axes = figure(1, len(panels), (_width(panels), height))
    for axis, panel in zip(axes[0], panels, strict=True):
        cells = [cell for cell in panel.cells if cell["size"] == panel.sizes[0] and cell.get(_MEMORY)]
        labels = [cell["label"] for cell in cells]
        axis.barh(labels, [1e-6 * cell[_MEMORY] for cell in cells], color="#0072B2", label="ours")
        theirs = [(panel.paper(cell["method"], "memory"), cell["label"]) for cell in cells]
        if known := [pair for pair in theirs if pair[0]]:
            axis.plot(*zip(*known, strict=True), color="#D55E00", label="the paper's value", **PAPER_STYLE)
        axis.invert_yaxis()
        axis.set_axisbelow(True)
        axis.grid(False, axis="y")
        axis.set(title=panel.title, xlabel=f"peak memory of a rank with {panel.sizes[0]} ranks (MB)")
    save(drawn, folder / "figure_12.png", axes[0])
    return {"figure_12.png": "Peak memory of a rank"}


def beside_the_paper(grid: Grid, store: Store) -> list[str]:
    """Return our values and the paper's for its configurations, at the paper's sizes; [] on other machines."""
    found = []
    for panel in panels_of(grid, store):
        if rows := list(_rows_beside(panel)):
            found += [f"### {panel.title}", markdown(rows)]
    return section(
        "Beside the paper's values", "Efficiency is relative to four ranks. Memory is that of a rank.", found
    )


def _rows_beside(panel: Panel) -> Iterator[Row]:
    for method in panel.methods:
        cells = panel.of(method)
        by_size = {cell["size"]: cell for cell in cells}
        shares = dict(zip(by_size, efficiency(cells), strict=True)) if 4 in by_size else {}
        step = {size: 1e3 * cell["step_seconds"] for size, cell in by_size.items()}
        memory = {size: 1e-6 * cell[_MEMORY] for size, cell in by_size.items() if cell.get(_MEMORY)}
        ours = {"step": step, "efficiency": shares, "memory": memory}
        if any(panel.paper(method, value) for value in ours):
            row = {"method": cells[0]["label"]}
            for value, title in (("step", "step, ms"), ("efficiency", "efficiency, %"), ("memory", "memory, MB")):
                size = PAPER_SIZES[value]
                row[f"{title} ({size} ranks)"] = number(ours[value].get(size), ",.1f")
                row[f"{title}: the paper's"] = number(panel.paper(method, value) or None, ",.1f")
            yield row


TABLES = {"beside_the_paper": beside_the_paper}

"""The figures of a strong-scaling report, after the paper's Figures 10 to 12. scaling_report.py calls `draw`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.plots import COLOURS, look, save, subplots

Cell = dict[str, Any]
FIGURES = ("figure_10.png", "figure_11.png", "figure_12.png")
PHASES = {"compute": "compute", "exposed": "exposed communication", "optimizer": "optimizer", "other": "other"}
PHASE_COLOURS = {"compute": "#0072B2", "exposed": "#E69F00", "optimizer": "#009E73", "other": "#BBBBBB"}
DENSE = ("adamw", "adams", "ddp", "ddp-bf16", "hsdp", "hsdp-waits")


def is_dense(method: str) -> bool:
    return method in DENSE


def in_ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def draw_lines(axis: Any, panel: Sequence[Cell], methods: Sequence[str], key: str, scale: float) -> None:
    """A line a method against ranks, dashed where it is dense; step times with their quartiles as error bars."""
    for i, method in enumerate(methods):
        cells = [cell for cell in panel if cell["method"] == method]
        if not cells:
            continue
        bars = None
        if key == "step_seconds":
            ends = [(cell[key], cell.get("quartiles") or [cell[key]] * 2) for cell in cells]
            pairs = [(max(mid - low, 0), max(high - mid, 0)) for mid, (low, high) in ends]
            bars = [[scale * side for side in sides] for sides in zip(*pairs, strict=True)]
        sizes, values = [cell["size"] for cell in cells], [scale * cell[key] for cell in cells]
        style = look(i, is_dense(method)) | {"label": cells[0]["label"], "markersize": 5, "capsize": 3}
        axis.errorbar(sizes, values, yerr=bars, **style)
    sizes = sorted({cell["size"] for cell in panel})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("ranks")
    axis.grid(alpha=0.3)


def figure_10(panels: Mapping[str, Sequence[Cell]], methods: Sequence[str], path: Path) -> None:
    """Per-step time against ranks; below, what a step at the largest size consists of."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low = 0.9 + 0.34 * max(len({cell["method"] for cell in panel}) for panel in panels.values())
    figure, axes = subplots(panels, 2, 4.8 + low, (3.6, low))
    for (top, bottom), panel in zip(axes.T, panels.values(), strict=True):
        draw_lines(top, panel, methods, "step_seconds", 1e3)
        times = [cell["step_seconds"] for cell in panel]
        if max(times) > 5 * min(times):
            top.set_yscale("log")
            top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            top.minorticks_off()
        else:
            top.set_ylim(bottom=0)
        top.set_ylabel("step (ms, median and quartiles)")
        largest = max(cell["size"] for cell in panel)
        cells = [cell for cell in panel if cell["size"] == largest]
        labels, starts = [cell["label"] for cell in cells], [0.0] * len(cells)
        for phase, name in PHASES.items():
            widths = [1e3 * (cell["phases"].get(phase) or 0.0) for cell in cells]
            bottom.barh(labels, widths, left=starts, color=PHASE_COLOURS[phase], label=name)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        bottom.invert_yaxis()
        bottom.set_xlabel(f"step with {in_ranks(largest)} (ms, medians of the phases)")
        bottom.grid(alpha=0.3, axis="x")
    axes[1][0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8, columnspacing=1, handlelength=1.2)
    save(figure, path, axes[0])


def figure_11(panels: Mapping[str, Sequence[Cell]], methods: Sequence[str], path: Path) -> None:
    figure, axes = subplots(panels, 1, 4.6)
    for axis, panel in zip(axes[0], panels.values(), strict=True):
        axis.axhline(100, color="#777777", linestyle=":", label="ideal")
        draw_lines(axis, panel, methods, "efficiency", 100)
        axis.set_ylim(0, 105 * max(1.0, *(cell["efficiency"] for cell in panel)))
        axis.set_ylabel(f"efficiency against {in_ranks(min(cell['size'] for cell in panel))} (%)")
    save(figure, path, axes[0])


def figure_12(panels: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """Peak memory at the smallest size, as in the paper."""
    figure, axes = subplots(panels, 1, 1.6 + 0.34 * max(len(panel) for panel in panels.values()))
    for axis, panel in zip(axes[0], panels.values(), strict=True):
        for cell in panel:
            bars = axis.barh(cell["label"], cell["peak_memory_bytes"] / 1e6, color=COLOURS[2], height=0.65)
            axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        kinds = " or ".join(dict.fromkeys(cell["memory_kind"] for cell in panel))
        axis.set_xlabel(f"peak per rank with {in_ranks(panel[0]['size'])} (MB, {kinds})")
        axis.margins(x=0.22)
        axis.locator_params(axis="x", nbins=5)
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
    save(figure, path)


def draw(folder: Path, panels: Mapping[str, Sequence[Cell]], methods: Sequence[str]) -> dict[str, str]:
    """Captions of the figures that the cells are enough for, by file name; those of an earlier report go."""
    for name in FIGURES:
        (folder / name).unlink(missing_ok=True)
    captions = {}
    if panels:
        figure_10(panels, methods, folder / "figure_10.png")
        captions["figure_10.png"] = "Per-step time; dense methods are dashed"
    scaled = {title: panel for title, panel in panels.items() if len({cell["size"] for cell in panel}) > 1}
    if scaled:
        figure_11(scaled, methods, folder / "figure_11.png")
        captions["figure_11.png"] = "Strong-scaling efficiency"
    memory = {}
    for title, panel in panels.items():
        known = [cell for cell in panel if cell.get("peak_memory_bytes") is not None]
        if known:
            smallest = min(cell["size"] for cell in known)
            memory[title] = [cell for cell in known if cell["size"] == smallest]
    if memory:
        figure_12(memory, folder / "figure_12.png")
        captions["figure_12.png"] = "Peak memory per rank"
    return captions

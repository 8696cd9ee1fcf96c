"""Makes a strong-scaling sweep's report from its stored cells: tables, JSON, CSV, and the paper's Figures 10 to 12.

    python -m scripts.studies.scaling_report results/strong_scaling/emulated

scripts/studies/strong_scaling.py calls it after every sweep; alone it makes the report anew, also of a sweep that was
interrupted. It reads FOLDER/sweep.json and FOLDER/cells/*.json, one cell for each recipe, method and size, and writes
report.md, scaling.json, scaling.csv, figure_10.png, figure_11.png and figure_12.png beside them.
"""

import argparse
import csv
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = dict[str, Any]

PHASES = {"compute": "compute", "exposed": "exposed communication", "optimizer": "optimizer", "other": "other"}
PHASE_COLOURS = {"compute": "#0072B2", "exposed": "#E69F00", "optimizer": "#009E73", "other": "#BBBBBB"}
# Okabe and Ito's colours without the yellow, which white paper swallows.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP*X<>"
COMPRESSED = ("scape", "powersgd")  # how the methods begin that are not dense
LEVELS = ("gcd_pair", "node", "network")  # the nearest first
COMPUTE = {
    "wait": "forward and backward are a calibrated wait, exchange and optimizer are real",
    "real": "forward and backward are real",
    "predicted": "all predicted by the cost model, nothing measured",
}
# What a result must hold.
NEEDED = (
    *("launcher", "recipe", "size", "nodes", "ranks_per_node", "compute"),
    *("step_seconds", "phases", "tokens_per_step", "sent"),
)


def read_cell(path: Path) -> Cell:
    """A cell; what cannot be used comes back as a failed one, its `error` naming file and fault."""
    blank = {"launcher": "?", "recipe": "?", "method": path.stem, "label": path.stem, "size": 0}
    try:
        cell = blank | json.loads(path.read_text())
    except (ValueError, TypeError) as error:
        return blank | {"error": f"{path.name} cannot be read: {error}"}
    cell |= {key: value for key, value in blank.items() if cell[key] is None}
    if cell.get("error") is None:
        cell.pop("error", None)
        lacking = [key for key in NEEDED if cell.get(key) in (None, blank.get(key))]
        if lacking:
            cell["error"] = f"{path.name} lacks {', '.join(lacking)}"
        elif not 0 < cell["step_seconds"] < math.inf:
            cell["error"] = f"{path.name} has a step of {cell['step_seconds']} s"
    return cell


def is_dense(method: str) -> bool:
    return not method.startswith(COMPRESSED)


def panels_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Results that may be compared, by title: one recipe, launcher and kind of compute, in the order of `cells`."""
    results = [cell for cell in cells if "error" not in cell]
    kinds = {(cell["launcher"], cell["compute"]) for cell in results}
    panels: dict[str, list[Cell]] = {}
    for cell in results:
        more = f" ({cell['launcher']}, compute: {cell['compute']})" if len(kinds) > 1 else ""
        cell["panel"] = cell["recipe"] + more
        panels.setdefault(cell["panel"], []).append(cell)
    return panels


def derive(panel: Sequence[Cell]) -> None:
    """Adds what follows from a panel's cells: efficiency, speed-up, tokens a second, the prediction's residual."""
    baseline = next((cell["method"] for cell in panel if is_dense(cell["method"])), None)
    for cell in panel:
        seconds, predicted = cell["step_seconds"], (cell.get("predicted") or {}).get("step_seconds")
        first = min((other for other in panel if other["method"] == cell["method"]), key=lambda other: other["size"])
        dense = [other for other in panel if other["method"] == baseline and other["size"] == cell["size"]]
        cell["smallest_size"] = first["size"]
        cell["efficiency"] = first["step_seconds"] * first["size"] / (seconds * cell["size"])
        cell["speedup"] = dense[0]["step_seconds"] / seconds if dense else None
        cell["tokens_per_second"] = cell["tokens_per_step"] / seconds
        cell["residual"] = predicted / seconds - 1 if predicted and cell["launcher"] != "predicted" else None


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; the first row's keys are the head."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(str(field).replace("|", "\\|") for field in line) + " |" for line in lines)


def number(value: float | None, form: str = ".1f", scale: float = 1.0) -> str:
    return "-" if value is None else format(scale * value, form)


def ms(seconds: float | None) -> str:
    return number(seconds, ".1f", 1e3)


def megabytes(value: float | None) -> str:
    return number(value, ".3f" if value is not None and value < 1e8 else ".1f", 1e-6)


def levels_of(volumes: Iterable[Mapping[str, float]]) -> list[str]:
    found = {level for volume in volumes for level in volume}
    return [*(level for level in LEVELS if level in found), *sorted(found.difference(LEVELS))]


def ranks(cell: Cell) -> str:
    return f"{cell['size']} ({cell['nodes']} x {cell['ranks_per_node']})"


def in_ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def heading(cell: Cell) -> dict[str, str]:
    return {"recipe": cell["panel"], "method": cell["label"], "ranks": ranks(cell)}


def describe(panel: Sequence[Cell]) -> str:
    """What a reader has to know about a panel's table."""
    tokens = sorted({cell["tokens_per_step"] for cell in panel})
    steps = sorted({len(cell.get("steps") or ()) for cell in panel})
    memory = dict.fromkeys(cell["memory_kind"] for cell in panel if cell.get("peak_memory_bytes") is not None)
    text = f"Launcher {panel[0]['launcher']}; {COMPUTE.get(panel[0]['compute'], panel[0]['compute'])}. "
    text += "" if len(tokens) == 1 else "**The batch is not fixed.** "
    text += f"{', '.join(f'{count:,}' for count in tokens)} tokens a step."
    if steps[-1]:
        count = " to ".join(str(count) for count in dict.fromkeys((steps[0], steps[-1])))
        text += f" Medians of {count} steps after warm-up, each phase's its own, so they need not add up."
    return text + (f" Memory: {' or '.join(memory)}." if memory else "")


def main_table(panel: Sequence[Cell]) -> str:
    dense = next((cell["label"] for cell in panel if is_dense(cell["method"])), "dense")
    smallest, rows = min(cell["size"] for cell in panel), []
    for cell in panel:
        row = {
            "method": cell["label"],
            "ranks (nodes x each)": ranks(cell),
            "step, ms (median)": ms(cell["step_seconds"]),
        }
        row["quartiles, ms"] = " to ".join(map(ms, cell.get("quartiles") or [None]))
        row |= {f"{name}, ms": ms(cell["phases"].get(phase)) for phase, name in PHASES.items()}
        row["tokens/s"] = number(cell["tokens_per_second"], ",.0f")
        start = f" (from {cell['smallest_size']})" if cell["smallest_size"] > smallest else ""
        row["efficiency, %"] = number(cell["efficiency"], ".1f", 100) + start
        row[f"speed-up against {dense}"] = number(cell["speedup"], ".2f")
        row["peak memory per rank, MB"] = number(cell.get("peak_memory_bytes"), ",.0f", 1e-6)
        for level in levels_of(other["sent"] for other in panel):
            row[f"sent per step and rank, MB: {level}"] = megabytes(cell["sent"].get(level))
        rows.append(row)
    return markdown(rows)


def prediction_table(results: Sequence[Cell]) -> str:
    cells = [cell for cell in results if cell["residual"] is not None]
    if not cells:
        return ""
    rows = []
    for cell in cells:
        predicted, phases = cell["predicted"], cell["phases"]
        row = heading(cell)
        row |= {"predicted, ms": ms(predicted["step_seconds"]), "measured, ms": ms(cell["step_seconds"])}
        row["residual, %"] = number(cell["residual"], "+.1f", 100)
        for part in ("compute", "exposed", "optimizer"):
            row[f"{PHASES[part]}, predicted / measured"] = f"{ms(predicted.get(part))} / {ms(phases.get(part))}"
        rows.append(row)
    worst = max(cells, key=lambda cell: abs(cell["residual"]))
    return (
        f"Largest residual: {100 * worst['residual']:+.1f} % ({worst['panel']}, {worst['label']}, "
        f"{in_ranks(worst['size'])}). Residual: (predicted - measured) / measured, of the whole step.\n\n"
    ) + markdown(rows)


def bytes_table(results: Sequence[Cell]) -> str:
    rows = []
    for cell in results:
        nic, counted = cell.get("nic") or {}, cell.get("counted") or {}
        for level in levels_of([nic]):
            row = heading(cell) | {"level": level}
            row |= {"counted by the ranks, MB": megabytes(counted.get(level)), "interface, MB": megabytes(nic[level])}
            row["interface / counted"] = number(nic[level] / counted[level] if counted.get(level) else None, ".3f")
            rows.append(row)
    return "Sent per step and node.\n\n" + markdown(rows) if rows else ""


def loss_table(results: Sequence[Cell]) -> str:
    cells = [cell for cell in results if cell.get("validation_loss") is not None]
    columns = ("steps trained", "validation loss")
    values = [(cell.get("steps_trained", "-"), f"{cell['validation_loss']:.4f}") for cell in cells]
    return markdown(
        [heading(cell) | dict(zip(columns, pair, strict=True)) for cell, pair in zip(cells, values, strict=True)]
    )


def failures(cells: Sequence[Cell], sweep: Mapping[str, Any]) -> str:
    rows = []
    for cell in (cell for cell in cells if "error" in cell):
        line = (str(cell["error"]).strip().splitlines() or ["no message"])[0]
        rows.append({"recipe": cell["recipe"], "method": cell["label"], "ranks": cell["size"] or "-", "error": line})
    have = {(cell["recipe"], cell["method"], cell["size"]) for cell in cells}
    planned = list(itertools.product(sweep["recipes"], sweep["methods"], sweep["sizes"]))
    missing = ", ".join(f"{r} {m} on {n}" for r, m, n in planned if (r, m, n) not in have)
    rest = f"Not run: {missing}." if missing else ""
    return "\n\n".join(part for part in (markdown(rows), rest) if part)


def subplots(titles: Iterable[str], rows: int, height: float, ratios: Sequence[float] = (1,)) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(titles)
    size = (max(6.4, 5.4 * len(names)), height)
    figure, axes = plt.subplots(
        rows, len(names), figsize=size, layout="constrained", squeeze=False, height_ratios=ratios
    )
    for axis, title in zip(axes[0], names, strict=True):
        axis.set_title(title)
    for axis in axes.flat:
        axis.set_axisbelow(True)  # bars hide the grid
    return figure, axes


def save(figure: Any, path: Path, legend: Iterable[Any] = ()) -> None:
    """With what stands on the axes of `legend` in one legend below, each label once."""
    import matplotlib.pyplot as plt

    entries: dict[str, Any] = {}
    for axis in legend:
        handles, labels = axis.get_legend_handles_labels()
        entries = dict(zip(labels, handles, strict=True)) | entries
    if entries:
        # In inches: the line and its gaps, and the longest label's letters.
        columns = max(1, int(figure.get_figwidth() / (0.9 + 0.07 * max(map(len, entries)))))
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, fontsize=9, handlelength=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
        axis.errorbar(
            [cell["size"] for cell in cells],
            [scale * cell[key] for cell in cells],
            yerr=bars,
            label=cells[0]["label"],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="--" if is_dense(method) else "-",
            markersize=5,
            capsize=3,
        )
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
    for name in ("figure_10.png", "figure_11.png", "figure_12.png"):
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


def csv_row(cell: Cell) -> dict[str, Any]:
    """A cell with its nested values spread over columns, the unit in a column's name."""
    row: dict[str, Any] = {}
    for key, value in cell.items():
        if key == "steps":
            row["steps_measured"] = len(value or ())
        elif key == "quartiles":
            row["q25_seconds"], row["q75_seconds"] = value or (None, None)
        elif key == "phases":
            row |= {f"{phase}_seconds": value.get(phase) for phase in PHASES}
        elif key == "predicted":
            row |= {f"predicted_{part.removesuffix('_seconds')}_seconds": s for part, s in (value or {}).items()}
        elif key in ("sent", "nic", "counted"):
            row |= {f"{key}_{level}_bytes": count for level, count in (value or {}).items()}
        else:
            row[key] = value
    return row


def read_sweep(folder: Path) -> dict[str, Any]:
    """sweep.json. Raises ValueError where it is missing or lacks a key."""
    try:
        sweep = json.loads((folder / "sweep.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / 'sweep.json'} cannot be read ({error}); run scripts/studies/strong_scaling.py"
        ) from error
    lacking = [key for key in ("command", "machine", "recipes", "methods", "sizes") if key not in sweep]
    if lacking:
        raise ValueError(f"{folder / 'sweep.json'} lacks {', '.join(lacking)}")
    return sweep


def write_report(folder: Path, command: str, notes: Sequence[str]) -> None:
    """Writes the report of the sweep in `folder`, which holds sweep.json and cells/*.json; the files go there too.

    `command` is what was run, `notes` what the numbers do not show. Raises ValueError without cells or sweep.
    """
    sweep = read_sweep(folder)
    cells = [read_cell(path) for path in sorted((folder / "cells").glob("*.json"))]
    if not cells:
        raise ValueError(f"{folder / 'cells'} has no cells; run scripts/studies/strong_scaling.py first")
    recipes, methods = (
        list(dict.fromkeys([*sweep[f"{key}s"], *(cell[key] for cell in cells)])) for key in ("recipe", "method")
    )
    cells.sort(key=lambda cell: (recipes.index(cell["recipe"]), methods.index(cell["method"]), cell["size"]))
    panels = panels_of(cells)
    for panel in panels.values():
        derive(panel)
    results = [cell for panel in panels.values() for cell in panel]

    captions = draw(folder, panels, methods)
    stored = {"sweep": sweep, "command": command, "notes": list(notes), "cells": cells}
    (folder / "scaling.json").write_text(json.dumps(stored, indent=1) + "\n")
    rows = [csv_row(cell) for cell in cells]
    with open(folder / "scaling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    launchers = ", ".join(dict.fromkeys(cell["launcher"] for cell in cells if cell["launcher"] != "?"))
    parts = ["# Strong scaling", f"Made by `{command}`. Launcher: {launchers}. Machine: {sweep['machine']}."]
    parts += [f"![{caption}]({name})\n\n{caption}." for name, caption in captions.items()]
    for title, panel in panels.items():
        parts += [f"## {title}", describe(panel), main_table(panel)]
    sections = {
        "Predicted against measured": prediction_table(results),
        "Bytes against the interfaces' counters": bytes_table(results),
        "Validation loss": loss_table(results),
        "Failed or not run": failures(cells, sweep),
        "What the numbers do not show": "\n".join(f"- {note}" for note in notes),
    }
    for title, text in sections.items():
        parts += [f"## {title}", text] if text else []
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with sweep.json and cells/")
    folder = parser.parse_args().folder
    try:
        sweep = read_sweep(folder)
        write_report(folder, sweep["command"], sweep.get("notes") or [])
    except ValueError as error:
        print(f"scaling_report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {folder / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A strong-scaling sweep's report, from its stored cells: tables, JSON, CSV, and the paper's Figures 10 to 12.

strong_scaling.py makes it after every sweep, and of one that was interrupted with `report`.
"""

import csv
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import markdown, megabytes, ms, number, write
from scripts.studies.scaling_plots import PHASES, Cell, draw, in_ranks, is_dense

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


def levels_of(volumes: Iterable[Mapping[str, float]]) -> list[str]:
    found = {level for volume in volumes for level in volume}
    return [*(level for level in LEVELS if level in found), *sorted(found.difference(LEVELS))]


def ranks(cell: Cell) -> str:
    return f"{cell['size']} ({cell['nodes']} x {cell['ranks_per_node']})"


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
            "method": cell["label"] + (f" (mean of {cell['period']} steps)" if cell.get("period", 1) > 1 else ""),
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
            row[f"sent per step and rank, MB: {level}"] = _sent(cell, level)
        rows.append(row)
    return markdown(rows)


def _sent(cell: Cell, level: str) -> str:
    """As counted by the ranks; of peers, who count nothing, as the interfaces did."""
    counted, nic = cell["sent"].get(level), (cell.get("nic") or {}).get(level)
    if counted is not None or nic is None or cell["sent"]:
        return megabytes(counted)
    return f"{megabytes(nic / cell['ranks_per_node'])} (interface)"


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
    rows = []
    for cell in results:
        if cell.get("validation_loss") is not None:
            row = {"steps trained": cell.get("steps_trained", "-"), "validation loss": f"{cell['validation_loss']:.4f}"}
            rows.append(heading(cell) | row)
    return markdown(rows)


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
    path = folder / "sweep.json"
    try:
        sweep = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); first run python -m scripts.studies.strong_scaling"
        ) from error
    lacking = [key for key in ("command", "machine", "recipes", "methods", "sizes") if key not in sweep]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    return sweep


def write_report(folder: Path) -> Path:
    """Writes report.md, scaling.json, scaling.csv and the figures into `folder`; returns the report's path.

    The folder holds sweep.json and cells/*.json, one for each recipe, method and size. Raises ValueError without them.
    """
    sweep = read_sweep(folder)
    command, notes = sweep["command"], sweep.get("notes") or []
    cells = [read_cell(path) for path in sorted((folder / "cells").glob("*.json"))]
    if not cells:
        raise ValueError(f"{folder / 'cells'} has no cells; first run python -m scripts.studies.strong_scaling")
    recipes, methods = (
        list(dict.fromkeys([*sweep[f"{key}s"], *(cell[key] for cell in cells)])) for key in ("recipe", "method")
    )
    cells.sort(key=lambda cell: (recipes.index(cell["recipe"]), methods.index(cell["method"]), cell["size"]))
    panels = panels_of(cells)
    for panel in panels.values():
        derive(panel)
    results = [cell for panel in panels.values() for cell in panel]

    captions = draw(folder, panels, methods)
    write(folder / "scaling.json", {"sweep": sweep, "command": command, "notes": notes, "cells": cells})
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
    write(folder / "report.md", "\n\n".join(parts) + "\n")
    return folder / "report.md"

"""Tables of step times, bytes and losses of runs on several ranks, from a study's stored lines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.common import markdown, megabytes, ms, number
from scripts.study.grid import Grid, is_file
from scripts.study.store import Store

Cell = dict[str, Any]
LEVELS = ("gcd_pair", "node", "network")  # the innermost first
PHASES = {"compute": "compute", "exposed": "exposed communication", "optimizer": "optimizer", "other": "other"}
COMPUTE = {
    "wait": "forward and backward are a calibrated wait, exchange and optimizer are real",
    "real": "forward and backward are real",
    "predicted": "everything is predicted by the planner",
}
NEEDED = ("launcher", "recipe", "size", "step_seconds", "phases", "tokens_per_step")


def cells_of(grid: Grid, store: Store, set_name: str) -> list[Cell]:
    """Return the finished step times of a set, in the order of the grid, with the method's name and derived values.

    Raises ValueError for a line that lacks a value.
    """
    (one,) = grid.choose([set_name])
    files = [line["method"] for line in store.of(set_name) if is_file(line["method"])]
    order = {name: i for i, name in enumerate(dict.fromkeys([*one.methods, *grid.methods, *files]))}
    found: dict[Any, Cell] = {}
    for line in store.of(set_name):
        cell = line["result"]
        if line["method"] not in order or "step_seconds" not in cell or "error" in cell:
            continue  # a calibration, a run for its loss, or a failure
        lacking = [key for key in NEEDED if cell.get(key) is None]
        if lacking or not 0 < cell["step_seconds"] < math.inf:
            raise ValueError(f"{store.path}: {line['key']} lacks {', '.join(lacking) or 'a step time'}")
        dense = line["options"]["sync.method"] == "dense"
        count = line["options"].get("training.global_batch_size", 0) // cell["size"]
        place = (cell["recipe"], order[line["method"]], cell["size"], count)
        found.pop(place, None)  # a run with other settings of the launcher
        declared = {"method": line["method"], "targets": grid.methods.get(line["method"], {}).get("targets", {})}
        found[place] = cell | declared | {"dense": dense, "micro_batches": count, "set": set_name}
    cells = [found[place] for place in sorted(found)]
    for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
        _derive([cell for cell in cells if cell["recipe"] == recipe])
    return cells


def _derive(panel: Sequence[Cell]) -> None:
    """Add efficiency, speed-up, tokens per second and the prediction's residual to the cells of one recipe."""
    baseline = next((cell["method"] for cell in panel if cell["dense"]), None)
    for cell in panel:
        seconds, predicted = cell["step_seconds"], (cell.get("predicted") or {}).get("step_seconds")
        first = min((other for other in panel if other["method"] == cell["method"]), key=lambda other: other["size"])
        dense = [other for other in panel if other["method"] == baseline and other["size"] == cell["size"]]
        cell["smallest_size"] = first["size"]
        cell["efficiency"] = first["step_seconds"] * first["size"] / (seconds * cell["size"])
        cell["speedup"] = dense[0]["step_seconds"] / seconds if dense else None
        cell["tokens_per_second"] = cell["tokens_per_step"] / seconds
        cell["residual"] = predicted / seconds - 1 if predicted and cell["launcher"] != "predicted" else None


def by_set(make: Callable[[list[Cell]], str], title: str, about: str = "") -> Callable[[Grid, Store], list[str]]:
    """Return a table of every set and recipe that has its numbers, under one title."""

    def parts(grid: Grid, store: Store) -> list[str]:
        found = []
        for one in grid.sets:
            cells = cells_of(grid, store, one.name)
            for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
                if table := make([cell for cell in cells if cell["recipe"] == recipe]):
                    several = len(grid.sets) > 1 or len(one.recipes) > 1
                    found += ([f"### Set {one.name}, {recipe}"] if several else []) + [table]
        return [f"## {title}", *([about] if about else []), *found] if found else []

    return parts


def levels_of(volumes: Iterable[Mapping[str, float]]) -> list[str]:
    found = {level for volume in volumes for level in volume}
    return [*(level for level in LEVELS if level in found), *sorted(found.difference(LEVELS))]


def _heading(cell: Cell) -> dict[str, str]:
    ranks = f"{cell['size']} ({cell['nodes']} x {cell['ranks_per_node']})"
    return {"method": cell["label"], "ranks (nodes x each)": ranks}


def describe(panel: Sequence[Cell]) -> str:
    tokens = sorted({cell["tokens_per_step"] for cell in panel})
    steps = sorted({len(cell.get("steps") or ()) for cell in panel})
    memory = dict.fromkeys(cell["memory_kind"] for cell in panel if cell.get("peak_memory_bytes") is not None)
    text = f"Launcher {panel[0]['launcher']}; {COMPUTE.get(panel[0]['compute'], panel[0]['compute'])}. "
    text += "" if len(tokens) == 1 else "**The batch is not fixed.** "
    text += f"{', '.join(f'{count:,}' for count in tokens)} tokens per step."
    if steps[-1]:
        count = " to ".join(str(count) for count in dict.fromkeys((steps[0], steps[-1])))
        text += f" Medians of {count} steps after warm-up, for each phase separately, so the phases need not add up."
    return text + (f" Memory: {' or '.join(memory)}." if memory else "")


def step_times(panel: list[Cell]) -> str:
    dense = next((cell["label"] for cell in panel if cell["dense"]), "dense")
    smallest, rows = min(cell["size"] for cell in panel), []
    for cell in panel:
        row = _heading(cell)
        row["method"] += f" (mean of {cell['period']} steps)" if cell.get("period", 1) > 1 else ""
        row["step, ms"] = ms(cell["step_seconds"])
        row["quartiles, ms"] = " to ".join(map(ms, cell.get("quartiles") or [None]))
        row |= {f"{name}, ms": ms(cell["phases"].get(phase)) for phase, name in PHASES.items()}
        row["tokens/s"] = number(cell["tokens_per_second"], ",.0f")
        if any(other.get("flops_per_token") for other in panel):
            row["TFLOP/s per rank"] = _tflops(cell)
        start = f" (from {cell['smallest_size']})" if cell["smallest_size"] > smallest else ""
        row["efficiency, %"] = number(cell["efficiency"], ".1f", 100) + start
        row[f"speed-up over {dense}"] = number(cell["speedup"], ".2f")
        row["peak memory per rank, MB"] = number(cell.get("peak_memory_bytes"), ",.0f", 1e-6)
        for level in levels_of(other["sent"] for other in panel):
            row[f"sent per step and rank, MB: {level}"] = _sent(cell, level)
        rows.append(row)
    return f"{describe(panel)}\n\n{markdown(rows)}"


def _tflops(cell: Cell) -> str:
    """Return the rate of a rank, with attention counted as not causal, like TorchTitan's MFU."""
    flops = cell.get("flops_per_token")
    return number(cell["tokens_per_second"] * flops / cell["size"] if flops else None, ".1f", 1e-12)


def _sent(cell: Cell, level: str) -> str:
    """Return bytes as the ranks counted them; of DDP and HSDP, which count none, as the interfaces did."""
    counted, nic = cell["sent"].get(level), (cell.get("nic") or {}).get(level)
    if counted is not None or nic is None or cell["sent"]:
        return megabytes(counted)
    return f"{megabytes(nic / cell['ranks_per_node'])} (interface)"


def prediction(panel: list[Cell]) -> str:
    cells, rows = [cell for cell in panel if cell["residual"] is not None], []
    for cell in cells:
        predicted, phases = cell["predicted"], cell["phases"]
        row = _heading(cell) | {"predicted, ms": ms(predicted["step_seconds"])}
        row["measured, ms"] = ms(cell["step_seconds"])
        row["residual, %"] = number(cell["residual"], "+.1f", 100)
        for part in ("compute", "exposed", "optimizer"):
            row[f"{PHASES[part]}, predicted / measured"] = f"{ms(predicted.get(part))} / {ms(phases.get(part))}"
        rows.append(row)
    if not rows:
        return ""
    worst = max(cells, key=lambda cell: abs(cell["residual"]))
    largest = f"{100 * worst['residual']:+.1f} % ({worst['label']}, {worst['size']} ranks)"
    return f"Largest residual, (predicted - measured) / measured: {largest}.\n\n{markdown(rows)}"


def interface_bytes(panel: list[Cell]) -> str:
    rows = []
    for cell in panel:
        nic, counted = cell.get("nic") or {}, cell.get("counted") or {}
        for level in levels_of([nic]):
            row = _heading(cell) | {"level": level}
            row |= {"counted by the ranks, MB": megabytes(counted.get(level)), "interface, MB": megabytes(nic[level])}
            row["interface / counted"] = number(nic[level] / counted[level] if counted.get(level) else None, ".3f")
            rows.append(row)
    return markdown(rows)


PER_STEP_AND_NODE = "MB (1e6 bytes) sent per step and node."
TABLES: dict[str, Callable[[Grid, Store], list[str]]] = {
    "step_times": by_set(step_times, "Step times"),
    "prediction": by_set(prediction, "Predicted and measured steps"),
    "interface_bytes": by_set(interface_bytes, "Bytes of the ranks and of the interfaces", PER_STEP_AND_NODE),
}

"""Tables of step times, bytes and losses of runs on several ranks, from a study's stored lines."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scripts.common import markdown, megabytes, ms, number
from scripts.study.grid import BudgetSet, Grid, is_file
from scripts.study.store import Store

Cell = dict[str, Any]
Row = dict[str, str]  # of a table
LEVELS = ("gcd_pair", "node", "network")  # the innermost first
PHASES = {"compute": "compute", "exposed": "exposed communication", "optimizer": "optimizer", "other": "other"}
COMPUTE = {
    "wait": "forward and backward are a calibrated wait, exchange and optimizer are real",
    "real": "forward and backward are real",
    "predicted": "everything is predicted by the planner",
}
NEEDED = ("launcher", "recipe", "size", "step_seconds", "phases", "tokens_per_step")


def cells_of(grid: Grid, store: Store, set_name: str) -> list[Cell]:
    """Return the finished step times of a set, in the order of the grid, with the method's name and targets.

    A run that several sets declare is stored once, with the set that ran it, and belongs to all of them.

    Raises ValueError for a line that lacks a value.
    """
    (one,) = grid.choose([set_name])
    lines = store.of(set_name)
    others = [line for line in store.own.values() if line["set"] != set_name and "step_seconds" in line["result"]]
    if shared := {line["method"] for line in others} & set(one.methods):
        keys = {spec.key for method in shared for spec in grid.specs(one, method)}
        lines += [line for line in others if line["key"] in keys]
    files = [line["method"] for line in lines if is_file(line["method"])]
    order = {name: i for i, name in enumerate(dict.fromkeys([*one.methods, *grid.methods, *files]))}
    found: dict[Any, Cell] = {}
    for line in lines:
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
        found[place] = cell | declared | {"dense": dense, "micro_batches": count}
    return [found[place] for place in sorted(found)]


def cells_by_recipe(grid: Grid, store: Store) -> Iterator[tuple[BudgetSet, str, list[Cell]]]:
    """Yield the cells of each set and recipe."""
    for one in grid.sets:
        cells = cells_of(grid, store, one.name)
        for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
            yield one, recipe, [cell for cell in cells if cell["recipe"] == recipe]


def section(title: str, about: str, parts: list[str]) -> list[str]:
    """Return the parts as a section of the report; [] without parts."""
    return [f"## {title}", *([about] if about else []), *parts] if parts else []


def by_set(
    make: Callable[[list[Cell]], Iterable[Row]],
    title: str,
    about: str = "",
    describe: Callable[[list[Cell]], str] | None = None,
) -> Callable[[Grid, Store], list[str]]:
    """Return a section: a table of every set and recipe that has its numbers, below its description."""

    def parts(grid: Grid, store: Store) -> list[str]:
        found = []
        for one, recipe, panel in cells_by_recipe(grid, store):
            if rows := list(make(panel)):
                several = len(grid.sets) > 1 or len(one.recipes) > 1
                found += [f"### Set {one.name}, {recipe}"] if several else []
                found += [*([describe(panel)] if describe else []), markdown(rows)]
        return section(title, about, found)

    return parts


def levels_of(found: Iterable[str]) -> list[str]:
    """Return link levels in order."""
    return sorted(set(found), key=lambda level: (level not in LEVELS, level in LEVELS and LEVELS.index(level), level))


def _heading(cell: Cell) -> dict[str, str]:
    ranks = f"{cell['size']} ({cell['nodes']} x {cell['ranks_per_node']})"
    return {"method": cell["label"], "ranks (nodes x each)": ranks}


def set_up(panel: Sequence[Cell]) -> str:
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


def step_times(panel: list[Cell]) -> Iterator[Row]:
    baseline = next((cell for cell in panel if cell["dense"]), {"method": None, "label": "dense"})
    smallest, levels = min(cell["size"] for cell in panel), levels_of(level for cell in panel for level in cell["sent"])
    for cell in panel:
        seconds, size = cell["step_seconds"], cell["size"]
        rate, flops = cell["tokens_per_step"] / seconds, cell.get("flops_per_token")
        first = min((other for other in panel if other["method"] == cell["method"]), key=lambda other: other["size"])
        dense = [one["step_seconds"] for one in panel if (one["method"], one["size"]) == (baseline["method"], size)]
        row = _heading(cell)
        row["method"] += f" (mean of {cell['period']} steps)" if cell.get("period", 1) > 1 else ""
        row["step, ms"] = ms(seconds)
        row["quartiles, ms"] = " to ".join(map(ms, cell.get("quartiles") or [None]))
        row |= {f"{name}, ms": ms(cell["phases"].get(phase)) for phase, name in PHASES.items()}
        row["tokens/s"] = number(rate, ",.0f")
        if any(other.get("flops_per_token") for other in panel):  # attention is not causal, as in TorchTitan's MFU
            row["TFLOP/s per rank"] = number(rate * flops / size if flops else None, ".1f", 1e-12)
        start = f" (from {first['size']})" if first["size"] > smallest else ""
        row["efficiency, %"] = f"{100 * first['step_seconds'] * first['size'] / (seconds * size):.1f}{start}"
        row[f"speed-up over {baseline['label']}"] = number(dense[0] / seconds if dense else None, ".2f")
        row["peak memory per rank, MB"] = number(cell.get("peak_memory_bytes"), ",.0f", 1e-6)
        yield row | {f"sent per step and rank, MB: {level}": _sent(cell, level) for level in levels}


def _sent(cell: Cell, level: str) -> str:
    """Return bytes as the ranks counted them; of DDP and HSDP, which count none, as the interfaces did."""
    nic = (cell.get("nic") or {}).get(level)
    if cell["sent"] or nic is None:
        return megabytes(cell["sent"].get(level))
    return f"{megabytes(nic / cell['ranks_per_node'])} (interface)"


def _residual(cell: Cell) -> float | None:
    predicted = (cell.get("predicted") or {}).get("step_seconds")
    return predicted / cell["step_seconds"] - 1 if predicted and cell["launcher"] != "predicted" else None


def largest_residual(panel: list[Cell]) -> str:
    worst = max(panel, key=lambda cell: abs(_residual(cell) or 0.0))
    largest = f"{100 * (_residual(worst) or 0.0):+.1f} % ({worst['label']}, {worst['size']} ranks)"
    return f"Largest residual, (predicted - measured) / measured: {largest}."


def prediction(panel: list[Cell]) -> Iterator[Row]:
    for cell in panel:
        if (residual := _residual(cell)) is not None:
            predicted, phases = cell["predicted"], cell["phases"]
            row = _heading(cell) | {"predicted, ms": ms(predicted["step_seconds"])}
            row |= {"measured, ms": ms(cell["step_seconds"]), "residual, %": f"{100 * residual:+.1f}"}
            for part in ("compute", "exposed", "optimizer"):
                row[f"{PHASES[part]}, predicted / measured"] = f"{ms(predicted.get(part))} / {ms(phases.get(part))}"
            yield row


def interface_bytes(panel: list[Cell]) -> Iterator[Row]:
    for cell in panel:
        nic, counted = cell.get("nic") or {}, cell.get("counted") or {}
        for level in levels_of(nic):
            row = _heading(cell) | {"level": level}
            row |= {"counted by the ranks, MB": megabytes(counted.get(level)), "interface, MB": megabytes(nic[level])}
            row["interface / counted"] = number(nic[level] / counted[level] if counted.get(level) else None, ".3f")
            yield row


PER_STEP_AND_NODE = "MB (1e6 bytes) sent per step and node."
TABLES: dict[str, Callable[[Grid, Store], list[str]]] = {
    "step_times": by_set(step_times, "Step times", describe=set_up),
    "prediction": by_set(prediction, "Predicted and measured steps", describe=largest_residual),
    "interface_bytes": by_set(interface_bytes, "Bytes of the ranks and of the interfaces", PER_STEP_AND_NODE),
}

"""table.md of shard_axis.py, from the stored cells alone."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import markdown, megabytes, ms, read, spread, write
from scripts.studies.shard_axis_forms import CLOSE, CLOSE_TAGC, DENSE, FASTER, LOSSES, SHORTER, SPEED, TAGC, Form

# Columns of a step's parts, and the phases in each.
PARTS = {
    "weights": ("shard weights",),
    "gradients": ("shard gradients",),
    "index": ("shard index",),
    "update": ("shard update",),
    "replicas": ("exchange",),
    "optimizer": ("check", "pack", "clip", "update"),
    "compute, coding": ("forward_backward",),
}
Cells = Sequence[Mapping[str, Any]]


def write_report(folder: Path) -> Path:
    """Of the folders of SECTIONS those that are there."""
    sections = [make(folder / name) for name, make in SECTIONS.items() if (folder / name / "sweep.json").exists()]
    path = folder / "table.md"
    write(path, "\n\n".join(["# The shard axis across nodes", *sections]) + "\n")
    return path


def cells_of(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured, and what failed, by name with the reason."""
    found = {path.stem: read(path) for path in sorted((folder / "cells").glob("*.json"))}
    good = [cell for cell in found.values() if cell is not None and "error" not in cell]
    return good, [f"{name}: {cell['error']}" for name, cell in found.items() if cell is not None and "error" in cell]


def _ended(folder: Path, failed: Sequence[str]) -> str:
    sweep = read(folder / "sweep.json") or {}
    lines = ["Made by", "```", sweep.get("command", ""), "```", *sweep.get("notes", [])]
    return "\n".join([*lines, *(f"- failed: {one}" for one in failed)])


# --------------------------------------------------------------------------------------------- step times


def _by_form(cells: Cells, forms: Mapping[str, Form]) -> dict[int, dict[str, Mapping[str, Any]]]:
    """By number of micro-batches, then by form in the order of `forms`."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for name in forms:
        for cell in cells:
            if cell["form"] == name:
                found.setdefault(cell["micro_batches"], {})[name] = cell
    return dict(sorted(found.items()))


def _ratio(over: float | None, under: float | None, form: str = ".2f") -> str:
    return format(over / under, form) if over and under else "-"


def step_rows(cells: Cells, forms: Mapping[str, Form]) -> list[dict[str, str]]:
    """A step and its parts, by micro-batches and form, held against FSDP2's own and ZeRO++ as published."""
    rows = []
    for count, by_form in _by_form(cells, forms).items():
        for name, cell in by_form.items():
            row = {"micro-batches": str(count), "form": forms[name].title, "step, ms": ms(cell["step_seconds"])}
            for against in ("dense", *([FASTER[0][1]] if FASTER[0][1] in forms else [])):
                other = by_form.get(against)
                row[f"faster than {forms[against].title}"] = _ratio(
                    other and other["step_seconds"], cell["step_seconds"]
                )
            phases = cell["by_phase"]
            for part, names in PARTS.items():
                row[f"{part}, ms"] = ms(sum(phases.get(one, 0.0) for one in names))
            rows.append(row)
    return rows


def byte_rows(cells: Cells, forms: Mapping[str, Form]) -> list[dict[str, str]]:
    """Bytes a step and node: of the interfaces, counted by kind, and in closed form."""
    rows = []
    for count, by_form in _by_form(cells, forms).items():
        for name, cell in by_form.items():
            for level, kinds in cell["by_kind"].items():
                nic, counted = cell["nic"][level], sum(kinds.values())
                if not counted:
                    continue
                inside = {key: value for key, value in cell["planned"].items() if key.startswith("network")}
                planned = sum(inside.values())
                if level != "network":
                    planned = sum(cell["planned"].values()) - planned
                told = ", ".join(f"{kind} {megabytes(value)}" for kind, value in sorted(kinds.items()) if value)
                row = {"micro-batches": str(count), "form": forms[name].title, "link": level}
                row |= {"interface": megabytes(nic), "counted": megabytes(counted), "closed form": megabytes(planned)}
                row |= {"interface / counted": _ratio(nic, counted, ".3f")}
                row |= {"interface / closed form": _ratio(nic, planned, ".3f"), "counted by kind": told}
                rows.append(row)
    return rows


def verdicts(cells: Cells) -> list[dict[str, str]]:
    """The targets of step times."""
    rows = []
    for count, by_form in _by_form(cells, SPEED).items():
        for name, other, target in FASTER:
            if name in by_form and other in by_form:
                found = by_form[other]["step_seconds"] / by_form[name]["step_seconds"]
                row = {"micro-batches": str(count), "faster": SPEED[name].title, "than": SPEED[other].title}
                rows.append(row | _verdict(found, target, ".2f", found >= target))
    return rows


def exchange_rows(cells: Cells) -> list[dict[str, str]]:
    """Time in the exchange of gradients, index included, against FSDP2's own."""

    def seconds(cell: Mapping[str, Any]) -> float:
        return sum(cell["by_phase"].get(name, 0.0) for name in (*PARTS["gradients"], *PARTS["index"]))

    rows = []
    for count, by_form in _by_form(cells, TAGC).items():
        for name, cell in by_form.items():
            if name == DENSE or DENSE not in by_form:
                continue
            dense, own = seconds(by_form[DENSE]), seconds(cell)
            found = dense / own if own else 0.0
            row = {"micro-batches": str(count), "form": TAGC[name].title, "dense, ms": ms(dense), "own, ms": ms(own)}
            rows.append(row | _verdict(found, SHORTER, ".2f", found >= SHORTER))
    return rows


def _verdict(found: float, target: float, form: str, holds: bool) -> dict[str, str]:
    return {"ratio": format(found, form), "target": format(target, form), "holds": "yes" if holds else "no"}


def _speed(folder: Path) -> str:
    cells, failed = cells_of(folder)
    return f"""## Step times, two nodes of two ranks

{_ended(folder, failed)}

Weights are gathered in BF16, gradients are FP32; medians over the measured steps, of the slowest rank. "Weights" to
"update" is time in collectives of the shard axis, others waited for included; "replicas" is the exchange of the
replicate axis and, with three levels, coding of the update. ZeRO++ as published gathers across nodes in every forward
pass. Three levels as published: BF16 values after a step, a secondary partition over two ranks; across nodes
gradients are reduce-scattered in FP32, which is as many bytes as the published all-reduce in 16 bits.

{markdown(step_rows(cells, SPEED))}

### Targets

{markdown(verdicts(cells))}

### MB (1e6 bytes) a step and node

{markdown(byte_rows(cells, SPEED))}"""


def _tagc(folder: Path) -> str:
    cells, failed = cells_of(folder)
    counts = " and ".join(str(count) for count in _by_form(cells, TAGC))
    return f"""## TAGC, two nodes of a rank, {counts} micro-batch(es)

{_ended(folder, failed)}

All in FP32. In the paper compute is 22.4 % of FSDP's backward pass.

{markdown(step_rows(cells, TAGC))}

### Exchange of gradients

{markdown(exchange_rows(cells))}

### MB (1e6 bytes) a step and node

{markdown(byte_rows(cells, TAGC))}"""


# ------------------------------------------------------------------------------------------------- losses


def loss_rows(cells: Cells) -> list[dict[str, str]]:
    """Validation losses, and gaps to the dense run of the same seed, by steps and form."""
    rows = []
    for steps in sorted({cell["steps"] for cell in cells}):
        by_form = {
            name: {c["seed"]: c["validation_loss"] for c in cells if c["form"] == name and c["steps"] == steps}
            for name in LOSSES
        }
        for name, losses in by_form.items():
            if not losses:
                continue
            gaps = [loss / by_form[DENSE][seed] - 1 for seed, loss in sorted(losses.items()) if seed in by_form[DENSE]]
            row = {"steps": str(steps), "form": LOSSES[name].title, "seeds": str(len(losses))}
            row["validation loss"] = spread(list(losses.values()), ".4f")
            if name == DENSE or not gaps:
                rows.append(row | dict.fromkeys(("gap, %", "by seed", "target", "holds"), "-"))
                continue
            target = CLOSE_TAGC if name.startswith("tagc") else CLOSE
            row["gap, %"] = spread([100 * gap for gap in gaps], "+.2f")
            row["by seed"] = ", ".join(f"{100 * gap:+.2f}" for gap in gaps)
            row["target"] = f"{100 * target:.1f}"
            rows.append(row | {"holds": "yes" if statistics.mean(gaps) <= target else "no"})
    return rows


def _losses(folder: Path) -> str:
    cells, failed = cells_of(folder)
    return f"""## Losses, two nodes of two ranks

{_ended(folder, failed)}

The embedded recipe with AdamW, FP32, 16 sequences a step. Gaps are to the dense run of the same seed, in their mean and
sample deviation; more than the target is what does not hold.

{markdown(loss_rows(cells))}"""


# A sweep chooses its own links: twenty micro-batches, as in TAGC's paper, are another sweep than one and two.
SECTIONS: dict[str, Callable[[Path], str]] = {"speed": _speed, "tagc": _tagc, "tagc_20": _tagc, "losses": _losses}

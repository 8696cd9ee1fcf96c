"""Tables of single studies: the shard axis, BF16 weights, and the methods side by side."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scripts.common import markdown, megabytes, ms, number, spread
from scripts.study.grid import Grid
from scripts.study.store import Line, Store
from scripts.study.sweep_tables import PER_STEP_AND_NODE, Cell, Row, by_set, section

OPTIMIZER_PHASES = ("check", "wait", "pack", "exchange", "clip", "update")
# Columns of a step with a shard axis, and the phases in each.
SHARD_PARTS: dict[str, tuple[str, ...]] = {
    **{name: (f"shard {name}",) for name in ("weights", "gradients", "index", "update")},
    "replicas": ("exchange",),
    "optimizer": ("check", "pack", "clip", "update"),
    "compute and coding": ("forward_backward",),
}
PLANNED = "planned_shard_axis_bytes_per_step_and_rank"  # of the trainer's summary
LEAST_BYTES = 1e3  # per step; less are scalars
LOSS_TARGET = 0.005  # of the dense loss


def yes_or_no(found: bool) -> str:
    return "yes" if found else "no"


def _ratio(over: float | None, under: float | None, form: str = ".2f") -> str:
    return format(over / under, form) if over and under else "-"


def _by_setting(cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Cell]]]:
    """Yield the cells by number of micro-batches, each with all cells of that number, by method."""
    for count in sorted({cell["micro_batches"] for cell in cells}):
        same = {cell["method"]: cell for cell in cells if cell["micro_batches"] == count}
        yield from ((cell, same) for cell in same.values())


def _form(cell: Cell) -> Row:
    return {"micro-batches": str(cell["micro_batches"]), "method": cell["label"]}


def _seconds(cell: Cell, phases: Iterable[str]) -> float:
    return sum(cell["by_phase"].get(phase, 0.0) for phase in phases)


def shard_steps(cells: list[Cell]) -> Iterator[Row]:
    for cell, same in _by_setting(cells):
        row = _form(cell) | {"step, ms": ms(cell["step_seconds"])}
        for other in (same[name] for name in ("dense", "dense-last", "zeropp-published") if name in same):
            row[f"speed-up over {other['label']}"] = _ratio(other["step_seconds"], cell["step_seconds"])
        yield row | {f"{part}, ms": ms(_seconds(cell, phases)) for part, phases in SHARD_PARTS.items()}


def shard_exchange(cells: list[Cell]) -> Iterator[Row]:
    """Time of the exchange of gradients, index included, of methods with a target for it, against FSDP2's."""
    for cell, same in _by_setting(cells):
        if (target := cell["targets"].get("exchange")) and "dense" in same:
            dense, own = (_seconds(one, ("shard gradients", "shard index")) for one in (same["dense"], cell))
            found = dense / own if own else 0.0
            row = _form(cell) | {"dense, ms": ms(dense), "own, ms": ms(own), "ratio": f"{found:.2f}"}
            yield row | {"target": f"{target:.2f}", "holds": yes_or_no(found >= target)}


def shard_bytes(cells: list[Cell]) -> Iterator[Row]:
    for cell, _ in _by_setting(cells):
        for level, kinds in cell.get("by_kind", {}).items():
            nic, counted = cell["nic"][level], sum(kinds.values())
            if not counted:
                continue
            network = sum(value for key, value in cell["planned"].items() if key.startswith("network"))
            planned = network if level == "network" else sum(cell["planned"].values()) - network
            by_kind = ", ".join(f"{kind} {megabytes(value)}" for kind, value in sorted(kinds.items()) if value)
            row = _form(cell) | {"link": level, "interface": megabytes(nic)}
            row |= {"counted": megabytes(counted), "closed form": megabytes(planned)}
            row |= {"interface / counted": _ratio(nic, counted, ".3f")}
            yield row | {"interface / closed form": _ratio(nic, planned, ".3f"), "counted by kind": by_kind}


def shard_losses(grid: Grid, store: Store) -> list[str]:
    parts = []
    for one in grid.sets:
        by_method: dict[str, dict[int, float]] = {}
        for line in store.of(one.name):
            if "validation_loss" in (found := line["result"]) and "step_seconds" not in found:
                by_method.setdefault(line["method"], {})[line["options"]["debug.seed"]] = found["validation_loss"]
        rows = []
        for name in (name for name in grid.methods if name in by_method):
            losses, dense = by_method[name], by_method.get("dense", {})
            row = {"steps": str(one.steps), "method": grid.methods[name]["label"], "seeds": str(len(losses))}
            row["validation loss"] = spread(list(losses.values()), ".4f")
            gaps = [loss / dense[seed] - 1 for seed, loss in sorted(losses.items()) if seed in dense]
            if name == "dense" or not gaps:
                rows.append(row | dict.fromkeys(("gap, %", "by seed", "target", "holds"), "-"))
                continue
            target = grid.methods[name].get("targets", {}).get("loss", LOSS_TARGET)
            row |= {"gap, %": spread([100 * gap for gap in gaps], "+.2f")}
            row |= {"by seed": ", ".join(f"{100 * gap:+.2f}" for gap in gaps), "target": f"{100 * target:.1f}"}
            rows.append(row | {"holds": yes_or_no(statistics.mean(gaps) <= target)})
        parts += [f"### Set {one.name}", markdown(rows)] if rows else []
    return section("Losses by seed", "Gaps are to the run of the same seed with FSDP2's collectives.", parts)


def sent_bytes(grid: Grid, store: Store) -> list[str]:
    """Return a table for each set and kind of link over which its first method sends payload."""
    parts = []
    for one in grid.sets:
        found = [line for line in store.of(one.name) if "interfaces" in line["result"]]
        runs = {(line["options"]["training.global_batch_size"], line["method"]): line for line in found}
        for level in ("network", "node"):
            rows = []
            for sequences, method in itertools.product(one.sequences, one.methods):
                lines = [runs.get((sequences, name)) for name in (one.methods[0], method)]
                first, own = (line and link_bytes(line, level) for line in lines)
                if first and own and first["counted"] > LEAST_BYTES:
                    row = {"sequences": str(sequences), "method": grid.methods[method]["label"]}
                    row |= bytes_row(own, first, grid.methods[method].get("targets", {}).get("bytes"), sequences)
                    rows.append(row | {"validation loss": f"{own['validation_loss']:.4f}"})
            parts += [f"### Set {one.name}: {level}", markdown(rows)] if rows else []
    return section("Bytes of a step", BYTES_READING, parts)


def link_bytes(line: Line, level: str) -> dict[str, float]:
    """Return what a replica, or a node if there are fewer replicas, sends over a kind of link, from a stored run.

    `planned` is what collectives of the shard axis need; `ring` the same over the network on a ring of all ranks, as
    with NCCL. gloo sends gradients directly to their owners instead, which is a third more.
    """
    run, options = line["result"], line["options"]
    ranks, per_node = options["launch.ranks"], options.get("launch.ranks_per_node", 1)
    nodes, planned = run["interfaces"]["sent_per_step"][level], run.get(PLANNED) or {}
    senders = max(len(nodes), ranks // options.get("parallelism.data_parallel_shard_degree", 1))
    found = {key: sum(node[key] for node in nodes) / senders for key in ("interface", "counted")}
    found["masks"] = sum(node["by_kind"].get("mask", 0.0) for node in nodes) / senders
    found["planned"] = per_node * sum(value for key, value in planned.items() if key.startswith(level))
    longer = 1 - (ranks - 1) / (per_node * max(1, ranks - per_node))
    ring = found["planned"] - per_node * longer * planned.get("network gradients", 0.0)
    return found | {"ring": ring if level == "network" else 0.0, "validation_loss": run["validation_loss"]}


def bytes_row(own: dict[str, float], first: dict[str, float], target: Any, sequences: int) -> dict[str, str]:
    # The validation after the first step leaves its secondary partition to the second step, which then sends less.
    saved = max(0.0, own["planned"] - own["counted"])
    ratios = {
        kind: (own[kind] - own["masks"] + saved) / (first["ring"] or first[kind] - first["masks"])
        for kind in ("interface", "counted")
    }
    if isinstance(target, dict):  # of the shard axis, over the network
        target = target[str(sequences)] if first["ring"] else None
    row = {name: megabytes(own[name]) for name in ("interface", "counted")}
    row["planned"] = megabytes(own["planned"] or None)
    row["interface / counted"] = _ratio(own["interface"], own["counted"], ".3f")
    row |= {"masks": megabytes(own["masks"]), "interface without masks": megabytes(own["interface"] - own["masks"])}
    row |= {f"ratio, {kind}": f"{ratio:.3f}" for kind, ratio in ratios.items()}
    verdict = "-" if target is None else yes_or_no(max(ratios.values()) <= target)
    return row | {"target": number(target, ".2f"), "holds": verdict}


def weights(grid: Grid, store: Store) -> list[str]:
    """Losses of BF16 weights by density and compute dtype, against FP32 weights of the same seed."""
    runs: dict[tuple[float, str], dict[str, dict[int, Cell]]] = {}  # by setting, label and seed
    for line in (line for line in store.own.values() if "validation_loss" in line["result"]):
        options, run = line["options"], line["result"]
        forms = runs.setdefault((options["sync.scape.density"], options["training.mixed_precision_param"]), {})
        forms.setdefault(run["label"], {})[options["debug.seed"]] = run
    rows, base = [], grid.methods["fp32"]["label"]
    for (density, compute), forms in sorted(runs.items()):
        plain = forms.get(base, {})
        for form, found in sorted(forms.items(), key=lambda item: (item[0] != base, -len(item[1]), item[0])):
            losses = {seed: run["validation_loss"] for seed, run in sorted(found.items())}
            pairs = [(loss, plain[seed]["validation_loss"]) for seed, loss in losses.items() if seed in plain]
            gaps = [100 * (loss / dense - 1) for loss, dense in pairs if form != base]
            row = {"density": f"{density:g}", "forward": compute, "weights": form}
            row["validation loss, by seed"] = ", ".join(f"{loss:.4f}" for loss in losses.values())
            row["gap to FP32 weights, %"] = spread(gaps, "+.2f") if gaps else ""
            columns = {"distance from the master, L2": ("master_distance", ".2e")}
            columns |= {"excess length": ("excess_length", "+.2e")}
            for column, (key, form_of) in columns.items():
                values = [run[key] for run in found.values() if key in run]
                row[column] = format(max(values), form_of) if values else ""
            rows.append(row)
    return [markdown(rows)] if rows else []


def methods(grid: Grid, store: Store) -> list[str]:
    """One run of each method: loss, step time, the optimizer's share and bytes."""
    rows = []
    for run in (line["result"] for line in store.own.values() if "seconds_by_phase" in line["result"]):
        seconds, sent = run["seconds_by_phase"], sum(run["bytes_sent_per_step_and_rank"].values())
        own, planned = sum(seconds.get(p, 0.0) for p in OPTIMIZER_PHASES), run["planned_bytes_per_step_and_rank"]
        without = own - seconds.get("exchange", 0.0)
        row = {"method": run["label"], "final validation loss": f"{run['validation_loss']:.4f}"}
        row["step, ms"] = f"{1e3 * run['seconds_per_step']:.0f}"
        row["optimizer, % of forward + backward"] = f"{100 * own / seconds['forward_backward']:.1f}"
        row["without the exchange, %"] = f"{100 * without / seconds['forward_backward']:.1f}"
        row |= {"sent per step and rank, MB": f"{sent / 1e6:.3f}", "after warm-up, MB": f"{planned / 1e6:.3f}"}
        rows.append(row | {"of dense, %": f"{100 * planned / run['dense_bytes_per_step_and_rank']:.1f}"})
    return [markdown(rows)] if rows else []


BYTES_READING = """\
MB (1e6 bytes) per step after the first, of a replica, or of a node where a replica covers several. "Interface" is what
the interfaces themselves sent, with headers, gloo's own messages and TorchTitan's scalars; "counted" what the ranks
count; "planned" the closed form of the shard axis. Ratios are to the first method, without masks on both sides; with a
shard axis across nodes, to what FSDP2's own collectives need on a ring over all ranks. A secondary partition that the
validation after the first step has gathered is added to the second step's bytes."""
SHARD_READING = """\
Medians over the measured steps, of the slowest rank. "Weights" to "update" is time in collectives of the shard axis,
waiting for other ranks included; "replicas" is the exchange of the replicate axis and, with three levels, coding of the
update. ZeRO++ as published gathers across nodes in every forward pass. Three levels as published: BF16 values after a
step, a secondary partition over two ranks; across nodes gradients are reduce-scattered in FP32, as many bytes as the
published all-reduce in 16 bits. In TAGC's paper compute is 22.4 % of FSDP's backward pass."""
TABLES: dict[str, Callable[[Grid, Store], list[str]]] = {
    "shard_steps": by_set(shard_steps, "Step times", SHARD_READING),
    "shard_exchange": by_set(shard_exchange, "Exchange of gradients"),
    "shard_bytes": by_set(shard_bytes, "Bytes of the shard axis", PER_STEP_AND_NODE),
    "shard_losses": shard_losses,
    "sent_bytes": sent_bytes,
    "weights": weights,
    "methods": methods,
}

"""The launchers `simulated`, `local` and `predicted`, and the stored result of a run."""

import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import numpy as np

from scripts.common import ALONE, Curve, command_of, losses
from scripts.study.costs import planned_run
from scripts.study.grid import CURVE_POINTS, BudgetSet, RunSpec, largest_divisor
from scripts.study.sittings import checkpoint_arguments
from scripts.study.store import SETUP, Store
from torchtitan_scape.core.files import write_whole
from torchtitan_scape.models.registry import planned_recipe
from torchtitan_scape.planner.step import Assumptions, predict
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, Machine, get_machine

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ARRAYS = "observations.npz"


def process_command(spec: RunSpec, out: Path) -> list[str]:
    """Return the command of a run on this host: one process for simulated replicas, `local` under the launcher."""
    arguments = [
        *spec.arguments,
        *checkpoint_arguments(spec),
        f"--job.dump_folder={out}",
        "--metrics.enable_tensorboard",
    ]
    _copy_checkpoint(spec, out)
    if spec.of.launcher == "simulated":
        variables = [f"{name}={value}" for name, value in ALONE.items()]
        return ["env", *variables, sys.executable, "-m", program_of(spec), *arguments]
    launcher = ["-m", "torchtitan_scape.runtime.launch", f"--nproc_per_node={spec.size}", "--rdzv_backend=launchers"]
    return [sys.executable, *launcher, "--rdzv_endpoint=localhost:0", "-m", "torchtitan_scape.train", *arguments]


def program_of(spec: RunSpec) -> str:
    """Return the module that a run starts."""
    return str(spec.about.get("program", "torchtitan_scape.train"))


def _copy_checkpoint(spec: RunSpec, out: Path) -> None:
    """Copy the checkpoint at half of the steps of the method that a run with `start_from` continues."""
    if not (method := spec.about.get("start_from")):
        return
    folders = sorted(out.parent.glob(f"{spec.of.name}-{method}-????????/checkpoint/step-{spec.steps // 2}"))
    if not folders:
        raise ValueError(f"{out.parent} has no checkpoint of {method} in set {spec.of.name}; run {method} again first")
    shutil.copytree(folders[-1], out / "checkpoint" / folders[-1].name)


def result(spec: RunSpec, out: Path, log: str, folder: Path) -> dict[str, Any]:
    """Return what is stored of a run that has ended. Raises ValueError if it is not what the grid asks for."""
    parameters = spec.of.parameters
    found = re.search(r"size: ([\d,]+) total parameters", log)
    count = int(found[1].replace(",", "")) if found else parameters
    if parameters and count != parameters:
        raise ValueError(f"the model has {count} parameters, the grid says {parameters} for set {spec.of.name}")
    summary = json.loads((out / "summary.json").read_text())
    if summary["steps"] != spec.steps or not math.isfinite(summary["validation_loss"]):
        raise ValueError(f"ended at step {summary['steps']} with validation loss {summary['validation_loss']}")
    head = spec.head | {"parameters": count}
    if not spec.of.batch:
        return head | summary | {"curves": _curves(spec, out, folder)}
    if changed := re.search(r"Resumed from .*; differs from the run that saved it: (.*)", log):
        raise ValueError(f"a checkpoint of other options was continued ({changed[1]}); delete {out}")
    sent = summary["bytes_sent_per_rank"]
    if sent is None:
        raise ValueError(f"it continued from a checkpoint of an earlier version, without its bytes; delete {out}")
    curves = losses(out, **{level: f"sync/bytes_sent/{level}" for level in sent})
    corpora = re.findall(r"digest ([0-9a-f]+)", log)  # the last one is of the training text
    validated = [step for step, _ in curves["validation"]]
    return {
        **head,
        "corpus": corpora[-1] if corpora else None,
        **{key: summary[key] for key in ("validation_loss", "tokens", "skipped_steps")},
        "training_loss": curves["training"][-1][1],
        "seconds_per_step": round(summary["seconds_per_step"], 6),
        "bytes_per_step": round(sum(sent.values()) / spec.steps, 6),
        "dense_bytes_per_step": summary["dense_bytes_per_step_and_rank"],
        "validation": [[step, round(loss, 6)] for step, loss in curves["validation"]],
        "training": thin(curves["training"]),
        "bytes": cumulative([curves[level] for level in sent], validated),
    }


def _curves(spec: RunSpec, out: Path, folder: Path) -> dict[str, Any]:
    """Return a run's curves; with observations also norms, and its arrays go into the study's file."""
    tags = {}
    if (out / ARRAYS).exists():
        tags = {"norm": "grad_norm"} | ({"residual": "sync/residual_norm"} if spec.about.get("start_from") else {})
        prefix = f"{spec.of.name}/{spec.method}/"
        arrays = {k: v for k, v in load_arrays(folder / ARRAYS).items() if not k.startswith(prefix)}
        arrays |= {prefix + key: value for key, value in load_arrays(out / ARRAYS).items()}
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_whole(folder / ARRAYS, content.getvalue())
    return {key: [[s, round(value, 6)] for s, value in curve] for key, curve in losses(out, **tags).items()}


def arrays_of(folder: Path, prefix: str) -> IO[bytes]:
    """Return the arrays of a study whose names have the prefix, without it, as a file of their own."""
    content = io.BytesIO()
    found = load_arrays(folder / ARRAYS).items()
    np.savez(content, **{key.removeprefix(prefix): value for key, value in found if key.startswith(prefix)})
    content.seek(0)
    return content


def load_arrays(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with np.load(path) as file:
        return dict(file)


def thin(curve: Curve) -> list[list[float]]:
    """Return at most CURVE_POINTS points: the first step, then means of step and loss over neighbors."""
    rest = curve[1:]
    size = max(1, -(-len(rest) // (CURVE_POINTS - 1)))
    groups = [curve[:1], *(rest[i : i + size] for i in range(0, len(rest), size))]
    return [[round(fmean(s for s, _ in g), 1), round(fmean(loss for _, loss in g), 4)] for g in groups if g]


def cumulative(levels: Sequence[Curve], at: Sequence[int]) -> list[list[int]]:
    """Return (step, bytes sent by a rank until then) at the steps `at`.

    Args:
        levels: For each link level (step, bytes per step since the previous point). The last rate continues.
    """
    totals = np.zeros(len(at))
    for curve in levels:
        steps, rates = zip(*curve, strict=True)
        ends = [0, *steps, max([*steps, *at])]
        totals += np.interp(at, ends, [0, *np.cumsum(np.diff(ends) * [*rates, rates[-1]])])
    return [[step, round(total)] for step, total in zip(at, totals, strict=True)]


def predicted_set(store: Store, one: BudgetSet) -> Callable[[RunSpec], dict[str, Any]]:
    """Return the function that predicts the steps of a set on the `machine` of its `launch`.

    `network`: GB/s that a rank sends, in the place of the machine's; `shard`: shard degree.
    """
    machine = get_machine(one.launch.get("machine", "vista"))
    links, assumptions = Links.from_machine(machine), Assumptions()
    if "network" in one.launch:
        links = links.with_bandwidth("network", one.launch["network"] * 1e9)
    notes = [
        f"Nothing was run. Links: {links.source}; forward and backward at {100 * assumptions.mfu:g} % of the peak; "
        f"optimizer passes at {100 * assumptions.memory_efficiency:g} % of its memory bandwidth, from byte counts.",
        "An overlapped exchange is hidden behind at most two thirds of the last micro-batch.",
    ]
    store.note(SETUP, one.name, {}, {"launcher": "predicted", "notes": notes}, command_of("scripts.study"))
    return lambda spec: predicted(spec, machine, links)


def predicted(spec: RunSpec, machine: Machine, links: Links) -> dict[str, Any]:
    """Return a step as the planner predicts it, with at most 4 sequences of a rank at a time. Raises ValueError."""
    relevant = ("--job.config_file", "--model.", "--training.")
    workload = planned_recipe([one for one in spec.arguments if one.startswith(relevant)], spec.size)[0]
    shard = spec.of.launch.get("shard", 1)
    per_node = min(machine.ranks_per_node or spec.size, spec.size)
    layout = plan_layout(spec.size, ranks_per_node=per_node, machine=machine, replicate=-1, shard=shard)
    batch = spec.sequences or workload.batch
    micro_batch = largest_divisor(max(1, batch // spec.size), 4)
    run = planned_run(spec.options, spec.about.get("planned"))
    found = predict(run, workload, layout, links, batch=batch, micro_batch=micro_batch)
    phases = {"compute": found.compute, "exposed": found.exchange + found.shard}
    return {
        "launcher": "predicted",
        "recipe": spec.recipe_name,
        "label": spec.label,
        "size": spec.size,
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        "compute": "predicted",
        "steps": [found.step],
        "step_seconds": found.step,
        "phases": phases | {"optimizer": found.optimizer, "other": found.fixed},
        "tokens_per_step": batch * workload.sequence,
        "peak_memory_bytes": sum(found.memory.values()),
        "memory_kind": "predicted",
        "sent": found.sent,
    }

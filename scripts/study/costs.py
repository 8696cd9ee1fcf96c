"""Bytes and seconds of a study's methods by the planner: the only file of the package that asks it about methods.

The losses are those of a small model, whose step is latency alone. So the time axis takes the step that the planner
predicts for Llama-1.8B with the run's method; the bytes of a start or a warm-up count as dense steps.
"""

import dataclasses
import functools
from typing import Any

from scripts.study.grid import as_arguments
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.methods.options import DenseOptions, share_of_dense
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.models.registry import planned_recipe
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, predict
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, get_machine

WORKLOAD, MODEL = "llama_1_8b", "Llama-1.8B"
SEQUENCES, MICRO_BATCH = 16, 4  # per rank and step; at a time
# Title -> (preset, shard degree, GB/s of a rank between nodes if it is not the preset's).
MACHINES: dict[str, tuple[str, int, float | None]] = {
    "Vista": ("vista", 1, None),
    "Frontier": ("frontier", 8, None),
    "10 Gb/s": ("ethernet-10g", 1, None),
    "1 Gb/s": ("ethernet-10g", 1, 0.125),
}
Options = dict[str, Any]


def planned_run(options: Options, planned: Options | None = None) -> PlannedRun:
    """Return a run's method as the planner prices it, from its options. `planned` replaces some of the method's."""
    kind = options["sync.method"]
    section = METHODS[kind].options
    given = {f.name: options[key] for f in dataclasses.fields(section) if (key := f"sync.{kind}.{f.name}") in options}
    overlap = bool(options.get("sync.overlap", False))
    return PlannedRun(section(**(given | (planned or {}))), options.get("optimizer.name", "AdamS"), overlap)


def overlapped(options: Options) -> PlannedRun:
    """Return `planned_run` with an overlapped exchange if the method supports it, which changes no loss."""
    found = planned_run(options)
    return dataclasses.replace(found, overlap=found.options.supports_overlap())


@functools.cache
def step_seconds(machine: str, method: PlannedRun, replicas: int) -> float:
    """Return the predicted step of `MODEL` on one of MACHINES."""
    name, shard, bandwidth = MACHINES[machine]
    preset, workload = get_machine(name), get_workload(WORKLOAD)
    ranks = replicas * shard
    per_node = min(preset.ranks_per_node, ranks)
    layout = plan_layout(ranks, ranks_per_node=per_node, machine=preset, replicate=replicas, shard=shard)
    links = Links.from_machine(preset)
    if bandwidth is not None:
        links = links.with_bandwidth("network", 1e9 * bandwidth)
    return predict(method, workload, layout, links, batch=SEQUENCES * ranks, micro_batch=MICRO_BATCH).step


def run_seconds(options: Options, run: dict[str, Any], machine: str) -> float:
    """Return the predicted seconds of a run.

    Bytes beyond the planned ones, of dense steps at the start or of a density warm-up, count as as many dense steps.
    """
    method, replicas = overlapped(options), run["replicas"]
    dense = step_seconds(machine, PlannedRun(DenseOptions(), options["optimizer.name"]), replicas)
    step, (steady, whole) = step_seconds(machine, method, replicas), shares(options, run)
    at_start = min(1.0, max(0.0, whole - steady) / (1.0 - steady)) if steady < 1.0 else 0.0
    return run["steps"] * (step + at_start * (dense - step))


def shares(options: Options, run: dict[str, Any]) -> tuple[float, float]:
    """Return bytes over dense FP32 bytes: of a step after the start, planned, and of the whole run, counted.

    Both are 0 for one replica, which sends nothing.
    """
    if run["replicas"] == 1:
        return 0.0, 0.0
    counted = run["bytes_per_step"] / run["dense_bytes_per_step"]
    of_model = sorted((key, value) for key, value in options.items() if key.startswith("model."))
    model = _model(tuple(argument for option in of_model for argument in as_arguments(*option)))
    return share_of_dense(overlapped(options).options, model, run["replicas"]), counted


@functools.cache
def _model(arguments: tuple[str, ...]) -> LocalModel:
    """Return the model of a run's options, as arguments of the trainer, on one rank."""
    return planned_recipe(arguments, 1)[0].whole()


def describe() -> str:
    """Return the assumptions behind predicted seconds, for a report."""
    places = []
    for title, (preset, shard, bandwidth) in MACHINES.items():
        network = bandwidth or get_machine(preset).levels[-1].bandwidth
        places.append(f"{title} ({shard} rank(s) per replica, {network:g} GB/s per rank)")
    return (
        f"Predicted seconds combine the losses of the small model with the step time of {MODEL} on as many replicas as "
        f"the losses have, {SEQUENCES} sequences per rank of {get_workload(WORKLOAD).sequence:,} tokens per step: "
        f"{', '.join(places)}. Links are nominal; forward and backward reach {100 * Assumptions().mfu:g} % of the "
        "device's peak. Neither a loss of this model nor a second was measured."
    )

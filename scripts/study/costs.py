"""Bytes and seconds of a study's methods by the planner: the only file of the package that asks it about methods.

The losses are those of a small model, whose step is latency alone. So the time axis takes the step that the planner
predicts for Llama-1.8B with the run's method, at the density of each step where a warm-up changes it.
"""

import dataclasses
import functools
import statistics
from typing import Any

from scripts.study.grid import as_arguments
from torchtitan_scape.core.workloads import LocalModel, Workload, get_workload
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.scape.blocks import density_at
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
# The model of train_configs/study.toml.
STUDY = Workload("study", layers=2, width=80, heads=2, kv_heads=2, ffn=224, vocab=260, sequence=128, batch=32)
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


def method_at(options: Options, step: int) -> PlannedRun:
    """Return the method at a step of the density warm-up, with densities of three digits.

    While the mask is denser than the target, a coded payload is sent in INT8, and in FP32 in the first step.
    """
    kind, found = options["sync.method"], dataclasses.replace(planned_run(options), overlap=False)
    target = options.get(f"sync.{kind}.density")
    if target is None:
        return found
    density = density_at(step, target, int(options.get(f"sync.{kind}.density_warmup_steps", 0))) if step > 1 else 1.0
    if density <= target:
        return found
    replaced: Options = {"density": float(f"{density:.3g}")}
    if kind == "scape":
        coded = density < 1.0 and options.get("sync.scape.code") in FORMATS
        replaced["code"] = "int8" if coded else "float32"
    return dataclasses.replace(found, options=dataclasses.replace(found.options, **replaced))


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
    step, (steady, whole) = step_seconds(machine, method, replicas), planned_shares(options, run)
    at_start = min(1.0, max(0.0, whole - steady) / (1.0 - steady)) if steady < 1.0 else 0.0
    return run["steps"] * (step + at_start * (dense - step))


def planned_shares(options: Options, run: dict[str, Any]) -> tuple[float, float]:
    """Return bytes over dense FP32 bytes: of a step after the start, planned, and of the whole run, counted."""
    counted = run["bytes_per_step"] / run["dense_bytes_per_step"]
    of_model = sorted((key, value) for key, value in options.items() if key.startswith("model."))
    model = _model(tuple(argument for option in of_model for argument in as_arguments(*option)))
    return share_of_dense(overlapped(options).options, model, run["replicas"]), counted


@functools.cache
def _model(arguments: tuple[str, ...]) -> LocalModel:
    """Return the model of a run's options, as arguments of the trainer, on one rank."""
    return planned_recipe(arguments, 1)[0].whole()


def shares(options: Options, run: dict[str, Any]) -> tuple[float, float]:
    """Return bytes over dense FP32 bytes: of a step at the target density, and in the mean over the run.

    A selection in blocks has the planner's closed form, so that runs from before the masks' code count like later ones.
    Everything else is as counted.
    """
    kind, replicas = options["sync.method"], run["replicas"]
    in_blocks = f"sync.{kind}.block_size" in options and options.get(f"sync.{kind}.selection") == "block"
    known = replicas > 1 and run["parameters"] == STUDY.parameters
    if not (in_blocks and known):
        return counted_shares(run)
    # A top-k message that would be longer than dense gradients is not sent.
    sent = [min(1.0, _share(method_at(options, step), replicas)) for step in range(1, run["steps"] + 1)]
    return sent[-1], statistics.fmean(sent)


def counted_shares(run: dict[str, Any]) -> tuple[float, float]:
    """Return `shares` as the run counted them; at the target density between the last two validations."""
    dense, mean = run["dense_bytes_per_step"] or 1.0, run["bytes_per_step"]
    last = run["bytes"][-2:]
    (step, sent), (end, total) = last if len(last) == 2 else ((0, 0.0), (1, mean))
    return (total - sent) / (end - step) / dense, mean / dense


@functools.cache
def _share(method: PlannedRun, replicas: int) -> float:
    return share_of_dense(method.options, STUDY.local(1), replicas)


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

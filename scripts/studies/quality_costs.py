"""Predicted seconds of the quality study's runs: the small recipe's steps, each as long as a step of Llama-1.8B.

A step of a model of 0.2 M parameters is latency alone and tells nothing. So the time axis takes the step that the cost
model predicts for a real workload with the run's method and the density of that very step, warm-up included.
"""

import dataclasses
import functools
import itertools
import statistics
from typing import Any

from kernels.codec.formats import FORMATS
from kernels.scape.blocks import density_at
from scripts.studies.quality_cells import as_stored
from topology.layout import plan_layout
from topology.links import Links
from topology.machines import get_machine
from torchtitan_scape.core.workloads import Workload, get_workload
from torchtitan_scape.methods.cost import share_of_dense
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, predict

WORKLOAD = "llama_1_8b"
RANKS = 64
MICRO_BATCH = 4
# Preset -> (title, shard degree).
MACHINES = {"vista": ("Vista", 1), "frontier": ("Frontier", 8), "ethernet-10g": ("10 Gb/s cluster", 1)}
# Options of a method's section that decide its cost, besides its main options.
FIELDS = ("density", "wire", "block_size", "rank")
# The model of train_configs/study.toml.
STUDY = Workload("study", layers=2, width=80, heads=2, kv_heads=2, ffn=224, vocab=260, sequence=128, batch=32)
TITLE = f"loss of the small recipe, step time of Llama-1.8B on {RANKS} ranks"


def describe() -> str:
    """What stands behind the predicted seconds."""
    workload = get_workload(WORKLOAD)
    where = ", ".join(
        f"{title} {RANKS // shard} x {shard}, {get_machine(name).levels[-1].bandwidth:g} GB/s"
        for name, (title, shard) in MACHINES.items()
    )
    return (
        f"Predicted seconds: {TITLE}, {workload.batch:,} sequences of {workload.sequence:,} tokens a step, at the "
        "density of each step. Nothing of it was measured: nominal links (replicas x shards and what a rank sends "
        f"between nodes: {where}), {100 * Assumptions().mfu:g} % of the device's peak in forward and backward, dense "
        "gradients not overlapped with the backward pass. Of SCAPE's rule density and wire alone cost anything."
    )


@functools.cache
def step_seconds(machine: str, method: PlannedRun) -> float:
    preset, shard = get_machine(machine), MACHINES[machine][1]
    layout = plan_layout(
        RANKS, ranks_per_node=min(preset.ranks_per_node, RANKS), machine=preset, replicate=-1, shard=shard
    )
    workload = get_workload(WORKLOAD)
    links = Links.from_machine(preset)
    return predict(method, workload, layout, links, batch=workload.batch, micro_batch=MICRO_BATCH).step


def method_of(options: dict[str, Any], step: int) -> PlannedRun | None:
    """The method of a run at a step; None where it has no closed form. Densities of the warm-up have three digits.

    options: of a stored cell. A payload that is coded at the target density goes in INT8 while the mask is denser, and
    in FP32 in the first step (`Wire` of sync/scape/exchange.py).
    """
    kind, optimizer = options["sync.method"], options.get("optimizer.name", "AdamS")
    if kind not in METHODS:
        return None
    section = METHODS[kind].options
    keys = {field.name for field in dataclasses.fields(section)} & {*FIELDS, *section.main_options}
    fields = as_stored({f"sync.{kind}.{key}": key for key in keys})
    given = {field: options[name] for name, field in fields.items() if name in options}
    if "density" in given:
        warmup = int(options.get(f"sync.{kind}.density_warmup_steps", 0))
        density = density_at(step, given["density"], warmup) if step > 1 else 1.0
        if density > given["density"]:
            coded = density < 1.0 and given.get("wire") in FORMATS
            given["density"] = float(f"{density:.3g}")
            if "wire" in keys:
                given["wire"] = "int8" if coded else "float32"
    return PlannedRun(section(**given), optimizer)


def elapsed(options: dict[str, Any], machine: str, steps: int) -> list[float]:
    """Seconds after 0, 1, ... `steps` steps of a method that `method_of` knows."""
    methods = (method_of(options, step) for step in range(1, steps + 1))
    return list(itertools.accumulate((step_seconds(machine, m) for m in methods if m is not None), initial=0.0))


def shares(cell: dict[str, Any]) -> tuple[float, float]:
    """What a replica sends in a step at the target density, and in the mean over the run, over dense FP32 bytes.

    Masks and scales included, of a stored cell. What is sent in blocks has the planner's closed form, so that runs from
    before offsets had their code are priced like later ones. All else is as counted.
    """
    options, steps, replicas = cell["options"], cell["steps"], cell["replicas"]
    kind = options["sync.method"]
    in_blocks = f"sync.{kind}.block_size" in options and options.get(f"sync.{kind}.selection") == "block"
    known = replicas > 1 and cell["parameters"] == STUDY.parameters and not options.get(f"sync.{kind}.dense_names")
    if not (in_blocks and known) or method_of(options, steps) is None:
        return counted_shares(cell)
    # A top-k message that would be longer than dense gradients is not sent.
    sent = [min(1.0, _share(method, replicas)) for step in range(1, steps + 1) if (method := method_of(options, step))]
    return sent[-1], statistics.fmean(sent)


def counted_shares(cell: dict[str, Any]) -> tuple[float, float]:
    """`shares` as the run counted them; at the target density: between the last two validations."""
    dense, run = cell["dense_bytes_per_step"] or 1.0, cell["bytes_per_step"]
    last = cell["bytes"][-2:]
    (step, sent), (end, total) = last if len(last) == 2 else ((0, 0.0), (1, run))
    return (total - sent) / (end - step) / dense, run / dense


@functools.cache
def _share(method: PlannedRun, replicas: int) -> float:
    return share_of_dense(method.options, STUDY.local(1), replicas)

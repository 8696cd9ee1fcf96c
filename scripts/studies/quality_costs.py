"""Predicted seconds of the quality study's runs: the small recipe's steps, each as long as a step of Llama-1.8B.

A step of a model of 0.2 M parameters is latency alone and tells nothing. So the time axis takes the step that the cost
model predicts for a real workload with the run's method and the density of that very step, warm-up included.
"""

import functools
import itertools
from typing import Any

from kernels.scape.blocks import density_at
from topology.layout import plan_layout
from topology.links import Links
from topology.machines import get_machine
from torchtitan_scape.planner.cost import Assumptions, predict
from torchtitan_scape.planner.volumes import VOLUMES, Method
from torchtitan_scape.planner.workloads import get_workload

WORKLOAD = "llama_1_8b"
RANKS = 64
MICRO_BATCH = 4
# Preset -> (title, shard degree).
MACHINES = {"vista": ("Vista", 1), "frontier": ("Frontier", 8), "ethernet-10g": ("10 Gb/s cluster", 1)}
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
        "gradients not overlapped with the backward pass. Variants of SCAPE's rule cost what their density costs."
    )


@functools.cache
def step_seconds(machine: str, method: Method) -> float:
    preset, shard = get_machine(machine), MACHINES[machine][1]
    layout = plan_layout(
        RANKS, ranks_per_node=min(preset.ranks_per_node, RANKS), machine=preset, replicate=-1, shard=shard
    )
    workload = get_workload(WORKLOAD)
    links = Links.from_machine(preset)
    return predict(method, workload, layout, links, batch=workload.batch, micro_batch=MICRO_BATCH).step


def method_of(options: dict[str, Any], step: int) -> Method | None:
    """The method of a run at a step; None where it has no closed form. Densities of the warm-up have three digits."""
    kind, optimizer = options["sync.method"], options.get("optimizer.name", "AdamS").lower()
    given: dict[str, Any] = {"optimizer": optimizer}
    if kind == "dense":
        return Method(optimizer)
    if kind not in VOLUMES:
        return None
    for key, field in VOLUMES[kind].recipe.items():
        if (value := options.get(f"sync.{kind}.{key}")) is not None:
            given[field] = value
    if "density" in given:
        warmup = int(options.get(f"sync.{kind}.density_warmup_steps", 0))
        given["density"] = float(f"{density_at(step, given['density'], warmup) if step > 1 else 1.0:.3g}")
    return Method(kind, **given)


def elapsed(options: dict[str, Any], machine: str, steps: int) -> list[float]:
    """Seconds after 0, 1, ... `steps` steps of a method that `method_of` knows."""
    methods = (method_of(options, step) for step in range(1, steps + 1))
    return list(itertools.accumulate((step_seconds(machine, m) for m in methods if m is not None), initial=0.0))

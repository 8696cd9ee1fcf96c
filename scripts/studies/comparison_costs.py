"""What a compared method sends, and how long its run would take on real machines: by the planner, for any method.

A method's options have its cost (`MethodOptions.cost`), so that nothing here is of one method.
"""

import dataclasses
import functools
from typing import Any

from scripts.studies.quality_cells import as_stored
from scripts.studies.quality_costs import STUDY
from topology.layout import plan_layout
from topology.links import Links
from topology.machines import get_machine
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.cost import share_of_dense
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, predict

WORKLOAD, MODEL = "llama_1_8b", "Llama-1.8B"
SEQUENCES, MICRO_BATCH = 16, 4  # of a rank, a step and at a time
# Title -> (preset, shard degree, GB/s of a rank between nodes where it is not the preset's).
MACHINES: dict[str, tuple[str, int, float | None]] = {
    "Vista": ("vista", 1, None),
    "Frontier": ("frontier", 8, None),
    "10 Gb/s": ("ethernet-10g", 1, None),
    "1 Gb/s": ("ethernet-10g", 1, 0.125),
}


def describe() -> str:
    """What stands behind the predicted seconds."""
    places = []
    for title, (preset, shard, bandwidth) in MACHINES.items():
        network = bandwidth or get_machine(preset).levels[-1].bandwidth
        places.append(f"{title} ({shard} rank{'s' if shard > 1 else ''} a replica, each {network:g} GB/s)")
    workload = get_workload(WORKLOAD)
    return (
        f"Seconds are the planner's, for {MODEL} with as many replicas as the losses have, {SEQUENCES} sequences of "
        f"{workload.sequence:,} tokens a rank and step, on {', '.join(places)}: nominal links, "
        f"{100 * Assumptions().mfu:g} % of the device's peak in forward and backward; what can go out beside the last "
        "backward pass, dense and quantized gradients, does. Losses are those of the small model, in as many steps. "
        "Neither a loss of the large model nor a second was measured."
    )


def planned(options: dict[str, Any]) -> PlannedRun:
    """What the planner knows of a stored cell's method; with overlap where it can be, which changes no loss."""
    kind = options["sync.method"]
    section = METHODS[kind].options
    names = as_stored({f"sync.{kind}.{f.name}": f.name for f in dataclasses.fields(section)})
    given = {field: options[name] for name, field in names.items() if name in options}
    method = section(**given)
    return PlannedRun(method, options["optimizer.name"], overlap=method.cost().supports_overlap)


def shares(cell: dict[str, Any]) -> tuple[float, float]:
    """Bytes a step over those of dense FP32: planned, without the start, and counted in the mean over the whole run."""
    counted = cell["bytes_per_step"] / cell["dense_bytes_per_step"]
    return share_of_dense(planned(cell["options"]).options, STUDY.local(1), cell["replicas"]), counted


@functools.cache
def step_seconds(machine: str, method: PlannedRun, replicas: int) -> float:
    """Of one of MACHINES with so many replicas, in the mean over the method's period."""
    name, shard, bandwidth = MACHINES[machine]
    preset, ranks = get_machine(name), replicas * shard
    layout = plan_layout(
        ranks, ranks_per_node=min(preset.ranks_per_node, ranks), machine=preset, replicate=replicas, shard=shard
    )
    links = Links.from_machine(preset)
    if bandwidth is not None:
        links = links.with_bandwidth("network", 1e9 * bandwidth)
    workload = get_workload(WORKLOAD)
    return predict(method, workload, layout, links, batch=SEQUENCES * ranks, micro_batch=MICRO_BATCH).step


def run_seconds(cell: dict[str, Any], machine: str) -> float:
    """Of all steps of a cell's run.

    What it sent above the planned bytes, in dense steps at the start or with a density that falls, is taken as so many
    dense steps as send it.
    """
    method, replicas = planned(cell["options"]), cell["replicas"]
    dense = step_seconds(machine, PlannedRun(DenseOptions(), cell["options"]["optimizer.name"]), replicas)
    step, (steady, whole) = step_seconds(machine, method, replicas), shares(cell)
    at_start = min(1.0, max(0.0, whole - steady) / (1.0 - steady)) if steady < 1.0 else 0.0
    return cell["steps"] * (step + at_start * (dense - step))

"""The launcher of strong_scaling.py that runs nothing: steps by the cost model, from a machine and a recipe's model."""

from typing import Any

from scripts.studies.scaling_sweep import Cell, Sweep
from topology.layout import plan_layout
from topology.links import Links
from topology.machines import get_machine
from torchtitan_scape.core.workloads import WORKLOADS, get_workload
from torchtitan_scape.planner.step import Assumptions, predict


def run(sweep: Sweep) -> int:
    """Predicts what is missing and writes the report. Returns the number of failed cells."""
    args, machine = sweep.args, get_machine(sweep.args.machine)
    links = Links.from_json(args.links) if args.links else Links.from_machine(machine)
    if args.network:
        links = links.with_bandwidth("network", args.network * 1e9)
    assumptions = Assumptions(mfu=args.mfu)
    sweep.notes = [
        f"Nothing was run. Links: {links.source}; forward and backward at {100 * args.mfu:g} % of the device's peak; "
        f"optimizer passes at {100 * assumptions.memory_efficiency:g} % of its memory bandwidth, from byte counts.",
        "What overlaps with the backward pass (-overlap, DDP, HSDP) hides behind two thirds of the last micro-batch as "
        "far as it can; other gradients are exchanged after it.",
    ]
    return sweep.run(lambda cell: predicted(cell, links, assumptions, sweep), args.machine)


def predicted(cell: Cell, links: Links, assumptions: Assumptions, sweep: Sweep) -> dict[str, Any]:
    """A cell. Sequences at a time: as many of a rank's share as are at most 4. Raises ValueError."""
    if cell.recipe.stem not in WORKLOADS:
        raise ValueError(f"the cost model knows no model of {cell.recipe}; known are {', '.join(WORKLOADS)}")
    plan, machine, workload = cell.plan, get_machine(sweep.args.machine), get_workload(cell.recipe.stem)
    per_node = min(machine.ranks_per_node or cell.size, cell.size)
    layout = plan_layout(cell.size, ranks_per_node=per_node, machine=machine, replicate=-1, shard=sweep.args.shard)
    batch = sweep.args.batch or workload.batch
    each = max(1, batch // cell.size)
    micro_batch = next(n for n in (4, 3, 2, 1) if each % n == 0)
    if plan.planned is None:
        raise ValueError(f"the cost model needs a rank, such as {plan.name}-4")
    found = predict(
        plan.planned, workload, layout, links, batch=batch, micro_batch=micro_batch, assumptions=assumptions
    )
    phases = {"compute": found.compute, "exposed": found.exchange + found.shard}
    return {
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        "compute": "predicted",
        "steps": [found.step],
        "step_seconds": found.step,
        "quartiles": [found.step, found.step],
        "phases": phases | {"optimizer": found.optimizer, "other": found.fixed},
        "tokens_per_step": batch * workload.sequence,
        "peak_memory_bytes": sum(found.memory.values()),
        "memory_kind": "predicted",
        "sent": found.sent,
    }

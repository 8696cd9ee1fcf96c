"""Which method on which layout: every candidate predicted, and the rule that picks. Plain arithmetic: no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from topology.layout import Layout, plan_layout
from topology.links import Links
from topology.machines import Machine, get_machine
from torchtitan_scape.core.workloads import Workload, get_workload
from torchtitan_scape.planner.step import Assumptions, Prediction, predict
from torchtitan_scape.planner.volumes import PlannedRun

DENSE = (PlannedRun("adams", overlap=True), PlannedRun("adamw", overlap=True))
# Of 13 % of the bytes; it costs hardly any loss, and goes with any optimizer.
CODED = (PlannedRun("quantized", wire="e2m1", block=128, overlap=True),)
# By falling density, which is what costs loss, so that it is given up last; of 11.6, 2, 1.1 and 0.5 % of the bytes.
SPARSE = tuple(
    PlannedRun("scape", density, wire)
    for density, wire in ((0.1, "float32"), (0.1, "int4"), (0.05, "int4"), (0.025, "2bit"))
)
# Shown, and never advised: the first is not one of this trainer's methods, the others change the optimizer or the loss.
COMPARED = (
    PlannedRun("bf16", overlap=True),
    PlannedRun("muon", overlap=True),
    *(
        PlannedRun("sparta", wire="1bit", inner_steps=3, outer_momentum=0.0, optimizer=optimizer)
        for optimizer in ("adamw", "muon")
    ),
)
# The same with less memory.
LEAN: tuple[dict[str, Any], ...] = (
    {"offload": ("state",)},
    {"update": "sharded", "values": "bfloat16", "weights": "bfloat16"},
    {"update": "sharded", "values": "bfloat16", "weights": "bfloat16", "offload": ("state",)},
)
SHARDS = (1, 2, 4, 8)
LARGEST_MICRO_BATCH = 8
MIN_GAIN = 1.03  # below that gain the model's own error decides
NEAR_FASTEST = 1.05  # a density so near to the fastest is preferred if it is higher


@dataclass(frozen=True)
class PlanRequest:
    """What is asked."""

    workload: Workload
    machine: Machine
    nodes: int
    ranks_per_node: int
    links: Links
    batch: int
    assumptions: Assumptions

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def capacity(self) -> float:
        """Bytes of a rank's memory that a job can fill."""
        return self.machine.device.memory * 1e9 * self.assumptions.usable_memory

    def fits(self, candidate: "Candidate") -> bool:
        return candidate.memory <= self.capacity

    def on(self, nodes: int) -> "PlanRequest":
        """The same on other nodes, the batch rounded to their ranks."""
        return replace(self, nodes=nodes, batch=_whole_batch(self.batch, nodes * self.ranks_per_node))


@dataclass(frozen=True)
class Candidate:
    """A method on a layout. micro_batch: sequences at a time on a rank."""

    layout: Layout
    micro_batch: int
    prediction: Prediction

    @property
    def method(self) -> PlannedRun:
        return self.prediction.method

    @property
    def memory(self) -> float:
        return sum(self.prediction.memory.values())


def make_case(
    machine: str,
    nodes: int,
    model: str,
    *,
    ranks_per_node: int = 0,
    links: Links | None = None,
    network_bandwidth: float = 0.0,
    batch: int = 0,
    sequence: int = 0,
    assumptions: Assumptions | None = None,
) -> PlanRequest:
    """Checks what a user may get wrong. network_bandwidth: GB/s; 0s take the defaults. Raises ValueError."""
    found, workload = get_machine(machine), get_workload(model)
    assumptions = assumptions or Assumptions()
    if nodes < 1:
        raise ValueError(f"{nodes} nodes; there must be 1 or more")
    if ranks_per_node < 0 or batch < 0 or sequence < 0 or network_bandwidth < 0:
        raise ValueError(
            f"ranks per node {ranks_per_node}, batch {batch}, sequence {sequence}, bandwidth {network_bandwidth:g}; "
            "none can be negative: leave out what shall have its default"
        )
    if not 0 < assumptions.mfu <= 1:
        raise ValueError(f"an MFU of {assumptions.mfu}; it must be in (0, 1], such as 0.4")
    if sequence:
        workload = replace(workload, sequence=sequence)
    ranks_per_node = ranks_per_node or found.ranks_per_node or 1
    ranks = nodes * ranks_per_node
    if batch and batch % ranks:
        raise ValueError(
            f"a global batch of {batch} sequences cannot be divided over {ranks} ranks; "
            f"take {_whole_batch(batch, ranks)}"
        )
    links = links or Links.from_machine(found)
    if network_bandwidth:
        links = links.with_bandwidth("network", network_bandwidth * 1e9)
    batch = batch or _whole_batch(workload.batch, ranks)
    return PlanRequest(workload, found, nodes, ranks_per_node, links, batch, assumptions)


def _whole_batch(batch: int, ranks: int) -> int:
    return max(1, round(batch / ranks)) * ranks


# ------------------------------------------------------------------------------------------ candidates


def candidates(case: PlanRequest, methods: Sequence[PlannedRun]) -> list[Candidate]:
    """Every method on every shard degree inside a node, with the largest micro-batch that fits, 1 if none does."""
    found = []
    for shard in SHARDS:
        if case.ranks_per_node % shard:
            continue
        layout = plan_layout(
            case.ranks, ranks_per_node=case.ranks_per_node, machine=case.machine, replicate=-1, shard=shard
        )
        found += [of_largest_micro_batch(case, layout, partial(_predict, case, layout, method)) for method in methods]
    return found


def of_largest_micro_batch(case: PlanRequest, layout: Layout, predicted: Callable[[int], Prediction]) -> Candidate:
    """With the largest micro-batch that fits, 1 if none does. predicted: of a micro-batch."""
    own = case.batch // case.ranks
    for micro_batch in (m for m in range(min(own, LARGEST_MICRO_BATCH), 0, -1) if own % m == 0):
        candidate = Candidate(layout, micro_batch, predicted(micro_batch))
        if case.fits(candidate):
            break
    return candidate


def _predict(case: PlanRequest, layout: Layout, method: PlannedRun, micro_batch: int) -> Prediction:
    return predict(
        method, case.workload, layout, case.links, batch=case.batch, micro_batch=micro_batch,
        assumptions=case.assumptions,
    )  # fmt: skip


def best(case: PlanRequest, methods: Sequence[PlannedRun]) -> Candidate:
    """The fastest that fits. Raises ValueError where none does."""
    found = fastest(case, methods)
    if not case.fits(found):
        raise ValueError(
            f"{case.workload.name} needs {found.memory / 1e9:.0f} GB a rank at least (estimated), and "
            f"{case.machine.device.name} has {case.capacity / 1e9:.0f} GB to use; take a shorter --seq-len, or full "
            "activation checkpointing, tensor parallelism, or SCAPE with offload, which this plan does not try"
        )
    return found


def fastest(case: PlanRequest, methods: Sequence[PlannedRun]) -> Candidate:
    """The fastest that fits; where none does, what needs the least memory."""
    every = candidates(case, methods)
    fitting = [c for c in every if case.fits(c)]
    return min(fitting, key=lambda c: c.prediction.step) if fitting else min(every, key=lambda c: c.memory)


@dataclass(frozen=True)
class Advice:
    """dense: the fastest dense method that fits. sparse: what to take if anything is compressed, SCAPE or a code."""

    dense: Candidate
    sparse: Candidate

    @property
    def gain(self) -> float:
        return self.dense.prediction.step / self.sparse.prediction.step

    @property
    def compress(self) -> bool:
        return self.gain >= MIN_GAIN

    @property
    def choice(self) -> Candidate:
        return self.sparse if self.compress else self.dense


def lower_memory_variants(case: PlanRequest, chosen: Candidate) -> list[Candidate]:
    """A SCAPE candidate with less memory, on its layout; what is exchanged whole has no such forms."""
    if chosen.method.overlap:
        return []
    methods = [replace(chosen.method, **lean) for lean in LEAN]
    return [replace(chosen, prediction=_predict(case, chosen.layout, m, chosen.micro_batch)) for m in methods]


def advise(case: PlanRequest) -> Advice:
    """All gradients in four bits, or the densest SCAPE, FP32 before a code: the first within 5 % of the fastest,
    against dense AdamS or AdamW; dense below a gain of 3 %."""
    limit = NEAR_FASTEST * best(case, (*CODED, *SPARSE)).prediction.step
    options = (fastest(case, [method]) for method in (*CODED, *SPARSE))
    sparse = next(c for c in options if case.fits(c) and c.prediction.step <= limit)
    return Advice(best(case, DENSE), sparse)


def break_even_bandwidth(case: PlanRequest, advice: Advice) -> float:
    """Bytes/s of the replicas' outermost link at which the gain falls to 3 %, layouts as advised.

    0 where no link is slow enough for a gain, infinity where none is fast enough to end it; searched between a
    thousandth and a thousand times the present bandwidth.
    """
    tiers = advice.sparse.layout.hierarchy(advice.sparse.layout.replicate_group(0))
    if not tiers:
        return 0.0
    level = tiers[-1].level
    now = case.links[level].bandwidth

    def gain(bandwidth: float) -> float:
        changed = replace(case, links=case.links.with_bandwidth(level, bandwidth))
        dense, sparse = (_predict(changed, c.layout, c.method, c.micro_batch) for c in (advice.dense, advice.sparse))
        return dense.step / sparse.step

    return bandwidth_of(gain, now, MIN_GAIN)


def bandwidth_of(gain: Callable[[float], float], now: float, wanted: float) -> float:
    """The largest bandwidth at which a gain, which falls with it, is as wanted: likewise."""
    low, high = now / 1000, now * 1000
    if gain(low) < wanted:
        return 0.0
    if gain(high) >= wanted:
        return float("inf")
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) >= wanted else (low, middle)
    return low


def by_nodes(case: PlanRequest) -> list[tuple[int, int, Advice]]:
    """(nodes, batch, advice) from one node to four times those asked for."""
    counts = sorted({1 << i for i in range(12) if 1 << i < case.nodes} | {case.nodes, 2 * case.nodes, 4 * case.nodes})
    return [(n, case.on(n).batch, advise(case.on(n))) for n in counts]

"""Candidate runs, their predictions, and the rule that selects one. Plain arithmetic: no torch.

The lists of methods at the top are the planner's policy.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from torchtitan_scape.core.workloads import Workload, get_workload
from torchtitan_scape.methods.local_options import DilocoOptions
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, Prediction, predict
from torchtitan_scape.topology.layout import Layout, plan_layout
from torchtitan_scape.topology.machines import Links, Machine, get_machine

# Overlap needs a copy of the gradients.
DENSE = tuple(PlannedRun(DenseOptions(), "Muon", overlap) for overlap in (True, False))
# By decreasing bytes: 12.9, 4.9, 2.5 and 1.2 % of the dense ones. Losses are in docs/how_to/choose_a_method.md.
COMPRESSED = (
    PlannedRun(QuantizedOptions(code="e2m1", block=128), "Muon", overlap=True),
    *(PlannedRun(QuantizedUpdateOptions(interval=k), "Muon") for k in (1, 2)),
    PlannedRun(SpartaOptions(), "Muon"),
)
MOST_REPLICAS: dict[type, int] = {SpartaOptions: 4}  # its loss grows with them
# Shown but never advised, because their loss is higher. SCAPE needs about as much memory as dense Muon.
COMPARED = (
    PlannedRun(ScapeOptions(density=0.1)),
    PlannedRun(ScapeOptions(density=0.1, code="int4")),
    PlannedRun(ScapeOptions(density=0.05, code="int4")),
    PlannedRun(ScapeOptions(density=0.025, code="2bit")),
    *(PlannedRun(DenseOptions(), optimizer, overlap=True) for optimizer in ("AdamS", "AdamW")),
    PlannedRun(QuantizedOptions(code="e2m1", block=128), "AdamW", overlap=True),
    PlannedRun(QuantizedUpdateOptions(interval=4), "Muon"),
    PlannedRun(SpartaOptions(), "AdamW"),
    PlannedRun(DilocoOptions(code="e2m1", decay=0.9), "Muon"),  # MuLoCo
)
SHARDS = (1, 2, 4, 8)
MOST_RANKS = 1 << 17  # more than any machine has; time and memory of a plan grow with them
LARGEST_MICRO_BATCH = 8
MIN_GAIN = 1.03  # a smaller gain is within the error of the model
NEAR_FASTEST = 1.10  # the first method within this factor of the fastest is advised


@dataclass(frozen=True)
class PlanRequest:
    """Model, machine and batch that the planner is asked about."""

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
        """Bytes of a rank's device memory that a job can fill."""
        return self.machine.device.memory * 1e9 * self.assumptions.usable_memory

    def fits(self, candidate: "Candidate") -> bool:
        return candidate.memory <= self.capacity

    def on(self, nodes: int) -> "PlanRequest":
        """Return the request for another number of nodes, with the batch rounded to their ranks."""
        return replace(self, nodes=nodes, batch=_whole_batch(self.batch, nodes * self.ranks_per_node))


@dataclass(frozen=True)
class Candidate:
    """A run on a layout. micro_batch: sequences per rank and micro-batch."""

    layout: Layout
    micro_batch: int
    prediction: Prediction

    @property
    def method(self) -> PlannedRun:
        return self.prediction.method

    @property
    def memory(self) -> float:
        return sum(self.prediction.memory.values())


def make_request(
    machine: str,
    nodes: int,
    model: str | Workload,
    *,
    ranks_per_node: int = 0,
    links: Links | None = None,
    network_bandwidth: float = 0.0,
    batch: int = 0,
    sequence: int = 0,
    assumptions: Assumptions | None = None,
) -> PlanRequest:
    """Return a checked request. Values of 0 select the defaults.

    Args:
        model: A workload, or the name of one.
        network_bandwidth: GB/s between nodes.

    Raises:
        ValueError: A name is unknown or a value out of range.
    """
    preset, workload = get_machine(machine), get_workload(model) if isinstance(model, str) else model
    assumptions = assumptions or Assumptions()
    if nodes < 1:
        raise ValueError(f"{nodes} nodes; there must be 1 or more")
    if ranks_per_node < 0 or batch < 0 or sequence < 0 or network_bandwidth < 0:
        raise ValueError(
            f"ranks per node {ranks_per_node}, batch {batch}, sequence {sequence}, bandwidth {network_bandwidth:g}; "
            "none can be negative: omit an option to use its default"
        )
    if not 0 < assumptions.mfu <= 1:
        raise ValueError(f"an MFU of {assumptions.mfu}; it must be in (0, 1], such as 0.4")
    if sequence:
        workload = replace(workload, sequence=sequence)
    ranks_per_node = ranks_per_node or preset.ranks_per_node or 1
    ranks = nodes * ranks_per_node
    if ranks > MOST_RANKS:
        raise ValueError(
            f"{nodes} node(s) of {ranks_per_node} rank(s) make {ranks} ranks; the planner takes at most {MOST_RANKS}, "
            f"{MOST_RANKS // ranks_per_node} of these nodes"
        )
    if batch and batch % ranks:
        raise ValueError(
            f"a global batch of {batch} sequences cannot be divided over {ranks} ranks; "
            f"take {_whole_batch(batch, ranks)}"
        )
    links = links or Links.from_machine(preset)
    if network_bandwidth:
        links = links.with_bandwidth("network", network_bandwidth * 1e9)
    batch = batch or _whole_batch(workload.batch, ranks)
    return PlanRequest(workload, preset, nodes, ranks_per_node, links, batch, assumptions)


def _whole_batch(batch: int, ranks: int) -> int:
    return max(1, round(batch / ranks)) * ranks


# ------------------------------------------------------------------------------------------ candidates


def candidates(case: PlanRequest, methods: Sequence[PlannedRun]) -> list[Candidate]:
    """Return every run on every shard degree within a node, with the largest micro-batch that fits, 1 if none does."""
    choices = []
    for shard in SHARDS:
        if case.ranks_per_node % shard:
            continue
        layout = _layout(case.ranks, case.ranks_per_node, case.machine, shard)
        choices += [_of_largest_micro_batch(case, layout, method) for method in methods]
    return choices


@lru_cache(maxsize=2 * len(SHARDS))  # every method has the same layouts
def _layout(ranks: int, ranks_per_node: int, machine: Machine, shard: int) -> Layout:
    return plan_layout(ranks, ranks_per_node=ranks_per_node, machine=machine, replicate=-1, shard=shard)


def _of_largest_micro_batch(case: PlanRequest, layout: Layout, method: PlannedRun) -> Candidate:
    own = case.batch // case.ranks
    for micro_batch in (m for m in range(min(own, LARGEST_MICRO_BATCH), 0, -1) if own % m == 0):
        candidate = Candidate(layout, micro_batch, _predict(case, layout, method, micro_batch))
        if case.fits(candidate):
            break
    return candidate


def _predict(case: PlanRequest, layout: Layout, method: PlannedRun, micro_batch: int) -> Prediction:
    return predict(
        method, case.workload, layout, case.links, batch=case.batch, micro_batch=micro_batch,
        assumptions=case.assumptions,
    )  # fmt: skip


def best(case: PlanRequest, methods: Sequence[PlannedRun]) -> Candidate:
    """Return the fastest candidate that fits.

    Raises:
        ValueError: None fits.
    """
    candidate = fastest(case, methods)
    if not case.fits(candidate):
        raise _does_not_fit(case, candidate)
    return candidate


def _does_not_fit(case: PlanRequest, least: Candidate) -> ValueError:
    """Return the error of a case in which the candidate with the least memory does not fit."""
    full = "" if case.workload.recomputation.mode == "full" else "or full activation checkpointing, "
    return ValueError(
        f"{case.workload.name} needs {least.memory / 1e9:.0f} GB a rank at least (estimated), and "
        f"{case.machine.device.name} has {case.capacity / 1e9:.0f} GB to use; take a shorter --seq-len, {full}"
        "or tensor parallelism, or SCAPE with offload or three levels, which this plan does not try, or a "
        "replica on several nodes"
    )


def fastest(case: PlanRequest, methods: Sequence[PlannedRun]) -> Candidate:
    """Return the fastest candidate that fits; if none does, the one with the least memory."""
    every = candidates(case, methods)
    fitting = [c for c in every if case.fits(c)]
    return min(fitting, key=lambda c: c.prediction.step) if fitting else min(every, key=lambda c: c.memory)


@dataclass(frozen=True)
class Advice:
    """The planner's answer. At least one of the two runs fits.

    Attributes:
        dense: The fastest dense run that fits; None if none does.
        compressed: The compressed run with the most bytes among the nearly fastest ones, see `advise`; None if none
            fits.
    """

    dense: Candidate | None
    compressed: Candidate | None

    @property
    def gain(self) -> float:
        """Dense step over compressed step: infinity if no dense run fits, 0 if no compressed one does."""
        if self.compressed is None:
            return 0.0
        return self.dense.prediction.step / self.compressed.prediction.step if self.dense else math.inf

    @property
    def compress(self) -> bool:
        return self.gain >= MIN_GAIN

    @property
    def choice(self) -> Candidate:
        chosen = self.compressed if self.compress else self.dense
        assert chosen is not None
        return chosen


def advise(case: PlanRequest) -> Advice:
    """Return the best dense and the best compressed run.

    Compressed runs are those of `COMPRESSED`. If some gain `MIN_GAIN` over the dense one, only these count. The first
    within 10 % of the fastest is taken.

    Raises:
        ValueError: Nothing fits.
    """
    dense = min(_fastest_of_each(case, DENSE), key=lambda c: c.prediction.step, default=None)
    fitting = _fastest_of_each(case, COMPRESSED)
    if not dense and not fitting:
        raise _does_not_fit(case, fastest(case, (*DENSE, *COMPRESSED)))
    gaining = [c for c in fitting if not dense or dense.prediction.step >= MIN_GAIN * c.prediction.step] or fitting
    limit = NEAR_FASTEST * min((c.prediction.step for c in gaining), default=0.0)
    return Advice(dense, next((c for c in gaining if c.prediction.step <= limit), None))


def _fastest_of_each(case: PlanRequest, methods: Sequence[PlannedRun]) -> list[Candidate]:
    """Return the fastest candidate of each method that fits and does not have too many replicas for it."""
    winners = []
    for method in methods:
        most = MOST_REPLICAS.get(type(method.options), math.inf)
        allowed = [c for c in candidates(case, [method]) if case.fits(c) and c.layout.replicate <= most]
        winners += sorted(allowed, key=lambda c: c.prediction.step)[:1]
    return winners


def break_even_bandwidth(case: PlanRequest, advice: Advice) -> float:
    """Return the bandwidth of the replicas' outermost link, in bytes/s, at which the gain falls to 3 %.

    The layouts are those of the advice. The search covers a thousandth to a thousand times the present bandwidth. The
    result is 0 if no link is slow enough for a gain, and infinity if none is fast enough to end it; so it is also if no
    compressed or no dense run fits.
    """
    if not advice.dense or not advice.compressed:
        return math.inf if advice.compressed else 0.0
    runs = advice.dense, advice.compressed
    tiers = advice.compressed.layout.replica_tiers
    if not tiers:
        return 0.0
    level = tiers[-1].level
    now = case.links[level].bandwidth

    def gain(bandwidth: float) -> float:
        changed = replace(case, links=case.links.with_bandwidth(level, bandwidth))
        dense, compressed = (_predict(changed, c.layout, c.method, c.micro_batch) for c in runs)
        return dense.step / compressed.step

    low, high = now / 1000, now * 1000  # the gain decreases with the bandwidth
    if gain(low) < MIN_GAIN:
        return 0.0
    if gain(high) >= MIN_GAIN:
        return float("inf")
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) >= MIN_GAIN else (low, middle)
    return low


def by_nodes(case: PlanRequest) -> list[tuple[int, int, Advice]]:
    """Return (nodes, batch, advice) from one node to four times the requested number, where anything fits."""
    counts = sorted({1 << i for i in range(12) if 1 << i < case.nodes} | {case.nodes, 2 * case.nodes, 4 * case.nodes})
    rows = []
    for on in map(case.on, counts):
        with suppress(ValueError):  # few replicas divide the state of a method among them
            rows.append((on.nodes, on.batch, advise(on)))
    return rows

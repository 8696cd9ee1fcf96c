"""Comparison of the shard axis with FSDP's own collectives, ZeRO++ and three levels. Plain arithmetic: no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.candidates import Candidate, PlanRequest, of_largest_micro_batch
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import FSDP, Prediction, predict
from torchtitan_scape.sharding.cost import ShardPlan, flat_rows
from torchtitan_scape.sharding.levels_cost import LevelsPlan, coded
from torchtitan_scape.topology.layout import Layout, plan_layout

DENSE = PlannedRun(DenseOptions(), overlap=True)
SCAPE = PlannedRun(ScapeOptions(density=0.05, code="int4"))  # 1.1 % of the bytes
LEVELS = "three levels"


@dataclass(frozen=True)
class ShardAxisVariant:
    """A configuration of the shard axis, with a method between replicas.

    Attributes:
        title: Name of the shard axis.
        detail: Its options.
        network: Bytes that a rank sends between nodes per step.
    """

    title: str
    detail: str
    candidate: Candidate
    network: float

    @property
    def prediction(self) -> Prediction:
        return self.candidate.prediction


def shard_axis_variants(case: PlanRequest, shard: int) -> list[ShardAxisVariant]:
    """Return all variants with one replica on `shard` consecutive ranks and the largest micro-batch that fits.

    The first is dense training with FSDP's own collectives and overlap between replicas. Three levels need a shard axis
    within a node, and are listed for every degree of weights.

    Raises:
        ValueError: The degree does not divide the ranks.
    """
    if shard < 2:
        raise ValueError(f"a shard axis of {shard} rank(s): nothing is sent there; take 2 or more")
    layout = plan_layout(
        case.ranks, ranks_per_node=case.ranks_per_node, machine=case.machine, replicate=-1, shard=shard
    )
    forms = [_of(case, layout, "FSDP", "", method, FSDP) for method in (DENSE, SCAPE)]
    plan, detail = _zeropp(layout)
    forms += [_of(case, layout, "ZeRO++", detail, method, plan) for method in (DENSE, SCAPE)]
    if case.ranks_per_node % shard == 0:
        for w in (w for w in range(1, shard) if shard % w == 0):
            # Three levels sum gradients before the optimizer, without overlap.
            for method, summed in ((replace(DENSE, overlap=False), 4.0), (SCAPE, 0.0)):
                forms.append(_of(case, layout, LEVELS, *_levels(layout, w, summed, method)))
    return forms


def _zeropp(layout: Layout) -> tuple[ShardPlan, str]:
    """Return the plan of `[sharding]` with all features of ZeRO++ that this axis supports, and their names."""
    nodes = layout.by_node(layout.shard_group(0))
    if len(nodes) == 1:
        return ShardPlan(weights="int8", gradients=("int8",)), "int8, int8"
    two = len(nodes[0]) > 1
    codes = ("int8", "int4") if two else ("int4",)
    return ShardPlan("int8", secondary=True, gradients=codes, hops=1 + two), f"int8 + secondary, {'+'.join(codes)}"


def _levels(layout: Layout, w: int, summed: float, method: PlannedRun) -> tuple[str, PlannedRun, LevelsPlan]:
    gathered, update = (coded(8, 256) if w > 1 else 2.0), coded(8, 256)
    plan = LevelsPlan(w, layout.shard, layout.replicate, gathered, (coded(4, 128),), summed, update)
    return f"over {w}, {layout.shard}, {layout.world_size if summed else layout.shard} ranks", method, plan


def _of(
    case: PlanRequest,
    layout: Layout,
    title: str,
    detail: str,
    method: PlannedRun,
    plan: ShardPlan | LevelsPlan,
) -> ShardAxisVariant:
    def predicted(micro_batch: int) -> Prediction:
        return predict(
            method,
            case.workload,
            layout,
            case.links,
            batch=case.batch,
            micro_batch=micro_batch,
            assumptions=case.assumptions,
            shard_axis=plan,
        )

    chosen = of_largest_micro_batch(case, layout, predicted)
    micro_batches = case.batch // (case.ranks * chosen.micro_batch)
    sent = plan.sent(flat_rows(case.workload, layout.shard), layout, micro_batches)
    network = chosen.prediction.sent.get("network", 0.0)
    network += sum(nbytes for (level, _), nbytes in sent.items() if level == "network")
    return ShardAxisVariant(title, detail, chosen, network)


def lines(case: PlanRequest, forms: Sequence[ShardAxisVariant]) -> Iterator[str]:
    """Return the variants as a table, with the gain over the first of them."""
    layout, first = forms[0].candidate.layout, forms[0].prediction
    yield (
        f"Forms of the shard axis, {layout.replicate} replica(s) of {layout.shard} ranks (ms a step; shards: FSDP's "
        "traffic beyond compute; once: sums and updates of levels):"
    )
    yield (
        f"{'form':<14}{'':<30}{'method':<18}{'step':>9}{'compute':>9}{'exchange':>10}{'shards':>8}{'once':>8}"
        f"{'optimizer':>11}{'network MB':>12}{'GB':>7}{'gain':>7}"
    )
    for form in forms:
        p = form.prediction
        times = [1e3 * t for t in (p.step, p.compute, p.exchange, p.shard, p.fixed, p.optimizer)]
        fits = "" if case.fits(form.candidate) else "  does not fit"
        yield (
            f"{form.title:<14}{form.detail:<30}{p.method.name:<18}{times[0]:>9.1f}{times[1]:>9.1f}{times[2]:>10.1f}"
            f"{times[3]:>8.1f}{times[4]:>8.1f}{times[5]:>11.1f}{form.network / 1e6:>12.1f}"
            f"{form.candidate.memory / 1e9:>7.1f}{first.step / p.step:>7.2f}{fits}"
        )

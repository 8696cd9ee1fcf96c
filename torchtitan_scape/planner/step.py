"""What a step costs. Plain arithmetic: no torch.

`predict_step` is the model of a step and takes every rate from its caller (a benchmark feeds measured ones);
`predict` derives the rates from a machine and a workload, under stated `Assumptions`. What collectives cost is in
`topology.links`, what is sent in `planner.volumes`. Units: seconds and bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from topology.layout import Layout
from topology.links import Links, Tiers, all_reduce_stages, bytes_by_level, scalar_stages, stage_seconds
from torchtitan_scape.core.workloads import Shape, Workload, local_shapes
from torchtitan_scape.methods.topk.blocks import coded_by
from torchtitan_scape.planner.pass_rates import PassRates
from torchtitan_scape.planner.volumes import (
    PlannedRun,
    host_link_bytes,
    memory_bytes,
    messages,
    optimizer_bytes,
    optimizer_flops,
)
from torchtitan_scape.sharding.cost import ShardPlan, dealt_stages, flat_rows, mean_gathers, shard_stages
from torchtitan_scape.sharding.levels_cost import LevelsPlan

MOST_CHUNKS = 8
# A chunk pays its latency again; below this share of its transfer that is in the noise of a link.
CHUNK_LATENCY_SHARE = 0.05


# --------------------------------------------------------------------------------------------- chunks


def pipeline_seconds(pack: float, transfer: float, latency: float, chunks: int) -> float:
    """Packing and exchange of `chunks` equal chunks: each is exchanged while the next is packed.

    pack + exchange / m where packing is the slower, pack / m + exchange + (m - 1) * latency where the link is.
    """
    packed, exchanged = pack / chunks, transfer / chunks + latency
    return packed + exchanged + (chunks - 1) * max(packed, exchanged)


def best_chunks(pack: float, transfer: float, latency: float) -> int:
    """The chunk count of least time, 1 to 8: near sqrt(pack / latency) where the link is the slower.

    Never so many that a chunk's latency exceeds a twentieth of its transfer.
    """
    allowed = [m for m in range(1, MOST_CHUNKS + 1) if m == 1 or latency <= CHUNK_LATENCY_SHARE * transfer / m]
    return min(allowed, key=lambda m: pipeline_seconds(pack, transfer, latency, m))


def best_chunk_bytes(
    nbytes: int, pack_seconds: float, tiers: Tiers, links: Links, wire: str = "float32", flat: bool = False
) -> int:
    """Bytes (FP32, a multiple of 4) of a payload's chunk; `nbytes` is the payload's, FP32."""
    latency, transfer = stage_seconds(all_reduce_stages(tiers, nbytes, coded_by(wire), flat), links)
    chunks = best_chunks(pack_seconds, transfer, latency)
    return max(4, -(-nbytes // (4 * chunks)) * 4)


# ------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True)
class Prediction:
    """A step of one rank, in seconds; `step` is the sum of the first five.

    exchange: of the replicas, as far as it stands still for it. shard: FSDP's traffic, likewise.
    optimizer: passes of the device, and products where it multiplies matrices. fixed: what the caller says that every
        step costs besides.
    hidden: exchange beside compute. sent: bytes by level on the replicate axis. chunks: of the payload.
    memory: bytes by kind, empty where nobody asked.
    """

    method: PlannedRun
    compute: float
    exchange: float
    shard: float
    optimizer: float
    fixed: float
    hidden: float
    sent: dict[str, float]
    chunks: int
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        return self.compute + self.exchange + self.shard + self.optimizer + self.fixed


def predict_step(
    method: PlannedRun,
    tiers: Tiers,
    links: Links,
    shapes: Sequence[Shape],
    *,
    compute_seconds: float,
    pack_seconds: float,
    rest_seconds: float,
    shard_seconds: float = 0.0,
    fixed_seconds: float = 0.0,
    chunk_bytes: int = 0,
    flat: bool = False,
    backward_seconds: float = 0.0,
) -> Prediction:
    """A step from its rates.

    Args:
        tiers: levels that the replicas span, from the inside out, as (name, size).
        shapes: this rank's shards.
        compute_seconds: forward and backward of all micro-batches. The mask's exchange hides behind it.
        pack_seconds: the pass that fills the payload, chunk by chunk while others are exchanged; 0 for dense methods.
        rest_seconds: the optimizer's other passes.
        shard_seconds: FSDP's exposed traffic.
        fixed_seconds: added to every step, whatever the method.
        chunk_bytes: of the payload or the gradients, FP32; 0 takes the best for SCAPE and one message for others.
        flat: one ring over all replicas instead of the hierarchy.
        backward_seconds: of compute, the last backward pass. Where the method overlaps, its exchange hides behind that
            as far as there is time: at best, as if gradients were complete in proportion to it. What is first in the
            model, its embedding, is complete last.
    """
    replicas = math.prod(size for _, size in tiers)
    exposed = [m for m in messages(method, shapes, replicas) if not m.hidden]
    beside = [m for m in messages(method, shapes, replicas) if m.hidden]
    stages = [stage for message in exposed for stage in message.stages(tiers, flat)]
    latency, transfer = stage_seconds(stages, links)
    # What is scattered to owners, or gathered, goes whole.
    if any(message.collective != "reduce" for message in exposed):
        chunks = 1
    elif chunk_bytes:
        chunks = max(1, -(-int(sum(message.share * message.nbytes for message in exposed)) // chunk_bytes))
    else:
        chunks = best_chunks(pack_seconds, transfer, latency)
    exchange = pipeline_seconds(pack_seconds, transfer, latency, chunks) - pack_seconds if replicas > 1 else 0.0
    beside_backward = min(exchange, backward_seconds) if method.overlap else 0.0
    exchange -= beside_backward
    # The finite flag: nobody packs before it is known. Owners exchange their parts of the norm besides.
    exchange += (2 if method.sharded else 1) * sum(stage_seconds(scalar_stages(tiers), links))
    later = [stage for message in beside for stage in message.stages(tiers, flat)]
    seconds = sum(stage_seconds(later, links))
    hidden = min(seconds, compute_seconds)
    exchange += seconds - hidden
    hidden += beside_backward
    optimizer = pack_seconds + rest_seconds
    sent = bytes_by_level(stages + later)
    return Prediction(method, compute_seconds, exchange, shard_seconds, optimizer, fixed_seconds, hidden, sent, chunks)


# ------------------------------------------------------------------------- rates from machine and workload


@dataclass(frozen=True)
class Assumptions:
    """What nobody measured, and what takes its place where somebody did.

    mfu: share of the device's peak that forward and backward reach, and an optimizer's products of matrices.
    memory_efficiency: share of the nominal memory bandwidth that the optimizer's passes reach.
    passes: their measured rates, instead of that and of the links' memory bandwidth; None for none.
    usable_memory: share of the device's memory that a job can fill (fragmentation, NCCL's buffers, the context).
    """

    mfu: float = 0.4
    memory_efficiency: float = 0.7
    passes: PassRates | None = None
    usable_memory: float = 0.9


def fsdp_seconds(tiers: Tiers, workload: Workload, links: Links) -> float:
    """FSDP's traffic in a micro-batch: two all-gathers of BF16 parameters, a reduce-scatter of FP32 gradients.

    Rings over the whole shard axis, three for every layer, the embedding and the output.
    """
    # An all-reduce of n FP32 values sends 8 n bytes, and so do these three in its two turns of the ring.
    latency, transfer = stage_seconds(all_reduce_stages(tiers, 4.0 * workload.parameters, flat=True), links)
    return 1.5 * (workload.layers + 2) * latency + transfer


def last_backward(compute_seconds: float, micro_batches: int) -> float:
    """Seconds of the backward pass after which gradients are final: two thirds of the last micro-batch."""
    return 2 / 3 * compute_seconds / micro_batches


def predict(
    method: PlannedRun,
    workload: Workload,
    layout: Layout,
    links: Links,
    *,
    batch: int,
    micro_batch: int,
    assumptions: Assumptions | None = None,
    compute_seconds: float | None = None,
    fixed_seconds: float = 0.0,
    sharding: ShardPlan | None = None,
    levels: LevelsPlan | None = None,
) -> Prediction:
    """A step of `workload` on `layout` (replicate x shard), from bytes, FLOPs and `assumptions`.

    batch: sequences a step, over all ranks. micro_batch: sequences at a time on a rank.
    compute_seconds: forward and backward of a step, where it is known.
    sharding: what stands in for FSDP's own collectives; None for these. levels: three of them instead; what they send
        once a step is exposed.

    Of FSDP's traffic what exceeds compute is exposed, of what an optimizer deals out all. Raises ValueError for a batch
    that the ranks do not divide.
    """
    assumptions = assumptions or Assumptions()
    ranks = layout.replicate * layout.shard
    if batch < 1 or batch % (ranks * micro_batch):
        raise ValueError(
            f"a global batch of {batch} sequences is no multiple of {ranks} ranks x {micro_batch} sequences at a time; "
            f"take {max(1, round(batch / ranks / micro_batch)) * ranks * micro_batch}"
        )
    device = layout.machine.device
    if compute_seconds is None:
        flops = workload.flops_per_token() * workload.sequence * batch
        compute_seconds = flops / (ranks * device.peak * 1e12 * assumptions.mfu)
    shapes = local_shapes(workload.shapes(), levels.spread if levels else layout.shard)
    streaming = links.memory_bandwidth or device.memory_bandwidth * 1e9 * assumptions.memory_efficiency
    rates = assumptions.passes.of(method) if assumptions.passes else (streaming, streaming)
    device_bytes, link_bytes = (of(method, shapes, layout.replicate) for of in (optimizer_bytes, host_link_bytes))
    # Copies to and from the host hide beside the passes, as far as these take time.
    pack, rest = (
        max(nbytes / rate, copied / (device.host_link * 1e9))
        for nbytes, rate, copied in zip(device_bytes, rates, link_bytes, strict=True)
    )
    flops = optimizer_flops(method, workload.shapes(), layout.shard * layout.context)
    rest += flops / (device.peak * 1e12 * assumptions.mfu)
    shard_tiers, tiers = (
        [(tier.level, tier.size) for tier in layout.hierarchy(group)]
        for group in (layout.model_group(0), layout.replicate_group(0))
    )
    micro_batches = batch // (ranks * micro_batch)
    if levels is not None:
        rows = flat_rows(workload, layout.shard)
        each, once = levels.stages(float(workload.parameters), mean_gathers(rows), len(rows), layout, micro_batches)
        traffic = micro_batches * sum(stage_seconds(each, links))
        fixed_seconds += sum(stage_seconds(once, links))
        tiers = [] if levels.sums else tiers
    elif sharding is not None and sharding.active:
        stages = shard_stages(sharding, flat_rows(workload, layout.shard), layout, micro_batches)
        traffic = sum(stage_seconds(stages, links))
    else:
        traffic = micro_batches * fsdp_seconds(shard_tiers, workload, links)
    predicted = predict_step(
        method,
        tiers,
        links,
        shapes,
        compute_seconds=compute_seconds,
        pack_seconds=pack,
        rest_seconds=rest,
        shard_seconds=max(0.0, traffic - compute_seconds)
        + sum(stage_seconds(dealt_stages(method, workload.shapes(), layout), links)),
        fixed_seconds=fixed_seconds,
        backward_seconds=last_backward(compute_seconds, micro_batches),
    )
    shard = levels.spread if levels else layout.shard
    memory = memory_bytes(method, workload, shard, layout.replicate, micro_batch)
    return replace(predicted, memory=levels.memory(workload.shapes(), memory) if levels else memory)

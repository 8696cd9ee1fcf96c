"""Predicted time of a step. Plain arithmetic: no torch.

`predict_step` is the model of a step and receives every rate from its caller, for example measured ones; `predict`
derives the rates from a machine and a workload, under stated `Assumptions`. `topology.links` has the cost of
collectives, and the options of each method what is sent. Units: seconds and bytes.
"""

import math
from dataclasses import dataclass, field, replace

from torchtitan_scape.core.workloads import LocalModel, Workload
from torchtitan_scape.planner.pass_rates import PassRates
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.sharding.cost import (
    ShardPlan,
    flat_rows,
    gather_stages,
    matrix_stages,
    mean_gathers,
    shard_stages,
)
from torchtitan_scape.sharding.levels_cost import LevelsPlan
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.links import Links, best_chunks, pipeline_seconds, stage_seconds
from torchtitan_scape.topology.machines import MEMORY_EFFICIENCY
from torchtitan_scape.topology.ring_bytes import Levels, all_reduce_stages, bytes_by_level, scalar_stages, spanned

# Rate of matrix products in BF16, by runtime, divided by those in TF32, or FP32 where there is none, and in FP32. An
# H100 has 989, 495 and 67 TFLOP/s, an MI250X 383 and 96.
BF16_PER = {"CUDA": (2.0, 15.0), "ROCm": (4.0, 4.0), "": (1.0, 1.0)}

# ------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True)
class Prediction:
    """A step of one rank, in seconds; `step` is the sum of the first five.

    Attributes:
        exchange: Exposed exchange between replicas.
        shard: Exposed traffic of FSDP.
        optimizer: Passes of the device, and matrix products of the optimizer.
        fixed: Further time that the caller adds to every step.
        hidden: Exchange that overlaps with compute.
        sent: Bytes by level on the replicate axis.
        chunks: Chunks of the payload.
        memory: Bytes by kind; empty if not requested.
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
    run: PlannedRun,
    levels: Levels,
    links: Links,
    model: LocalModel,
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
    """Predict a step from its rates.

    Args:
        levels: Levels that the replicas span, innermost first.
        model: This rank's shards.
        compute_seconds: Forward and backward passes of all micro-batches. The exchange of masks overlaps with it.
        pack_seconds: The pass that fills the payload, chunk by chunk while others are exchanged; 0 for dense methods.
        rest_seconds: The optimizer's other passes.
        shard_seconds: Exposed traffic of FSDP.
        fixed_seconds: Added to every step.
        chunk_bytes: Chunk size of the payload or the gradients, FP32; 0 uses the method's, or the best one.
        flat: Use one ring over all replicas instead of the hierarchy.
        backward_seconds: The last backward pass, part of compute. With overlap the exchange is hidden behind it as far
            as possible, as if gradients were completed in proportion to it. This is a lower bound: the gradient of the
            embedding, the first layer, is completed last. Changes of the weights are hidden behind a forward pass, of
            half the time.
    """
    scalars, levels = scalar_stages(levels), spanned(levels, flat)
    replicas = math.prod(level.size for level in levels)
    calls = run.collective_calls(model, levels)
    if chunk_bytes:
        calls = [replace(call, chunks=0) for call in calls]
    exposed, hidden_calls = [c for c in calls if not c.hidden], [c for c in calls if c.hidden]
    stages = [stage for call in exposed for stage in call.stages(levels)]
    latency, transfer = stage_seconds([stage for call in exposed for stage in call.slowest_stages(levels)], links)
    # The stages contain the latency of all chunks if the method determines these. Only all-reduces are divided here.
    own_chunks = round(sum(call.share * call.chunks for call in exposed))
    if own_chunks or any(call.kind != "all_reduce" for call in exposed):
        chunks = 1
    elif chunk_bytes:
        chunks = max(1, -(-int(sum(call.share * call.input_bytes for call in exposed)) // chunk_bytes))
    else:
        chunks = best_chunks(pack_seconds, transfer, latency)
    exchange = pipeline_seconds(pack_seconds, transfer, latency, chunks) - pack_seconds if replicas > 1 else 0.0
    beside_passes = 0.0
    if run.overlap:
        weights = [c for c in exposed if c.kind == "all_gather"] if run.options.cost().sends_weights else []
        arriving = sum(stage_seconds([stage for call in weights for stage in call.slowest_stages(levels)], links))
        beside_passes = min(exchange - arriving, backward_seconds) + min(arriving, backward_seconds / 2)
    exchange -= beside_passes
    # No rank packs before the finite flag is known.
    exchange += run.options.cost().scalar_reductions * sum(stage_seconds(scalars, links))
    later = [stage for call in hidden_calls for stage in call.stages(levels)]
    seconds = sum(stage_seconds(later, links))
    hidden = min(seconds, compute_seconds)
    exchange += seconds - hidden
    hidden += beside_passes
    optimizer = pack_seconds + rest_seconds
    sent = bytes_by_level(stages + later)
    chunks = max(chunks, own_chunks)
    return Prediction(run, compute_seconds, exchange, shard_seconds, optimizer, fixed_seconds, hidden, sent, chunks)


# ------------------------------------------------------------------------- rates from machine and workload


@dataclass(frozen=True)
class Assumptions:
    """Values that take the place of measurements.

    Attributes:
        mfu: Share of the device's peak that forward and backward passes reach, and an optimizer's matrix products.
        memory_efficiency: Share of the nominal memory bandwidth that the optimizer's passes reach.
        passes: Measured rates of the passes, which take precedence over `memory_efficiency` and over the memory
            bandwidth of the links; None if there are none.
        usable_memory: Share of the device's memory that a job can fill (fragmentation, NCCL's buffers, the context).
    """

    mfu: float = 0.4
    memory_efficiency: float = MEMORY_EFFICIENCY
    passes: PassRates | None = None
    usable_memory: float = 0.9


def fsdp_seconds(levels: Levels, workload: Workload, links: Links) -> float:
    """Return FSDP's traffic per micro-batch: two all-gathers of BF16 parameters, one reduce-scatter of FP32 gradients.

    Each is a ring over the whole shard axis, for every layer, the embedding and the output.
    """
    # An all-reduce of n FP32 values sends 8 n bytes in two rounds of the ring, as these three do.
    latency, transfer = stage_seconds(all_reduce_stages(workload.parameters, spanned(levels, flat=True)), links)
    return 1.5 * (workload.layers + 2) * latency + transfer


def divides_matrices(
    run: PlannedRun, model: LocalModel, layout: Layout, links: Links, assumptions: Assumptions | None = None
) -> bool:
    """Return whether replicas divide the matrix products of the optimizer: if this is faster than to repeat them.

    It requires replicas with equal gradients, and a GPU, because the rate of a CPU is not known. With nominal links and
    a method that compresses they do not: such a method is for links that are slower, and the gather may be the larger
    part of all bytes.

    Args:
        model: Whole parameters.
    """
    device, cost = layout.machine.device, run.options.cost()
    stages = gather_stages(run.optimizer, model, layout)
    if not stages or cost.per_replica_weights or cost.includes_optimizer or cost.divides_update or not device.runtime:
        return False
    if links.nominal and cost.compresses:
        return False
    ranks = layout.shard * layout.context
    replicas = layout.replicate
    saved = run.optimizer_flops(model, ranks, replicas) - run.optimizer_flops(model, ranks * replicas, replicas)
    rate = device.peak * 1e12 * (assumptions or Assumptions()).mfu
    return sum(stage_seconds(stages, links)) < saved / rate


def last_backward(compute_seconds: float, micro_batches: int) -> float:
    """Return the seconds of the backward pass that completes the gradients: two thirds of the last micro-batch."""
    return 2 / 3 * compute_seconds / micro_batches


def predict(
    run: PlannedRun,
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
    """Predict a step of `workload` on `layout` (replicate x shard) from bytes, FLOPs and `assumptions`.

    FSDP's traffic is exposed as far as it exceeds compute, the matrix exchange of an optimizer completely.

    Args:
        batch: Sequences per step, over all ranks.
        micro_batch: Sequences per rank and micro-batch.
        compute_seconds: Forward and backward passes of a step, if known.
        sharding: Replacement of FSDP's own collectives; None for these.
        levels: Three levels in the place of FSDP; what they send once per step is exposed.

    Raises:
        ValueError: The ranks do not divide the batch.
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
    shard = levels.spread if levels else layout.shard
    model, whole = workload.local(shard), workload.whole()
    streaming = links.memory_bandwidth or device.memory_bandwidth * 1e9 * assumptions.memory_efficiency
    rates = assumptions.passes.of(run) if assumptions.passes else (streaming, streaming)
    shard_tiers, tiers = layout.hierarchy(layout.model_group(0)), layout.hierarchy(layout.replicate_group(0))
    device_bytes = run.memory_traffic(model, layout.replicate, len(tiers))
    link_bytes = run.host_link_traffic(model, layout.replicate)
    # Copies to and from the host overlap with the passes.
    pack, rest = (
        max(nbytes / rate, copied / (device.host_link * 1e9))
        for nbytes, rate, copied in zip(device_bytes, rates, link_bytes, strict=True)
    )
    divided = levels is None and divides_matrices(run, whole, layout, links, assumptions)
    by_replicas = divided or (levels is None and run.options.cost().divides_update)
    sharing = layout.shard * layout.context * (layout.replicate if by_replicas else 1)
    flops = run.optimizer_flops(whole, sharing, layout.replicate)
    products = run.options.cost().matrix_flops(model, layout.replicate)
    flops += sum(rate * count for rate, count in zip(BF16_PER[device.runtime], products, strict=True))
    rest += flops / (device.peak * 1e12 * assumptions.mfu)
    micro_batches = batch // (ranks * micro_batch)
    if levels is not None:
        rows = flat_rows(workload, layout.shard)
        each, once = levels.stages(float(workload.parameters), mean_gathers(rows), len(rows), layout, micro_batches)
        traffic = micro_batches * sum(stage_seconds(each, links))
        fixed_seconds += sum(stage_seconds(once, links))
        tiers = () if levels.sums else tiers
    elif sharding is not None and sharding.active:
        stages = shard_stages(sharding, flat_rows(workload, layout.shard), layout, micro_batches)
        traffic = sum(stage_seconds(stages, links))
    else:
        traffic = micro_batches * fsdp_seconds(shard_tiers, workload, links)
    matrices = matrix_stages(
        run.optimizer, whole, layout, 1.0 + run.options.cost().extra_orthogonalizations(layout.replicate)
    )
    if divided:
        matrices += gather_stages(run.optimizer, whole, layout)
    predicted = predict_step(
        run,
        tiers,
        links,
        model,
        compute_seconds=compute_seconds,
        pack_seconds=pack,
        rest_seconds=rest,
        shard_seconds=max(0.0, traffic - compute_seconds) + sum(stage_seconds(matrices, links)),
        fixed_seconds=fixed_seconds,
        backward_seconds=last_backward(compute_seconds, micro_batches),
    )
    memory = run.total_memory(workload, shard, layout.replicate, micro_batch)
    return replace(predicted, memory=levels.memory(workload.shapes(), memory) if levels else memory)

"""Predicted time of a step. Plain arithmetic: no torch.

`predict_step` is the model of a step and receives every rate from its caller, for example measured ones; `predict`
derives the rates from a machine and a workload, under stated `Assumptions`. `topology.traffic` has the cost of
collectives, and the options of each method what is sent. Units: seconds and bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchtitan_scape.core.workloads import LocalModel, Workload
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.sharding.cost import LevelsPlan, ShardPlan, flat_rows
from torchtitan_scape.sharding.matrix_cost import MFU, divides_matrices, gather_stages, matrix_stages, optimizer_flops
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import MEMORY_EFFICIENCY, Links
from torchtitan_scape.topology.traffic import (
    CollectiveCall,
    Levels,
    best_chunks,
    bytes_by_level,
    pipeline_seconds,
    scalar_stages,
    spanned,
    stage_seconds,
)

# Rate of matrix products in BF16, by runtime, divided by those in TF32, or FP32 where there is none, and in FP32. An
# H100 has 989, 495 and 67 TFLOP/s, an MI250X 383 and 96.
BF16_PER = {"CUDA": (2.0, 15.0), "ROCm": (4.0, 4.0), "": (1.0, 1.0)}

FSDP = ShardPlan()  # with its own collectives

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
    calls = run.options.collective_calls(model, levels)
    if chunk_bytes:
        calls = [replace(call, chunks=0) for call in calls]
    exposed = [call for call in calls if not call.hidden]
    exchange, chunks = _exposed_exchange(exposed, levels, links, pack_seconds, chunk_bytes)
    beside_passes = 0.0
    if run.overlap:
        weights = [call for call in exposed if call.kind == "all_gather" and run.options.divides_update]
        arriving = sum(stage_seconds([stage for call in weights for stage in call.slowest_stages(levels)], links))
        beside_passes = min(exchange - arriving, backward_seconds) + min(arriving, backward_seconds / 2)
    # No rank packs before the finite flag is known.
    exchange += run.options.scalar_reductions * sum(stage_seconds(scalars, links)) - beside_passes
    later = sum(stage_seconds([s for call in calls if call.hidden for s in call.stages(levels)], links))
    hidden = min(later, compute_seconds)
    sent = bytes_by_level([stage for call in calls for stage in call.stages(levels)])
    times = (compute_seconds, exchange + later - hidden, shard_seconds, pack_seconds + rest_seconds, fixed_seconds)
    return Prediction(run, *times, hidden + beside_passes, sent, chunks)


def _exposed_exchange(
    calls: Sequence[CollectiveCall], levels: Levels, links: Links, pack_seconds: float, chunk_bytes: int
) -> tuple[float, int]:
    """Return the seconds that collectives add to the packing pass, and the chunks of the payload."""
    latency, transfer = stage_seconds([stage for call in calls for stage in call.slowest_stages(levels)], links)
    # The stages contain the latency of all chunks if the method determines these. Only all-reduces are divided here.
    own_chunks = round(sum(call.share * call.chunks for call in calls))
    if own_chunks or any(call.kind != "all_reduce" for call in calls):
        chunks = 1
    elif chunk_bytes:
        chunks = max(1, -(-int(sum(call.share * call.input_bytes for call in calls)) // chunk_bytes))
    else:
        chunks = best_chunks(pack_seconds, transfer, latency)
    seconds = pipeline_seconds(pack_seconds, transfer, latency, chunks) - pack_seconds if levels else 0.0
    return seconds, max(chunks, own_chunks)


# ------------------------------------------------------------------------- rates from machine and workload


@dataclass(frozen=True)
class Assumptions:
    """Values that take the place of measurements.

    Attributes:
        mfu: Share of the device's peak that forward and backward passes reach, and an optimizer's matrix products.
        memory_efficiency: Share of the nominal memory bandwidth that the optimizer's passes reach.
        usable_memory: Share of the device's memory that a job can fill (fragmentation, NCCL's buffers, the context).
    """

    mfu: float = MFU
    memory_efficiency: float = MEMORY_EFFICIENCY
    usable_memory: float = 0.9

    def product_rate(self, layout: Layout) -> float:
        """Return the operations/s of matrix products in BF16 on one device."""
        return layout.machine.device.peak * 1e12 * self.mfu


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
    shard_axis: ShardPlan | LevelsPlan = FSDP,
) -> Prediction:
    """Predict a step of `workload` on `layout` (replicate x shard) from bytes, FLOPs and `assumptions`.

    The traffic of the shard axis is exposed as far as it exceeds compute, the matrix exchange of an optimizer and what
    three levels send once per step completely.

    Args:
        batch: Sequences per step, over all ranks.
        micro_batch: Sequences per rank and micro-batch.
        compute_seconds: Forward and backward passes of a step, if known.

    Raises:
        ValueError: The ranks do not divide the batch.
    """
    assumptions = assumptions or Assumptions()
    ranks = layout.replicate * layout.shard
    _check_batch(batch, ranks, micro_batch)
    if compute_seconds is None:
        flops = workload.flops_per_token() * workload.sequence * batch
        compute_seconds = flops / (ranks * assumptions.product_rate(layout))
    micro_batches = batch // (ranks * micro_batch)
    levels, rows = isinstance(shard_axis, LevelsPlan), flat_rows(workload, layout.shard)
    shard = shard_axis.shards(layout)
    model, whole = workload.local(shard), workload.whole()
    divided = not levels and divides_matrices(run.options, run.optimizer, whole, layout, links, assumptions.mfu)
    pack, rest = _pass_seconds(run, model, layout, links, assumptions)
    rest += _product_flops(
        run, model, whole, layout, divided or (not levels and run.options.divides_update)
    ) / assumptions.product_rate(layout)
    matrices = matrix_stages(run.optimizer, whole, layout)
    matrices += gather_stages(run.optimizer, whole, layout) if divided else []
    traffic, once = shard_axis.seconds(rows, layout, links, micro_batches)
    tiers = layout.replica_tiers
    predicted = predict_step(
        run,
        () if shard_axis.sums else tiers,
        links,
        model,
        compute_seconds=compute_seconds,
        pack_seconds=pack,
        rest_seconds=rest,
        shard_seconds=max(0.0, traffic - compute_seconds) + sum(stage_seconds(matrices, links)),
        fixed_seconds=fixed_seconds + once,
        backward_seconds=last_backward(compute_seconds, micro_batches),
    )
    memory = run.total_memory(workload, shard, layout.replicate, micro_batch, len(tiers) > 1)
    return replace(predicted, memory=shard_axis.memory(memory, rows, layout))


def _check_batch(batch: int, ranks: int, micro_batch: int) -> None:
    if batch < 1 or batch % (ranks * micro_batch):
        raise ValueError(
            f"a global batch of {batch} sequences is no multiple of {ranks} ranks x {micro_batch} sequences at a time; "
            f"take {max(1, round(batch / ranks / micro_batch)) * ranks * micro_batch}"
        )


def _pass_seconds(
    run: PlannedRun, model: LocalModel, layout: Layout, links: Links, assumptions: Assumptions
) -> tuple[float, float]:
    """Return the seconds of (the packing pass, the other passes). Copies to and from the host overlap with them."""
    device = layout.machine.device
    rate = links.memory_bandwidth or device.memory_bandwidth * 1e9 * assumptions.memory_efficiency
    several_levels = len(layout.replica_tiers) > 1
    moved = run.memory_traffic(model, layout.replicate, several_levels)
    copied = run.options.host_link_traffic(model, layout.replicate)
    pack, rest = (
        max(nbytes / rate, of_host / (device.host_link * 1e9)) for nbytes, of_host in zip(moved, copied, strict=True)
    )
    return pack, rest


def _product_flops(run: PlannedRun, model: LocalModel, whole: LocalModel, layout: Layout, divided: bool) -> float:
    """Return the matrix products of optimizer and exchange, as operations in BF16. divided: among replicas."""
    sharing = layout.shard * layout.context * (layout.replicate if divided else 1)
    flops = optimizer_flops(run.options, run.optimizer, whole, sharing)
    products = run.options.matrix_flops(model, layout.replicate)
    return flops + sum(n * count for n, count in zip(BF16_PER[layout.machine.device.runtime], products, strict=True))

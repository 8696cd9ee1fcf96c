"""What TorchTitan's trainer sees as its optimizers: they synchronise the replicas, clip, and update.

TorchTitan clips before `step()`, where replicas still disagree. Its call is turned into `grad_norm`, a tensor
that `step()` fills in place and the trainer logs afterwards.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims

from kernels import choose, finite_check
from topology.collectives import ReplicaCollectives
from topology.layout import Layout
from topology.links import Links
from topology.process_groups import collectives_of
from topology.simulated import SimulatedCollectives, played_layout
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.optimizer.adams import AdamS
from torchtitan_scape.parallelize import ReplicaParallelDims
from torchtitan_scape.planner.cost import Assumptions, best_chunk_bytes
from torchtitan_scape.planner.payload import payload_bytes
from torchtitan_scape.planner.volumes import Method, optimizer_bytes
from torchtitan_scape.report.timing import PhaseTimer
from torchtitan_scape.sync.consistency import Shared, check_replicas_equal, shared_by_dense, shared_by_scape
from torchtitan_scape.sync.dense import DenseSync
from torchtitan_scape.sync.guard import FiniteGuard
from torchtitan_scape.sync.scape.optimizer import Scape
from torchtitan_scape.sync.scape.options import ScapeOptions
from torchtitan_scape.sync.scape.state import StateByParameter
from torchtitan_scape.sync.scape.weights import hold_in_bfloat16
from torchtitan_scape.sync.shards import Shard, collect_shards, flat_gradient, local, store_gradient


class ReplicaOptimizers(OptimizersContainer):
    """The common part: one optimizer over the one model part, on named parameters."""

    collectives: ReplicaCollectives
    timer: PhaseTimer
    guard: FiniteGuard
    grad_norm: Tensor
    _shards: list[Shard]
    repairs = False  # whether replicas that differ from the others are repaired

    def _own(self, model_parts: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.model_parts = model_parts
        self.optimizers = [optimizer]
        self._post_init([p for group in optimizer.param_groups for p in group["params"]], optimizer.defaults)

    def dense_bytes(self) -> float:
        """Bytes that this rank would send in a step that all-reduces all its gradients in FP32."""
        entries = sum(local(p).numel() for group in self.optimizers[0].param_groups for p in group["params"])
        return self.collectives.reduced_bytes(entries)

    def collect(self) -> None:
        """What a simulated replica leaves behind its last backward pass is taken; dense gradients just add up."""

    def settle(self) -> None:
        """Learns whether the last step was applied; `step` does it for the one before."""
        self.guard.settle()

    def shards(self) -> list[Shard]:
        """Of all parameters, in the order in which checkpoints are read."""
        return self._shards

    def send_all(self) -> None:
        """Makes the next step dense, so that it leaves no residual; it is where gradients are dense."""

    def counters(self) -> dict[str, Any]:
        """For a checkpoint: what is no tensor, as plain values."""
        self.settle()
        return {"counters": {"skipped": self.guard.skipped, "skipped_in_a_row": self.guard.skipped_in_a_row}}

    def put_counters(self, saved: dict[str, int]) -> None:
        """Takes back the "counters" of `counters`."""
        self.guard.skipped, self.guard.skipped_in_a_row = saved["skipped"], saved["skipped_in_a_row"]

    def shared(self) -> list[Shared]:
        """What all replicas hold alike, behind `settle`."""
        raise NotImplementedError

    def check_consistency(self, step: int) -> None:
        """Compares what replicas hold alike, to the last bit, behind `step`. A collective call; waits for the device.

        Raises ReplicasDifferError, on every rank, where it differs and is not to be, or cannot be, repaired.
        """
        if self.collectives.replicas == 1 or self.collectives.simulated or self.collectives.is_fake:
            return
        with self.timer.phase("compare"):
            self.settle()
            check_replicas_equal(self.collectives, self.shared(), self.grad_norm.device, step, self.repairs)

    def planned_bytes(self) -> float:
        """Bytes of payload and masks that this rank will send in a step, warm-up over."""
        return self.dense_bytes()

    def payload_parts(self) -> int:
        """Parts in which the payload goes at the target density."""
        return 1

    def statistics(self) -> dict[str, float]:
        """Figures of the last step for the log. A collective call."""
        raise NotImplementedError


class DenseOptimizers(ReplicaOptimizers):
    """AdamW or AdamS on gradients that `DenseSync` synchronises."""

    def __init__(
        self,
        model_parts: list[nn.Module],
        make_optimizer: Any,
        collectives: ReplicaCollectives,
        max_norm: float,
        max_skipped_steps: int,
        kernels: str,
    ) -> None:
        named = _named_parameters(model_parts)
        self._own(model_parts, make_optimizer(named))
        self.collectives, self.max_norm = collectives, max_norm
        self._sync = DenseSync(collectives, reduction="sum")
        self._shards = collect_shards(self.optimizers[0].param_groups)
        device = local(self._shards[0].parameter).device
        self.timer = PhaseTimer(device.type)
        self.guard = FiniteGuard(
            [s.name for s in self._shards],
            finite_check(choose(kernels, device)),
            self.timer.timed("wait", collectives.all_true),
            collectives.gather_objects,
            dist.get_rank(),
            max_skipped_steps,
        )
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.clip_factor = torch.ones((), dtype=torch.float32, device=device)
        collectives.broadcast_from_first([local(s.parameter).detach() for s in self._shards])

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        phase = self.timer.phase
        with phase("check"):
            self.settle()
            gradients = [flat_gradient(shard).float() for shard in self._shards]
            applied = self.guard.check(gradients)
        with phase("exchange"):
            self._sync.synchronize(gradients)
        with phase("clip"):
            counted = [g for shard, g in zip(self._shards, gradients, strict=True) if shard.counted]
            squares = torch.zeros_like(self.grad_norm)
            if counted:
                squares += torch.stack(torch._foreach_norm(counted, 2, torch.float64)).square().sum().float()
            self.grad_norm.copy_(self.collectives.sum_over_model(squares).sqrt())
            self.clip_factor.copy_((self.max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0))
            torch._foreach_mul_(gradients, self.clip_factor)
            for shard, gradient in zip(self._shards, gradients, strict=True):
                store_gradient(shard, gradient)
        with phase("update"):
            self._update(applied)

    def _update(self, applied: Tensor) -> None:
        optimizer = self.optimizers[0]
        if isinstance(optimizer, AdamS) or optimizer.defaults["fused"]:
            # The way a gradient scaler skips a step, on the device.
            optimizer.found_inf = (~applied).float()
            optimizer.step()
        elif applied.item():
            optimizer.step()

    def shared(self) -> list[Shared]:
        return shared_by_dense(self.optimizers[0], self._shards)

    def statistics(self) -> dict[str, float]:
        return {
            "density": 1.0,
            "clip_factor": self.clip_factor.item(),
            "skipped_steps": float(self.guard.skipped),
        }


class ScapeOptimizers(ReplicaOptimizers):
    """SCAPE, which owns the exchange, clipping included."""

    def __init__(self, model_parts: list[nn.Module], make_optimizer: Any) -> None:
        self.scape: Scape = make_optimizer(_named_parameters(model_parts))
        self._own(model_parts, self.scape)
        self.collectives, self.timer, self.guard = self.scape.collectives, self.scape.timer, self.scape.guard
        self.grad_norm = self.scape.grad_norm

    def statistics(self) -> dict[str, float]:
        return self.scape.statistics()

    def shared(self) -> list[Shared]:
        return shared_by_scape(self.scape)

    def collect(self) -> None:
        self.scape.collect()

    def settle(self) -> None:
        self.scape.settle()

    def planned_bytes(self) -> float:
        return self.scape.planned_bytes()

    def payload_parts(self) -> int:
        return len(self.scape.passes.parts)

    def shards(self) -> list[Shard]:
        return self.scape.ordered

    def send_all(self) -> None:
        self.scape.send_all()

    def counters(self) -> dict[str, Any]:
        return super().counters() | {"scape": StateByParameter(self.scape).record()}


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    *,
    job_config: JobConfig,
) -> ReplicaOptimizers:
    """The optimizers that `[sync] method` and `[optimizer] name` ask for."""
    assert isinstance(parallel_dims, ReplicaParallelDims) and parallel_dims.groups is not None
    sync, scape = job_config.sync, job_config.sync.scape
    layout, played = parallel_dims.groups.layout, job_config.topology.simulate_replicas
    assert layout is not None
    collectives = collectives_of(parallel_dims.groups)
    if played > 1:
        layout, collectives = played_layout(layout, played), SimulatedCollectives(played, parallel_dims.groups)
    common: dict[str, Any] = dict(
        lr=optimizer_config.lr,
        betas=(optimizer_config.beta1, optimizer_config.beta2),
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
    )
    max_norm = float(job_config.training.max_norm)
    match sync.method, optimizer_config.name:
        case "scape", "AdamS":
            chunk_bytes = scape.chunk_bytes or _chunk_bytes(model_parts, scape, layout, collectives)
            make: Any = partial(
                Scape,
                **common,
                options=replace(scape, chunk_bytes=chunk_bytes),
                replicas=collectives,
                max_norm=max_norm,
                reduction="sum",
                max_skipped_steps=sync.max_skipped_steps,
                kernels=sync.kernels,
            )
            if scape.weights_dtype == "bfloat16":
                hold_in_bfloat16(model_parts[0], scaled=scape.update == "sharded")
            optimizers: ReplicaOptimizers = ScapeOptimizers(model_parts, make)
            optimizers.repairs = sync.on_inconsistency == "repair"
            return optimizers
        case "dense", "AdamS":
            make = partial(AdamS, **common, kernels=sync.kernels)
        case "dense", "AdamW":
            implementation = optimizer_config.implementation
            make = partial(
                torch.optim.AdamW,
                **common,
                fused=implementation == "fused",
                foreach=implementation == "foreach",
            )
        case method, name:
            raise ValueError(f"no optimizer for [sync] method = {method!r} with [optimizer] name = {name!r}")
    optimizers = DenseOptimizers(model_parts, make, collectives, max_norm, sync.max_skipped_steps, sync.kernels)
    optimizers.repairs = sync.on_inconsistency == "repair"
    return optimizers


def _chunk_bytes(
    model_parts: list[nn.Module], scape: ScapeOptions, layout: Layout, collectives: ReplicaCollectives
) -> int:
    """The payload's chunk that the cost model finds best, from the nominal figures of the machine's preset."""
    shapes = [tuple(local(p).shape) for _, p in _named_parameters(model_parts)]
    # Of the whole group, so that all its ranks agree: the links of one rank's own rings may differ from the next one's.
    tiers = layout.hierarchy(layout.replicate_group(dist.get_rank()))
    method = Method("scape", scape.density, scape.wire_dtype, block=scape.block_size)
    device = layout.machine.device
    packed, _ = optimizer_bytes(method, shapes, layout.replicate)
    return best_chunk_bytes(
        payload_bytes(shapes, scape.density, block=scape.block_size),
        packed / (device.memory_bandwidth * 1e9 * Assumptions().memory_efficiency),
        [(tier.level, tier.size) for tier in tiers],
        Links.from_machine(layout.machine),
        scape.wire_dtype,
        flat=len(collectives.rings) < len(tiers),
    )


def _named_parameters(model_parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    assert len(model_parts) == 1, "pipeline parallelism is refused at start"
    return [(name, p) for name, p in model_parts[0].named_parameters() if p.requires_grad]

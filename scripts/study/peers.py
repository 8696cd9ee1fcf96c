"""Data-parallel training of other libraries inside our trainer: PyTorch's DDP with its hooks, TorchTitan's HSDP, and
Megatron-LM's distributed optimizer.

All exchange gradients during the backward pass. AdamS and clipping are ours, so that only the exchange differs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.topology.traffic import CollectiveCall

Parallelize = Callable[..., nn.Module]


def without_fsdp(model: nn.Module, parallel_dims: Any, job_config: Any, *, family: Parallelize) -> nn.Module:
    """Return the model with plain parameters, as DDP needs them. TorchTitan then trains in mixed precision by AMP."""
    if parallel_dims.dp_shard > 1 or parallel_dims.tp > 1:
        raise ValueError("a model without FSDP needs shard and tensor degrees of 1; set parallelism accordingly")
    if job_config.training.mixed_precision_param != "float32":
        parallel_dims.bare = True
    bare = copy.copy(parallel_dims)
    bare.bare = True
    return family(model, bare, job_config)  # activation checkpointing and torch.compile


@dataclass
class DdpPeer:
    """DistributedDataParallel, plain or with one of its hooks, "bf16" or "low_rank" (PowerSGD of a rank)."""

    hook: str
    rank: int
    parallelize: ClassVar[Parallelize | None] = staticmethod(without_fsdp)
    counted: ClassVar[bool] = False  # whether the ranks count the bytes that they send

    def install(self, trainer: Any) -> None:
        group = trainer.replica_optimizer.collectives.groups.replicate
        trainer.replica_optimizer.first_step_check.remove()
        buckets = {}
        if self.hook == "low_rank":
            # One bucket: the hook chains all-reduces in callbacks. With two buckets in flight gloo runs these in a
            # different order on every rank.
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40  # as in DDP's documentation
            buckets = {"bucket_cap_mb": 1 << 20}
        self.model = _WrappedModel(trainer.model_parts[0], process_group=group, **buckets)
        if self.hook == "bf16":
            # As a lambda: DDP refuses this hook by its name without NCCL, although it works with gloo.
            self.model.register_comm_hook(group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        elif self.hook == "low_rank":
            # Compresses from the third step on, the earliest with error feedback and warm start.
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        trainer.model_parts[0] = self.model
        # DDP averages; the trainer's loss, divided by the global token count, needs sums.
        _replace_method(trainer, trainer.replica_optimizer.methods[0].context.gradient_scale)

    def exchanging(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: only the `last` one of a step exchanges."""
        return nullcontext() if last else self.model.no_sync()

    def silent(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass without an exchange."""
        return self.model.no_sync()


@dataclass
class HsdpPeer:
    """TorchTitan's parallelization as it is, with FSDP2 on a mesh of two axes.

    FSDP2 starts the all-reduce of a layer's gradients during the backward pass, on its own stream. gloo has no streams:
    its call blocks the backward pass. With `overlaps` it is asynchronous, and waited for at the end, as on a GPU.
    """

    overlaps: bool
    counted: ClassVar[bool] = False

    @staticmethod
    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any, *, family: Parallelize) -> nn.Module:
        # FSDP is on for a shard axis of size 1, too, for which TorchTitan would take DDP.
        native, replicated = copy.copy(parallel_dims), property(lambda dims: dims.dp_replicate > 1)
        native.__class__ = type("NativeDims", (type(parallel_dims),), {"dp_replicate_enabled": replicated})
        wrapped = family(model, native, job_config)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        return wrapped

    def install(self, trainer: Any) -> None:
        if trainer.layout.tensor > 1:
            raise ValueError("HSDP is compared without tensor parallelism; set its degree to 1")
        for shard in trainer.replica_optimizer._shards:
            shard.counted = True  # the mesh contains the replicas, too
        trainer.replica_optimizer.first_step_check.remove()  # it refuses copies of FSDP2
        self._timer = trainer.replica_optimizer.timer
        self._one_pass = trainer.gradient_accumulation_steps == 1 and trainer.device.type == "cpu"
        _replace_method(trainer, 1.0)

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """Open the context of a micro-batch; TorchTitan all-reduces after each."""
        if not (self.overlaps and self._one_pass):  # later micro-batches add to received gradients
            yield
            return
        started: list[tuple[dist.Work, Tensor]] = []

        def start(tensor: Tensor, **options: Any) -> None:
            started.append((dist.all_reduce(tensor, **options, async_op=True), tensor))

        with _with_all_reduce(start):
            yield
        with self._timer.phase("exchange"):
            for work, _ in started:
                work.wait()

    def silent(self) -> AbstractContextManager[None]:
        return _with_all_reduce(lambda tensor, **options: None)


class DistributedOptimizerPeer:
    """Megatron-LM's distributed optimizer, by FSDP2: optimizer states are sharded over all ranks, weights are gathered
    and gradients are reduced once per step.

    The weights stay gathered between the micro-batches, and their gradients are accumulated without communication. Set
    the shard degree to -1 and `fsdp_reshard_after_forward` to "never".
    """

    parallelize: Parallelize | None = None  # as for our methods
    counted = True

    def install(self, trainer: Any) -> None:
        self._model = trainer.model_parts[0]
        if not isinstance(self._model, FSDPModule) or trainer.job_config.sharding.active:
            raise ValueError("the distributed optimizer needs a shard degree above 1, and no [sharding]")

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        self._model.set_requires_gradient_sync(last)
        self._model.set_reshard_after_backward(last)
        yield

    def silent(self) -> AbstractContextManager[None]:
        return nullcontext()  # its exchange is that of the shard axis


Peer = DdpPeer | HsdpPeer | DistributedOptimizerPeer
PEERS: dict[str, Callable[[int], Peer]] = {
    "ddp": lambda rank: DdpPeer("", rank),
    "ddp-bf16": lambda rank: DdpPeer("bf16", rank),
    "ddp-powersgd": lambda rank: DdpPeer("low_rank", rank),
    "hsdp": lambda rank: HsdpPeer(overlaps=True),
    "hsdp-waits": lambda rank: HsdpPeer(overlaps=False),
    "distributed-optimizer": lambda rank: DistributedOptimizerPeer(),
}


def _with_all_reduce(all_reduce: Callable[..., None]) -> AbstractContextManager[None]:
    """Return a context in which FSDP2 calls another all_reduce."""
    return replaced(_fsdp_collectives, "dist", SimpleNamespace(**vars(dist) | {"all_reduce": all_reduce}))


class _WrappedModel(torch.nn.parallel.DistributedDataParallel):
    """DDP with the attributes of its model, which the trainer reads."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _AlreadySynchronized(GradientMethod):
    """Receives synchronized gradients; `factor` makes them sums, as the trainer's loss needs."""

    factor: float

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        if self.factor != 1.0:
            torch._foreach_mul_(gradients, self.factor)
        return gradients

    def collective_calls(self) -> list[CollectiveCall]:
        return []


def _replace_method(trainer: Any, factor: float) -> None:
    dense = trainer.replica_optimizer.methods[0]
    method = _AlreadySynchronized(dense.context, dense.options)
    method.factor = factor
    trainer.replica_optimizer.methods = [method]

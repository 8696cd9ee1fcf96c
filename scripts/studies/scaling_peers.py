"""What a user would pick instead, inside our trainer: PyTorch's DDP with its hooks, and TorchTitan's own HSDP.

Both exchange gradients while the backward pass runs; AdamS and clipping stay ours, so that the exchange alone differs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from topology.calls import CollectiveCall
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import StepInfo

Parallelize = Callable[..., nn.Module]


def unwrapped(model: nn.Module, parallel_dims: Any, job_config: Any, *, family: Parallelize) -> nn.Module:
    """No FSDP: plain parameters, which DDP takes."""
    if parallel_dims.dp_shard > 1 or parallel_dims.tp > 1:
        raise ValueError("a model without FSDP needs shard and tensor degrees of 1; set parallelism accordingly")
    return model


class Ddp:
    """DistributedDataParallel: "ddp", or with one of its hooks, "ddp-bf16" and "ddp-powersgd" (at a rank)."""

    parallelize: Parallelize = staticmethod(unwrapped)

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def install(self, trainer: Any) -> None:
        group = trainer.replica_optimizer.collectives.groups.replicate
        buckets = {}
        if self.name == "ddp-powersgd":
            # One bucket: the hook chains all-reduces in callbacks, which gloo runs in another order on every rank when
            # two buckets are on their way.
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40  # as DDP's documentation has it
            buckets = {"bucket_cap_mb": 1 << 20}
        self.model = _Wrapped(trainer.model_parts[0], process_group=group, **buckets)
        if self.name == "ddp-bf16":
            # Under another name: DDP refuses this hook by its name where there is no NCCL, though gloo can do it.
            self.model.register_comm_hook(group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        elif self.name == "ddp-powersgd":
            # Compressing from the third step on, the earliest that error feedback and warm start allow.
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        trainer.model_parts[0] = self.model
        # It averages, and the trainer's loss, divided by the global token count, wants sums.
        _replace_method(trainer, lambda scale: scale)

    def exchanging(self, last: bool) -> AbstractContextManager[None]:
        """For a micro-batch: once a step, after the last one."""
        return nullcontext() if last else self.model.no_sync()

    def silent(self) -> AbstractContextManager[None]:
        """For a backward pass that exchanges nothing."""
        return self.model.no_sync()


class Hsdp:
    """TorchTitan's parallelisation as it is, with the replicate axis in FSDP2's hands: a mesh of two axes.

    FSDP2 starts the all-reduce of a layer's gradients as soon as the backward pass has left them, on a stream of its
    own. gloo has no streams, and its call would stand in the way of the backward pass: with `overlaps` it is started
    there, and waited for at the end, as a GPU does it; without, gloo's way.
    """

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps

    @staticmethod
    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any, *, family: Parallelize) -> nn.Module:
        # FSDP is on for a shard axis of size 1, too, where TorchTitan would take DDP.
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
            shard.counted = True  # its mesh has the replicas, too, which hold copies
        self._timer = trainer.replica_optimizer.timer
        self._in_steps = trainer.gradient_accumulation_steps == 1 and trainer.device.type == "cpu"
        _replace_method(trainer, lambda scale: 1.0)

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """For a micro-batch; TorchTitan all-reduces after each."""
        if not (self.overlaps and self._in_steps):  # what is added to must have arrived
            yield
            return
        started: list[tuple[dist.Work, Tensor]] = []

        def start(tensor: Tensor, **options: Any) -> None:
            started.append((dist.all_reduce(tensor, **options, async_op=True), tensor))

        with patch.object(_fsdp_collectives, "dist", _Instead(start)):
            yield
        with self._timer.phase("exchange"):
            for work, _ in started:
                work.wait()

    def silent(self) -> AbstractContextManager[Any]:
        return patch.object(_fsdp_collectives, "dist", _Instead(lambda tensor, **options: None))


PEERS: dict[str, Callable[[int], Ddp | Hsdp]] = {
    "ddp": lambda rank: Ddp("ddp", rank),
    "ddp-bf16": lambda rank: Ddp("ddp-bf16", rank),
    "ddp-powersgd": lambda rank: Ddp("ddp-powersgd", rank),
    "hsdp": lambda rank: Hsdp(overlaps=True),
    "hsdp-waits": lambda rank: Hsdp(overlaps=False),
}


class _Instead:
    """torch.distributed with another all_reduce."""

    def __init__(self, all_reduce: Callable[..., None]) -> None:
        self.all_reduce = all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _Wrapped(torch.nn.parallel.DistributedDataParallel):
    """With the attributes of its model, which the trainer asks for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Exchanged(GradientMethod):
    """Gradients have been exchanged when they come here; factor: makes them what the trainer's loss wants, sums."""

    factor: float

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        if self.factor != 1.0:
            torch._foreach_mul_(gradients, self.factor)
        return gradients

    def collective_calls(self) -> list[CollectiveCall]:
        return []


def _replace_method(trainer: Any, factor: Callable[[float], float]) -> None:
    dense = trainer.replica_optimizer.methods[0]
    method = _Exchanged(dense.context, dense.options)
    method.factor = factor(dense.context.gradient_scale)
    trainer.replica_optimizer.methods = [method]

"""TorchTitan's parallelization without the replicate axis, which the optimizer handles, and its pipelines.

A pipeline has TorchTitan's stages and schedules, and the gradients of a run without stages.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.components import LossFunction
from torchtitan_scape.titan.distributed import ParallelDims, pipeline_llm
from torchtitan_scape.topology.groups import LevelGroups, ReplicaGroups, ShardGroups


@dataclass
class ReplicaParallelDims(ParallelDims):
    """ParallelDims of a model whose replicas are synchronized by the optimizer.

    TorchTitan passes the replicate axis to FSDP2 or DDP if `dp_replicate_enabled`: here it is always False. FSDP2 is
    enabled on the one-dimensional shard axis, even if its size is 1: it then runs no collective, provides mixed
    precision, and leaves the local gradient in `p.grad`. It is disabled for a `bare` model, which needs none of this.
    """

    groups: ReplicaGroups | None = None
    shard_groups: ShardGroups | None = None
    level_groups: LevelGroups | None = None
    bare: bool = False

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or super()._mesh_exist(name, degree)

    @property
    def dp_replicate_enabled(self) -> bool:
        return False

    @property
    def fsdp_enabled(self) -> bool:
        return not self.bare


def parallelize(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, *, family: Callable[..., nn.Module]
) -> nn.Module:
    """Parallelize the model with a function such as TorchTitan's `parallelize_llama`, and make FSDP2's reduce-scatter a
    sum.

    TorchTitan disables FSDP2's gradient division by a factor of 1. FSDP2 implements the factor by a pre-multiplied sum,
    which gloo does not support. With a single shard it divides by the factor in a pass of its own, 8 bytes per
    parameter and micro-batch, so the factor is removed.

    An FP32 model with a single shard does not use FSDP2: its hooks would neither communicate nor cast, but take a
    quarter of the step time of a small model. A dry run needs FSDP2 to move the model from the meta device.
    """
    training, dry = job_config.training, job_config.comm.mode == "fake_backend"
    one_shard = parallel_dims.dp_shard * parallel_dims.cp == 1 and not job_config.sharding.levels.active
    if (
        not dry
        and one_shard
        and parallel_dims.tp == 1
        and (training.mixed_precision_param == training.mixed_precision_reduce == training.dtype == "float32")
    ):
        parallel_dims = copy.copy(parallel_dims)
        cast(ReplicaParallelDims, parallel_dims).bare = True
    model = family(model, parallel_dims, job_config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if one_shard:
                module.set_gradient_divide_factor(cast(float, None))
    return model


class LossPerToken:
    """A loss that is summed over tokens, divided by `tokens`.

    A schedule computes the loss and its gradient, and TorchTitan 0.2.2 divides only the logged loss by the global
    number of tokens. The trainer therefore sets `tokens` for each step. It is 1 in a validation, which divides itself.
    """

    def __init__(self, summed: LossFunction) -> None:
        self._summed = summed
        self.tokens: Tensor | float = 1.0

    def __call__(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return self._summed(predictions, labels) / self.tokens


def build_pipeline(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, device: torch.device, *others: Any
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Build this rank's stage and its schedule for TorchTitan's TrainSpec. The configuration was checked before.

    TorchTitan seeds every stage differently, and initializes the stage next. On a CPU each rank draws the whole model
    (see `models.initial`), so all stages must draw the same one. On GPUs a stage draws its own parameters in place.
    """
    built: tuple[Any, list[nn.Module], bool, bool] = pipeline_llm(model, parallel_dims, job_config, device, *others)
    if device.type == "cpu" and job_config.comm.mode != "fake_backend":
        state = torch.get_rng_state()
        dist.broadcast(state, group=parallel_dims.get_mesh("pp").get_group(), group_src=0)
        torch.set_rng_state(state)
    return built


def from_last_stage(parallel_dims: ParallelDims, values: list[float], device: torch.device) -> list[float]:
    """Return the values of the rank of the last stage, which has the loss. Collective over the stages."""
    mesh = parallel_dims.get_optional_mesh("pp")
    if mesh is None:
        return values
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(sent, group=mesh.get_group(), group_src=mesh.size() - 1)
    last_values: list[float] = sent.tolist()
    return last_values

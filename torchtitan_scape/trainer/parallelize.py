"""TorchTitan's parallelization without the replicate axis, which the optimizer handles."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.distributed import ParallelDims
from torchtitan_scape.topology.groups import LevelGroups, ReplicaGroups, ShardGroups


@dataclass
class ReplicaParallelDims(ParallelDims):
    """ParallelDims of a model whose replicas are synchronized by the optimizer.

    TorchTitan passes the replicate axis to FSDP2 or DDP if `dp_replicate_enabled`: here it is always False. FSDP2 is
    enabled on the one-dimensional shard axis, even if its size is 1: it then runs no collective, provides mixed
    precision, and leaves the local gradient in `p.grad`. It is disabled for models that need none of this.

    Attributes:
        bare: do not use FSDP2.
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
    """Parallelize the model with `family`, and make FSDP2's reduce-scatter a plain sum.

    TorchTitan disables FSDP2's gradient division by a factor of 1. FSDP2 implements the factor by a pre-multiplied sum,
    which gloo does not support. With a single shard it divides by the factor in a pass of its own, 8 bytes per
    parameter and micro-batch, so the factor is removed.

    An FP32 model with a single shard does not use FSDP2: its hooks would neither communicate nor cast, but take a
    quarter of the step time of a small model. A dry run needs FSDP2 to move the model from the meta device.

    Args:
        family: a function of the first three arguments, such as TorchTitan's `parallelize_llama`.
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

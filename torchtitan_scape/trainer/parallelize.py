"""TorchTitan's parallelisation with the replicate axis hidden from it: that axis belongs to the optimizer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from topology.groups import LevelGroups, ReplicaGroups, ShardGroups
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.distributed import ParallelDims


@dataclass
class ReplicaParallelDims(ParallelDims):
    """ParallelDims for a model whose replicas are synchronised by the optimizer.

    TorchTitan asks `dp_replicate_enabled` in order to hand the replicate axis to FSDP2 or DDP: the answer is
    no. FSDP2 is on, over the one-dimensional shard axis, of size 1 too: it then runs no collective, keeps mixed
    precision, and leaves the local gradient in `p.grad`. Where it has nothing at all to do (`bare`) it is off.
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
    """What the model's `family` does, then sums instead of scaled sums in FSDP2's reduce-scatter.

    TorchTitan turns FSDP2's gradient division off by a factor of 1, which becomes a pre-multiplied sum, and
    gloo has none. A model of one shard that keeps FP32 gets no FSDP2: its hooks would move nothing and cast nothing,
    and take a quarter of a small model's step. A dry run keeps it: a plain module cannot leave the meta device there.

    Args:
        family: as TorchTitan's `parallelize_llama`, of the first three arguments.
    """
    training, dry = job_config.training, job_config.comm.mode == "fake_backend"
    if (
        not dry
        and not job_config.sharding.levels.active
        and parallel_dims.non_data_parallel_size * parallel_dims.dp_shard * parallel_dims.cp == 1
        and (training.mixed_precision_param == training.mixed_precision_reduce == training.dtype == "float32")
    ):
        parallel_dims = copy.copy(parallel_dims)
        cast(ReplicaParallelDims, parallel_dims).bare = True
    model = family(model, parallel_dims, job_config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model

"""The replicas of a process, from what a user has: a process group, a dimension of a device mesh, or nothing."""

from collections.abc import Iterable
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_scape.core.parameters import Shard, model_group_of
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.process_groups import collectives_of

RealReplicas: TypeAlias = ProcessGroup | DeviceMesh | ReplicaGroups | ReplicaCollectives | None


def replicas_of(replicas: RealReplicas, shards: Iterable[Shard]) -> ReplicaCollectives:
    """Return the collectives between the ranks that hold the same shards.

    Raises:
        ValueError: a mesh of several dimensions, or no replicas in a job with more ranks than those of the model.
    """
    if isinstance(replicas, ReplicaCollectives):
        return replicas
    if isinstance(replicas, ReplicaGroups):
        return collectives_of(replicas, None)
    model = model_group_of(shards)
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(f"replicas is a mesh of {replicas.ndim} dimensions; pass one of them: mesh['replicate']")
        replicas = replicas.get_group()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = dist.get_world_size(model) if model else 1
    if replicas is None and own < ranks:
        raise ValueError(
            f"replicas is None, but the job has {ranks} ranks and the model is on {own} of them, so the others would "
            "train models of their own; pass dist.group.WORLD or mesh['replicate'], or, if this is intended, a process "
            "group with this rank alone"
        )
    return collectives_of(None if replicas is None or dist.get_world_size(replicas) == 1 else replicas, model)

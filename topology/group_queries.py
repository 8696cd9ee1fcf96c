"""Questions about process groups, and small gathers over them for set-up and scalars."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.torch_version import all_gather_into


def gather_scalars(value: Tensor, group: ProcessGroup) -> Tensor:
    """Gather a scalar of every rank as (ranks,), in rank order."""
    values = torch.empty(group.size(), dtype=value.dtype, device=value.device)
    all_gather_into(values, value.view(1), group=group)
    return values


def size_and_rank(group: ProcessGroup | None) -> tuple[int, int]:
    """Return (size, rank in the group); None stands for this rank alone."""
    return (1, 0) if group is None else (group.size(), group.rank())


def levels_of(groups: ReplicaGroups) -> tuple[RankGroup, ...]:
    """Return the levels of the groups, else one level of all replicas; () for a single replica."""
    if groups.levels or groups.replicate is None:
        return groups.levels
    return (RankGroup(successor_level(groups, groups.replicate), *size_and_rank(groups.replicate)),)


def successor_level(groups: ReplicaGroups, group: ProcessGroup) -> str:
    """Return the level of the link from this rank to the next rank of `group`."""
    if groups.layout is None:
        return "network"
    return groups.layout.successor_level(dist.get_rank(), tuple(dist.get_process_group_ranks(group)))


def gather_lists(group: ProcessGroup | None, items: list[Any]) -> list[Any]:
    """Gather a list from every rank of the group and concatenate them. None stands for this rank alone."""
    if group is None:
        return items
    lists: list[Any] = [None] * group.size()
    dist.all_gather_object(lists, items, group=group)
    return [item for entries in lists for item in entries]

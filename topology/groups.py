"""Process groups of a layout. The only place that calls `new_group`."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from topology.layout import Layout


@dataclass(frozen=True)
class ReplicaGroups:
    """The two groups that a method on the replicate axis needs.

    replicate: the ranks that hold the same parameters and see different data; None for one replica.
    model: the ranks that hold one replica together (shard x context x tensor); None for one rank.
    layout: tells which link a byte crosses; without it every byte counts as "network".
    """

    replicate: ProcessGroup | None
    model: ProcessGroup | None
    layout: Layout | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        for group in (self.replicate, self.model):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def build_groups(layout: Layout, timeout: timedelta) -> ReplicaGroups:
    """Builds the groups of this rank. A collective call: every rank of the world must make it."""
    if layout.world_size != dist.get_world_size():
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, but {dist.get_world_size()} are running; "
            "plan it for the world size that was launched"
        )
    return ReplicaGroups(
        replicate=_own_group(layout.replicate_groups(), timeout),
        model=_own_group(layout.model_groups(), timeout),
        layout=layout,
    )


def _own_group(groups: tuple[tuple[int, ...], ...], timeout: timedelta) -> ProcessGroup | None:
    """Every rank creates every group, in the same order, and keeps its own; groups of one need none."""
    own = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own

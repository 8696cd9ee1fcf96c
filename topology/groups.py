"""Process groups of a layout, and small gathers over them. Other modules create groups of hosts only."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.layout import Layout, RankGroup, Tier
from torchtitan_scape.topology.torch_version import all_gather_into

# Multi-stage exchanges that may be in flight at once: one uses the network while the next one is inside the node.
COMM_STREAMS = 2

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups that a method on the replicate axis needs.

    Attributes:
        replicate: Ranks that hold the same parameters and process different data; None for one replica.
        model: Ranks that together hold one replica (shard x context x tensor); None for one rank.
        scalars: The ranks of `replicate` in a group of their own for flags and norms, where chunks that are in flight
            use `replicate`: a scalar on the same group would wait until they were received. None to use `replicate`.
        layout: Determines the link level of each byte; without it every byte counts as "network".
        levels: Groups of a hierarchical exchange, innermost first; () for one group of all ranks of `replicate`.
        comm_streams: For every exchange that may be in flight, `levels` with separate process groups. () to run
            exchanges in the calling thread, on `replicate`.
    """

    replicate: ProcessGroup | None
    model: ProcessGroup | None
    layout: Layout | None = None
    levels: tuple[RankGroup, ...] = ()
    comm_streams: tuple[tuple[RankGroup, ...], ...] = ()
    scalars: ProcessGroup | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all collectives on these groups."""
        streams = [group.process_group for stream in self.comm_streams for group in stream]
        _set_timeout([self.replicate, self.model, self.scalars, *streams], timeout)

    def all_levels(self) -> tuple[RankGroup, ...]:
        """Return `levels`, or one level of all replicas if there are none; () for a single replica."""
        if self.levels or self.replicate is None:
            return self.levels
        return (RankGroup(self.successor_level(self.replicate), *size_and_rank(self.replicate)),)

    def successor_level(self, group: ProcessGroup) -> str:
        """Return the level of the link from this rank to the next rank of `group`."""
        if self.layout is None:
            return "network"
        return self.layout.successor_level(dist.get_rank(), tuple(dist.get_process_group_ranks(group)))


def build_groups(
    layout: Layout, timeout: timedelta, hierarchical: bool = True, staged: bool = True, in_flight: bool = True
) -> ReplicaGroups:
    """Create the groups of this rank on the replicate axis. Collective: every rank of the world must call it.

    Args:
        layout: Layout of all ranks of the world.
        timeout: Timeout of all collectives on the groups.
        hierarchical: Exchange level by level; otherwise over one group, whatever links it crosses.
        staged: Create the groups of `COMM_STREAMS` streams even if there is only one level. Encoded exchanges have
            several stages on one level.
        in_flight: Chunks may be in flight while a flag or a norm is exchanged: they have a delay, or overlap with the
            backward pass.

    Raises:
        ValueError: The layout is for another number of ranks.
    """
    if layout.world_size != dist.get_world_size():
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, but {dist.get_world_size()} are running; "
            "plan it for the world size that was launched"
        )
    hierarchies, rank = _hierarchies(layout, hierarchical), dist.get_rank()
    own = next((tiers for tiers in hierarchies if any(rank in ranks for ranks in tiers[0].groups)), ())
    levels = tuple(RankGroup.of(_own_ranks(tier.groups), rank, layout) for tier in own)
    comm_streams: list[tuple[RankGroup, ...]] = []
    for _ in range(_stream_count(hierarchies, staged) if own else 0):
        # Every rank creates all groups of all ranks in the same order, and keeps those that it belongs to.
        every = [group for tiers in hierarchies for group in build_tier_groups(tiers, timeout)]
        mine = [group for group in every if group is not None]
        tiers_and_groups = zip(own, mine, strict=True)
        comm_streams.append(
            tuple(RankGroup.of(_own_ranks(tier.groups), rank, layout, group) for tier, group in tiers_and_groups)
        )
    return ReplicaGroups(
        replicate=_own_group(layout.replicate_groups(), timeout),
        model=_own_group(layout.model_groups(), timeout),
        layout=layout,
        levels=levels,
        comm_streams=tuple(comm_streams),
        scalars=_own_group(layout.replicate_groups(), timeout) if _separates_scalars(hierarchies, in_flight) else None,
    )


def most_groups(layout: Layout, hierarchical: bool, staged: bool, in_flight: bool) -> int:
    """Return the largest number of process groups of `build_groups` that a rank belongs to."""
    hierarchies = _hierarchies(layout, hierarchical)
    tiers = max(map(len, hierarchies), default=0)
    replicate, model = (max(map(len, groups)) > 1 for groups in (layout.replicate_groups(), layout.model_groups()))
    scalars = _separates_scalars(hierarchies, in_flight)
    return replicate + scalars + model + _stream_count(hierarchies, staged) * tiers


def _separates_scalars(hierarchies: Sequence[tuple[Tier, ...]], in_flight: bool) -> bool:
    """Return whether scalars need a group of their own. With several levels, chunks use the groups of the streams."""
    return in_flight and any(len(tiers) == 1 for tiers in hierarchies)


def _hierarchies(layout: Layout, hierarchical: bool) -> list[tuple[Tier, ...]]:
    """Return the tiers, innermost first, of every replicate group with more than one rank."""
    groups = [group for group in layout.replicate_groups() if len(group) > 1]
    return [layout.hierarchy(group) if hierarchical else (Tier("network", (group,)),) for group in groups]


def _stream_count(hierarchies: Sequence[tuple[Tier, ...]], staged: bool) -> int:
    return COMM_STREAMS if staged or any(len(tiers) > 1 for tiers in hierarchies) else 0


def build_tier_groups(tiers: Sequence[Tier], timeout: timedelta) -> list[ProcessGroup | None]:
    """Create the process groups of all tiers. Collective.

    Returns this rank's group of every tier, or None where it belongs to none.
    """
    return [_own_group(tier.groups, timeout) for tier in tiers]


@dataclass(frozen=True)
class ShardGroups:
    """Groups of the ranks among which FSDP2 shards a replica, for the collectives that replace FSDP2's own.

    Ranks are in FSDP's order, which is node by node.

    Attributes:
        whole: All ranks of the shard axis, without a process group. FSDP2's own collectives are counted with it.
        gathers: Groups of an all-gather, innermost first: the ranks of a node, then those with the same position in
            every node; or all ranks in one group. Groups of one rank are omitted; () if FSDP2's collective is used.
        reductions: The same for a reduction. Its process groups are separate, because FSDP2 runs all-gathers and
            reductions on different CUDA streams.
    """

    whole: RankGroup
    gathers: tuple[RankGroup, ...] = ()
    reductions: tuple[RankGroup, ...] = ()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all collectives on these groups."""
        _set_timeout([group.process_group for group in (*self.gathers, *self.reductions)], timeout)


def build_shard_groups(layout: Layout, timeout: timedelta, gather_hops: int = 0, reduce_hops: int = 0) -> ShardGroups:
    """Create this rank's groups of the shard axis. Collective: every rank of the world must call it.

    Args:
        layout: Layout of all ranks of the world.
        timeout: Timeout of all collectives on the groups.
        gather_hops: Levels of the all-gather: 1 for all ranks in one group, 2 for the ranks of a node and then across
            nodes, 0 for no group.
        reduce_hops: The same for the reduction.
    """
    rank = dist.get_rank()
    whole = RankGroup.of(layout.shard_group(rank), rank, layout)
    gathers, reductions = (_shard_levels(layout, hops, timeout) if hops else () for hops in (gather_hops, reduce_hops))
    return ShardGroups(whole, gathers, reductions)


@dataclass(frozen=True)
class LevelGroups:
    """Groups of three-level sharding: weights on w ranks, gradients on g ranks of a node, optimizer state on all ranks.

    The g ranks of a node are divided into g / w subgroups of w consecutive ranks.

    Attributes:
        weights: The w ranks of a subgroup, for all-gathers of weights.
        gradients: All g ranks, ordered by subgroup and by position in it, for reductions of gradients.
        pairs: The ranks with this rank's position in every subgroup.
        nodes: The ranks with this rank's subgroup and position in every node.
        weight_peers: The ranks that hold the same weights; None for one rank.
        world: All ranks; None for one rank.
    """

    weights: RankGroup
    gradients: RankGroup
    pairs: RankGroup
    nodes: RankGroup
    weight_peers: ProcessGroup | None
    world: ProcessGroup | None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all collectives on these groups."""
        groups = (self.weights, self.gradients, self.pairs, self.nodes)
        _set_timeout([*(group.process_group for group in groups), self.weight_peers, self.world], timeout)


def build_level_groups(layout: Layout, weights: int, timeout: timedelta) -> LevelGroups:
    """Create the groups of three-level sharding. Collective: every rank of the world must call it.

    Args:
        layout: Layout of all ranks; its shard axis is that of the gradients, and axes other than replicate and shard
            have one rank.
        weights: Number of ranks that share one copy of the weights; it divides the shard axis.
        timeout: Timeout of all collectives on the groups.
    """
    rank, shards = dist.get_rank(), layout.shard_groups()

    def consecutive(size: int) -> tuple[Ranks, ...]:
        return tuple(ranks[i : i + size] for ranks in shards for i in range(0, len(ranks), size))

    def build(groups: tuple[Ranks, ...]) -> RankGroup:
        return RankGroup.of(_own_ranks(groups), rank, layout, _own_group(groups, timeout))

    return LevelGroups(
        weights=build(consecutive(weights)),
        gradients=build(shards),
        pairs=build(tuple(ranks[position::weights] for ranks in shards for position in range(weights))),
        nodes=build(layout.replicate_groups()),
        weight_peers=_own_group(tuple(zip(*consecutive(weights), strict=True)), timeout),
        world=_own_group((tuple(range(layout.world_size)),), timeout),
    )


def _shard_levels(layout: Layout, hops: int, timeout: timedelta) -> tuple[RankGroup, ...]:
    """Create this rank's groups of a collective with `hops` levels, innermost first; groups of one are omitted."""
    every = layout.shard_groups()
    if hops == 1:
        stages = [every]
    else:
        by_node = [layout.by_node(group) for group in every]
        across = tuple(ranks for nodes in by_node for ranks in zip(*nodes, strict=True))
        stages = [tuple(ranks for nodes in by_node for ranks in nodes), across]
    levels = []
    for stage in stages:
        group, own = _own_group(stage, timeout), _own_ranks(stage)
        if len(own) > 1:
            levels.append(RankGroup.of(own, dist.get_rank(), layout, group))
    return tuple(levels)


def _pg_options(timeout: timedelta) -> Any:
    """Return the NCCL options of one group; None for other backends.

    High stream priority: a collective that becomes ready takes the next free SMs, and does not wait until all thread
    blocks of an earlier kernel have been scheduled.
    """
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # otherwise `new_group` warns that the timeout of the options takes precedence
    return options


def _own_ranks(groups: Sequence[Ranks]) -> Ranks:
    """Return the group that contains this rank."""
    return next(ranks for ranks in groups if dist.get_rank() in ranks)


def _own_group(groups: tuple[Ranks, ...], timeout: timedelta) -> ProcessGroup | None:
    """Create all groups, in the same order on every rank, and return this rank's. Groups of one rank are skipped."""
    own = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=_pg_options(timeout))
        if dist.get_rank() in ranks:
            own = group
    return own


def _set_timeout(groups: Sequence[ProcessGroup | None], timeout: timedelta) -> None:
    for group in groups:
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def size_and_rank(group: ProcessGroup | None) -> tuple[int, int]:
    """Return (size, rank in the group); None stands for this rank alone."""
    return (1, 0) if group is None else (group.size(), group.rank())


def gather_scalars(value: Tensor, group: ProcessGroup) -> Tensor:
    """Gather a scalar of every rank as (ranks,), in rank order."""
    values = torch.empty(group.size(), dtype=value.dtype, device=value.device)
    all_gather_into(values, value.view(1), group=group)
    return values


def gather_lists(group: ProcessGroup | None, items: list[Any]) -> list[Any]:
    """Gather a list from every rank of the group and concatenate them. None stands for this rank alone."""
    if group is None:
        return items
    lists: list[Any] = [None] * group.size()
    dist.all_gather_object(lists, items, group=group)
    return [item for entries in lists for item in entries]

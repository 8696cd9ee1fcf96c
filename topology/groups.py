"""Process groups of a layout. The only place that calls `new_group`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from topology.layout import Layout, Tier
from topology.shard_collectives import Circle

# Exchanges of several stages that may be in flight at once: while one is on the network the next is inside the node.
COMM_STREAMS = 2


@dataclass(frozen=True)
class Ring:
    """The replicas that this one meets at one level.

    level: of the link to the next of them. size: their number. place: of this one among them.
    """

    level: str
    size: int
    group_rank: int


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups that a method on the replicate axis needs.

    replicate: the ranks that hold the same parameters and see different data; None for one replica.
    model: the ranks that hold one replica together (shard x context x tensor); None for one rank.
    layout: tells which link a byte crosses; without it every byte counts as "network".
    rings: what exchanges go over, from the inside out; () for one ring over all of `replicate`.
    lanes: the groups of `rings`, one set for every exchange that may be in flight; () to run them in the caller,
        on `replicate`.
    """

    replicate: ProcessGroup | None
    model: ProcessGroup | None
    layout: Layout | None = None
    rings: tuple[Ring, ...] = ()
    comm_streams: tuple[tuple[ProcessGroup, ...], ...] = ()

    def set_timeout(self, timeout: timedelta) -> None:
        for group in (self.replicate, self.model, *(group for lane in self.comm_streams for group in lane)):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def build_groups(layout: Layout, timeout: timedelta, hierarchical: bool = True, staged: bool = True) -> ReplicaGroups:
    """Builds the groups of this rank. A collective call: every rank of the world must make it.

    hierarchical: exchanges go level by level; else over one ring, whatever links it crosses.
    staged: there will be exchanges of several stages, coded ones, on one ring too.
    """
    if layout.world_size != dist.get_world_size():
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, but {dist.get_world_size()} are running; "
            "plan it for the world size that was launched"
        )
    hierarchies, rank = _hierarchies(layout, hierarchical), dist.get_rank()
    own = next((tiers for tiers in hierarchies if any(rank in ring for ring in tiers[0].rings)), ())
    rings = []
    for tier in own:
        ring = next(ring for ring in tier.rings if rank in ring)
        rings.append(Ring(layout.ring_level(rank, ring), len(ring), ring.index(rank)))
    comm_streams: list[tuple[ProcessGroup, ...]] = []
    for _ in range(_lanes(hierarchies, staged) if own else 0):
        # All groups of all ranks, in one order; this rank keeps those of its own rings.
        every = [group for tiers in hierarchies for group in build_tier_groups(tiers, timeout)]
        comm_streams.append(tuple(group for group in every if group is not None))
    return ReplicaGroups(
        replicate=_own_group(layout.replicate_groups(), timeout),
        model=_own_group(layout.model_groups(), timeout),
        layout=layout,
        rings=tuple(rings),
        comm_streams=tuple(comm_streams),
    )


def most_groups(layout: Layout, hierarchical: bool, staged: bool) -> int:
    """Groups of `build_groups` that a rank is in, at most."""
    hierarchies = _hierarchies(layout, hierarchical)
    tiers = max(map(len, hierarchies), default=0)
    whole = [max(map(len, groups)) > 1 for groups in (layout.replicate_groups(), layout.model_groups())]
    return sum(whole) + _lanes(hierarchies, staged) * tiers


def _hierarchies(layout: Layout, hierarchical: bool) -> list[tuple[Tier, ...]]:
    """What the exchanges of each group of replicas go over, from the inside out."""
    groups = [group for group in layout.replicate_groups() if len(group) > 1]
    return [layout.hierarchy(group) if hierarchical else (Tier("network", (group,)),) for group in groups]


def _lanes(hierarchies: Sequence[tuple[Tier, ...]], staged: bool) -> int:
    return COMM_STREAMS if staged or any(len(tiers) > 1 for tiers in hierarchies) else 0


def build_tier_groups(tiers: Sequence[Tier], timeout: timedelta) -> list[ProcessGroup | None]:
    """This rank's group at every tier, None where it is in none. A collective call."""
    return [_own_group(tier.rings, timeout) for tier in tiers]


@dataclass(frozen=True)
class ShardGroups:
    """The ranks among which FSDP2 shards a replica, as its stand-ins meet; in FSDP's order, which goes node by node.

    whole: all of them, in nobody's group: FSDP2's own collectives are counted by it.
    gathers, reductions: what gathers and reductions go over, from the inside out: the ranks of a node, then those of
        equal place across nodes; or all at once. A circle of one is left out. Groups of their own, as FSDP2 has a
        stream for each; () where FSDP2's own collectives run.
    """

    whole: Circle
    gathers: tuple[Circle, ...] = ()
    reductions: tuple[Circle, ...] = ()

    @property
    def crosses_nodes(self) -> bool:
        return "network" in self.whole.links

    def set_timeout(self, timeout: timedelta) -> None:
        for circle in (*self.gathers, *self.reductions):
            if circle.group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, circle.group)


def build_shard_groups(layout: Layout, timeout: timedelta, gather_hops: int = 0, reduce_hops: int = 0) -> ShardGroups:
    """Builds this rank's groups of the shard axis. A collective call: every rank of the world must make it.

    gather_hops, reduce_hops: 1 for all ranks at once, 2 for the nodes first, 0 for no group.
    """
    whole = Circle.of(layout.shard_group(dist.get_rank()), dist.get_rank(), None, layout)
    gathers, reductions = (_circles(layout, hops, timeout) if hops else () for hops in (gather_hops, reduce_hops))
    return ShardGroups(whole, gathers, reductions)


@dataclass(frozen=True)
class LevelGroups:
    """What this rank meets where weights lie on w ranks, gradients on g of a node, and the rest on all.

    A rank is a pair, the number of its w ranks among the g, and a place among the w.

    weights: the w ranks, for gathers; kept: those that keep a secondary partition together.
    pair: the w ranks, for gradients; gradients: all g, by pair and place; pairs: those of its place in every pair.
    nodes: those of its pair and place in every node. holders: the ranks that hold the same weights.
    everyone: all ranks. The last two are None for one rank.
    """

    weights: Circle
    kept: Circle
    pair: Circle
    gradients: Circle
    pairs: Circle
    nodes: Circle
    weight_peers: ProcessGroup | None
    everyone: ProcessGroup | None

    def set_timeout(self, timeout: timedelta) -> None:
        circles = (self.weights, self.kept, self.pair, self.gradients, self.pairs, self.nodes)
        for group in (*(circle.group for circle in circles), self.weight_peers, self.everyone):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def build_level_groups(layout: Layout, weights: int, timeout: timedelta, secondary: int = 0) -> LevelGroups:
    """Of weights on `weights` ranks and gradients on the layout's shard axis, which it divides; the other axes have one
    rank. secondary: ranks that keep one, of those of the shard axis that follow each other. A collective call."""
    rank, shards = dist.get_rank(), layout.shard_groups()

    def blocks(size: int) -> tuple[tuple[int, ...], ...]:
        return tuple(ranks[i : i + size] for ranks in shards for i in range(0, len(ranks), size))

    def circle(groups: tuple[tuple[int, ...], ...]) -> Circle:
        group = _own_group(groups, timeout)
        return Circle.of(next(ranks for ranks in groups if rank in ranks), rank, group, layout)

    return LevelGroups(
        weights=circle(blocks(weights)),
        kept=circle(blocks(secondary or 1)),
        pair=circle(blocks(weights)),
        gradients=circle(shards),
        pairs=circle(tuple(ranks[group_rank::weights] for ranks in shards for group_rank in range(weights))),
        nodes=circle(layout.replicate_groups()),
        weight_peers=_own_group(tuple(zip(*blocks(weights), strict=True)), timeout),
        everyone=_own_group((tuple(range(layout.world_size)),), timeout),
    )


def _circles(layout: Layout, hops: int, timeout: timedelta) -> tuple[Circle, ...]:
    every = layout.shard_groups()
    if hops == 1:
        stages = [every]
    else:
        nodes = [layout.by_node(group) for group in every]
        across = tuple(ranks for units in nodes for ranks in zip(*units, strict=True))
        stages = [tuple(ranks for units in nodes for ranks in units), across]
    rank = dist.get_rank()
    found = []
    for stage in stages:
        group = _own_group(stage, timeout)
        own = next(ranks for ranks in stage if rank in ranks)
        if len(own) > 1:
            found.append(Circle.of(own, rank, group, layout))
    return tuple(found)


def _options(timeout: timedelta) -> Any:
    """NCCL's, of one group; None for other backends. Its streams have a high priority: a collective that has become
    ready takes the next blocks that are free, and does not wait for all of those of a kernel that came before it."""
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else `new_group` warns that its own goes first
    return options


def _own_group(groups: tuple[tuple[int, ...], ...], timeout: timedelta) -> ProcessGroup | None:
    """Every rank creates every group, in the same order, and keeps its own; groups of one need none."""
    own = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=_options(timeout))
        if dist.get_rank() in ranks:
            own = group
    return own

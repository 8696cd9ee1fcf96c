"""Parallelism layout: ranks on nodes, mesh coordinates, groups, and random pairs. Plain arithmetic: no torch."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from torchtitan_scape.topology.machines import Level, Machine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# TorchTitan's order of mesh axes, outermost first; a rank is the row-major index.
_AXES = ("pipeline", "replicate", "shard", "context", "tensor")
_REPLICA = ("pipeline", "shard", "context", "tensor")  # within a replica
_SHARDS = ("shard", "context")  # of FSDP2


@dataclass(frozen=True)
class Tier:
    """One level of a hierarchical collective.

    Attributes:
        level: Name of the link.
        groups: Ranks of every group that communicates on this level; all groups have the same size.
    """

    level: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.groups[0])


@dataclass(frozen=True)
class Layout:
    """Ranks on nodes, and their parallel degrees. Created by `plan_layout`."""

    world_size: int
    ranks_per_node: int
    machine: Machine
    replicate: int
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on every mesh axis, outermost axis first."""
        indices = {}
        for axis in reversed(_AXES):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return {axis: indices[axis] for axis in _AXES}

    def node(self, rank: int) -> int:
        """Return the index of the node of a rank."""
        return rank // self.ranks_per_node

    def _group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the ranks with the coordinates of `rank` on all but these axes, in rank order."""
        coordinates, ranks, stride = self.coordinates(rank), [0], 1
        for axis in reversed(_AXES):
            degree = getattr(self, axis)
            steps = range(degree) if axis in axes else [coordinates[axis]]
            ranks = [stride * step + inner for step in steps for inner in ranks]
            stride *= degree
        return tuple(ranks)

    def _groups(self, axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes, by their first ranks."""
        return tuple(self._group(first, axes) for first in self._group(0, set(_AXES) - set(axes)))

    def replicate_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that hold the same parameters, each in replica order."""
        return self._groups(("replicate",))

    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that together hold one replica, each in rank order."""
        return self._groups(_REPLICA)

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        return self._group(rank, ("replicate",))

    def model_group(self, rank: int) -> tuple[int, ...]:
        return self._group(rank, _REPLICA)

    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks among which FSDP2 shards parameters (shard x context), each in FSDP2's order."""
        return self._groups(_SHARDS)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        return self._group(rank, _SHARDS)

    def by_node(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a group, node by node."""
        return tuple(tuple(ranks) for _, ranks in groupby(group, self.node))

    def level(self, rank_a: int, rank_b: int) -> str:
        """Return the level of the link between two ranks: the innermost level on which they share a unit."""
        return next(
            level.name for level in self.machine.levels if self._unit(level, rank_a) == self._unit(level, rank_b)
        )

    def successor_level(self, rank: int, group: tuple[int, ...]) -> str:
        """Return the level of the link from `rank` to the next rank of `group`, which is cyclic."""
        return self.level(rank, group[(group.index(rank) + 1) % len(group)])

    def hierarchy(self, group: tuple[int, ...]) -> tuple[Tier, ...]:
        """Return the levels that `group` spans, innermost first; the product of their sizes is the size of the group.

        A unit is a set of ranks that share a link, such as a node. On every tier a rank is in one group, with the ranks
        that have its position in the other units. A level is skipped if its units hold different numbers of ranks of
        the group; these ranks then communicate on the next level.
        """
        tiers: list[Tier] = []
        units: list[tuple[int, ...]] = [(rank,) for rank in group]
        for level in self.machine.levels:
            by_unit: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for unit in units:
                by_unit.setdefault(self._unit(level, unit[0]), []).append(unit)
            sizes = {len(members) for members in by_unit.values()}
            if len(sizes) > 1 or sizes == {1}:
                continue
            groups = tuple(ranks for members in by_unit.values() for ranks in zip(*members, strict=True))
            tiers.append(Tier(level.name, groups))
            units = [tuple(rank for unit in members for rank in unit) for members in by_unit.values()]
        return tuple(tiers)

    @cached_property
    def replica_tiers(self) -> tuple[Tier, ...]:
        """The `hierarchy` of the replicas."""
        return self.hierarchy(self.replicate_group(0))

    def _unit(self, level: Level, rank: int) -> tuple[int, ...]:
        """Return the key of the unit of a level that contains the rank."""
        if level.name == "network":
            return ()
        if level.name == "node":
            return (self.node(rank),)
        return self.node(rank), rank % self.ranks_per_node // level.ranks

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def shard_axis_inside_node(self) -> bool:
        """True if FSDP and tensor parallelism use no link between nodes. Pipeline stages may be on several nodes."""
        size = self.shard * self.context * self.tensor
        return all(self.node(first) == self.node(first + size - 1) for first in range(0, self.world_size, size))

    def describe(self) -> str:
        """Return one line for the log."""
        degrees = [("shard", self.shard), ("context", self.context), ("tensor", self.tensor)]
        if self.pipeline > 1:
            degrees.insert(0, ("pipeline", self.pipeline))
        product = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1 or name == "shard")
        groups = [ranks for ranks in self.replicate_groups() if len(ranks) > 1]
        levels = sorted({self.level(*pair) for ranks in groups for pair in pairwise((*ranks, ranks[0]))})
        links = f"replicas communicate over {' and '.join(levels)}" if levels else "there is one replica"
        inside = "stays inside a node" if self.shard_axis_inside_node else "CROSSES nodes"
        return (
            f"{self.world_size} ranks on {self.nodes} node(s) of {self.ranks_per_node} ({self.machine.name}): "
            f"replicate {self.replicate} x {product}; the shard axis {inside}, {links}"
        )


def plan_layout(
    world_size: int,
    *,
    ranks_per_node: int,
    machine: Machine,
    replicate: int,
    shard: int,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
) -> Layout:
    """Check the parallel degrees against the world size and return the layout.

    Args:
        world_size: Number of ranks.
        ranks_per_node: Number of ranks on every node.
        machine: Links between the ranks.
        replicate: Number of replicas; -1 to derive it from the other degrees.
        shard: Ranks of the FSDP2 shard axis; -1 to derive it from the other degrees.
        context: Degree of context parallelism.
        tensor: Degree of tensor parallelism.
        pipeline: Degree of pipeline parallelism.

    Raises:
        ValueError: Degrees or nodes that do not fit the world size.
    """
    if replicate == -1 and shard == -1:
        raise ValueError("replicate and shard are both -1; only one of them can be derived from the other degrees")
    fixed = {"context": context, "tensor": tensor, "pipeline": pipeline}
    fixed |= {name: n for name, n in (("replicate", replicate), ("shard", shard)) if n != -1}
    for name, degree in fixed.items():
        if degree < 1:
            raise ValueError(f"the {name} degree is {degree}; it must be 1 or more")
    product = math.prod(fixed.values())
    text = " x ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1) or "1"
    if world_size % product:
        raise ValueError(
            f"{world_size} ranks cannot be divided into {text}; start a multiple of {product} ranks, or change a degree"
        )
    left = world_size // product
    if replicate == -1:
        replicate = left
    elif shard == -1:
        shard = left
    elif left != 1:
        raise ValueError(
            f"{text} makes {product} ranks, but {world_size} were started; start {product}, or set one of "
            "replicate and shard to -1"
        )
    if ranks_per_node < 1:
        raise ValueError(f"{ranks_per_node} ranks per node; it must be 1 or more")
    if ranks_per_node > world_size:
        raise ValueError(f"{ranks_per_node} ranks per node, but only {world_size} ranks in all")
    if world_size % ranks_per_node:
        raise ValueError(f"{world_size} ranks do not fill whole nodes of {ranks_per_node}")
    return Layout(world_size, ranks_per_node, machine, replicate, shard, context, tensor, pipeline)


def simulated_layout(layout: Layout, replicas: int) -> Layout:
    """Return the layout of a real run of `replicas` replicas, each on as many nodes as the one replica of `layout`."""
    if replicas == 1:
        return layout
    assert layout.replicate == 1
    return replace(layout, world_size=layout.world_size * replicas, replicate=replicas)


def ranks_per_node_from_environment(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return the launcher's number of ranks per node: torchrun's LOCAL_WORLD_SIZE, else Open MPI's or MPICH's variable,
    else Slurm's, else None.

    Inside a job mpirun starts one daemon per node as Slurm's tasks, so Slurm's variables come last. They describe its
    job step or the whole allocation. A value above the world size does not describe this run, for example a single
    process that was started by hand in an allocation, and is ignored.

    Raises:
        ValueError: The value is not a number, or nodes have different numbers of ranks.
    """
    for name in (
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE",  # first, because the requested numbers below are upper limits
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
    ):
        value = environ.get(name)
        if value is None:
            continue
        match = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", value.strip())
        if match is None:
            raise ValueError(f"{name} is {value!r}; expected one number of ranks for every node, such as 8 or 8(x4)")
        if name == "LOCAL_WORLD_SIZE" or int(match[1]) <= world_size:
            return int(match[1])
    return None


@dataclass(frozen=True)
class RankGroup:
    """This rank's position in one communicator, and the link level to each member.

    Attributes:
        level: Level of the link to the next member, which ring algorithms send to.
        size: Number of members.
        group_rank: Index of this rank in the group.
        ranks: Global ranks of the members, in group order; () if they are not known.
        process_group: Communicator. None if the group has one member, or if its bytes are only counted.
        link_levels: Level of the link to each member, "" for this rank itself; () if they are not known.
    """

    level: str
    size: int
    group_rank: int
    ranks: tuple[int, ...] = ()
    process_group: "ProcessGroup | None" = None
    link_levels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ranks: tuple[int, ...], rank: int, layout: Layout, process_group: "ProcessGroup | None" = None
    ) -> "RankGroup":
        """Return the group of `ranks` as `rank`, one of them, sees it."""
        links = tuple("" if other == rank else layout.level(rank, other) for other in ranks)
        return cls(layout.successor_level(rank, ranks), len(ranks), ranks.index(rank), ranks, process_group, links)


def replica_index(levels: Sequence[RankGroup]) -> int:
    """Return the index of a replica among all replicas.

    The position on the innermost level (the first of `levels`) is the most significant digit, so that a hierarchical
    all-gather writes each result to its final position without a copy.
    """
    index = 0
    for group in levels:
        index = index * group.size + group.group_rank
    return index


def partners(size: int, draw: int) -> list[int | None]:
    """Return the partner of each of `size` ranks; None for a rank that rests.

    If `size` is odd, rank `draw` modulo `size` rests, so that every rank rests once in `size` consecutive draws. The
    others are divided into pairs at random.

    Args:
        size: Number of ranks.
        draw: Number of the draw; the same number gives the same pairs on every machine.
    """
    partner_of: list[int | None] = [None] * size
    ranks = [rank for rank in range(size) if size % 2 == 0 or rank != draw % size]
    ranks.sort(key=lambda rank: sha256(f"{draw} {rank}".encode()).digest())
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        partner_of[first], partner_of[second] = second, first
    return partner_of


def paired_share(size: int) -> float:
    """Return the fraction of draws in which a rank has a partner."""
    return (size - size % 2) / size

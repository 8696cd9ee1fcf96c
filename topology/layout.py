"""Which rank sits where. Plain arithmetic: no process group, no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from topology.machines import Level, Machine

# TorchTitan's order of mesh axes, outermost first; a rank is the row-major index.
_AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Tier:
    """One level at which members of a group meet.

    level: name of the link.
    rings: the ranks that meet, all rings of the same size, in the order of the group.
    """

    level: str
    rings: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.rings[0])


@dataclass(frozen=True)
class Layout:
    """Ranks on nodes, and the parallel degrees over them. Made by `plan_layout`."""

    world_size: int
    ranks_per_node: int
    machine: Machine
    replicate: int
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """This rank's index on every axis."""
        found = {}
        for axis in reversed(_AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in _AXES}

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        by_shard: dict[tuple[int, ...], list[int]] = {}
        by_replica: dict[int, list[int]] = {}
        by_slice: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            replica = place.pop("replicate")
            by_shard.setdefault(tuple(place.values()), []).append(rank)
            by_replica.setdefault(replica, []).append(rank)
            by_slice.setdefault((place["pipeline"], replica, place["tensor"]), []).append(rank)
        return tuple(tuple(sorted(map(tuple, found.values()))) for found in (by_shard, by_replica, by_slice))

    def replicate_groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that hold the same parameters, each in replica order."""
        return self._groups[0]

    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that hold one replica together, each in rank order."""
        return self._groups[1]

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        return next(ranks for ranks in self.replicate_groups() if rank in ranks)

    def model_group(self, rank: int) -> tuple[int, ...]:
        return next(ranks for ranks in self.model_groups() if rank in ranks)

    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks among which FSDP2 shards parameters (shard x context), each in its order."""
        return self._groups[2]

    def shard_group(self, rank: int) -> tuple[int, ...]:
        return next(ranks for ranks in self.shard_groups() if rank in ranks)

    def by_node(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The ranks of a group node by node."""
        return tuple(tuple(ranks) for _, ranks in groupby(group, self.node))

    def level(self, rank_a: int, rank_b: int) -> str:
        """The innermost level at which two ranks share a unit: what a byte between them crosses."""
        if self.node(rank_a) != self.node(rank_b):
            return "network"
        place_a, place_b = rank_a % self.ranks_per_node, rank_b % self.ranks_per_node
        for level in self.machine.levels:
            if level.name in ("node", "network") or place_a // level.ranks == place_b // level.ranks:
                return "node" if level.name == "network" else level.name
        return "node"

    def ring_level(self, rank: int, group: tuple[int, ...]) -> str:
        """The level of the link from `rank` to its successor in the ring of `group`."""
        return self.level(rank, group[(group.index(rank) + 1) % len(group)])

    def hierarchy(self, group: tuple[int, ...]) -> tuple[Tier, ...]:
        """The levels that `group` spans, from the inside out; the product of their sizes is that of the group.

        A level at which the group's units differ in size is passed over: its members meet at the next one.
        A rank is in one ring of every tier, with those that have its place in their units.
        """
        tiers: list[Tier] = []
        units: list[tuple[int, ...]] = [(rank,) for rank in group]
        for level in self.machine.levels:
            together: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for unit in units:
                together.setdefault(self._unit(level, unit[0]), []).append(unit)
            sizes = {len(members) for members in together.values()}
            if len(sizes) > 1 or sizes == {1}:
                continue
            rings = tuple(ring for members in together.values() for ring in zip(*members, strict=True))
            tiers.append(Tier(level.name, rings))
            units = [tuple(rank for unit in members for rank in unit) for members in together.values()]
        return tuple(tiers)

    def _unit(self, level: Level, rank: int) -> tuple[int, ...]:
        """Which unit of a level the rank is in."""
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
        """Whether the ranks among which FSDP and tensor parallelism talk share a node; stages may be apart."""
        together = self.shard * self.context * self.tensor
        return all(self.node(first) == self.node(first + together - 1) for first in range(0, self.world_size, together))

    def describe(self) -> str:
        """One line for the log."""
        degrees = [("shard", self.shard), ("context", self.context), ("tensor", self.tensor)]
        if self.pipeline > 1:
            degrees.insert(0, ("pipeline", self.pipeline))
        product = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1 or name == "shard")
        groups = [ranks for ranks in self.replicate_groups() if len(ranks) > 1]
        levels = sorted({self.ring_level(rank, ranks) for ranks in groups for rank in ranks})
        talk = f"replicas talk over {' and '.join(levels)}" if levels else "there is one replica"
        inside = "stays inside a node" if self.shard_axis_inside_node else "CROSSES nodes"
        return (
            f"{self.world_size} ranks on {self.nodes} node(s) of {self.ranks_per_node} ({self.machine.name}): "
            f"replicate {self.replicate} x {product}; the shard axis {inside}, {talk}"
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
    """Checks the degrees against the world. One of `replicate` and `shard` may be -1: what the others leave.

    Raises ValueError with the numbers and the fix.
    """
    if replicate == -1 and shard == -1:
        raise ValueError("replicate and shard are both -1; only one of them can be what the other degrees leave")
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
    """The layout of the real run that `layout`, of one replica, simulates: as many nodes for each of the replicas."""
    if replicas == 1:
        return layout
    assert layout.replicate == 1
    return replace(layout, world_size=layout.world_size * replicas, replicate=replicas)


def ranks_per_node_from_environment(environ: Mapping[str, str], world_size: int) -> int | None:
    """What the launcher says: torchrun's LOCAL_WORLD_SIZE, else Slurm's variables, else None.

    Slurm's figure is of its job step, or of the whole allocation: one that is larger than the world is not
    about this run (a single process started by hand), and is passed over.

    Raises ValueError for a value that is no number, or nodes of different size.
    """
    for name in (
        "LOCAL_WORLD_SIZE",
        "SLURM_STEP_TASKS_PER_NODE",  # before what was asked for, which is an upper limit only
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

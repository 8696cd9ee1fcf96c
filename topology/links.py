"""Links by level, and the cost of collectives on them (alpha-beta model). Plain arithmetic: no torch.

A collective is a list of `Stage`s, one for each level that it uses. It yields both the seconds and the bytes that a
rank sends over each kind of link. Units are seconds and bytes; `topology.machines` and error messages use GB/s and
microseconds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_scape.topology.machines import Machine
from torchtitan_scape.topology.pairs import paired_share
from torchtitan_scape.topology.ring_bytes import (
    LevelSize,
    MessageBytes,
    gather_bytes,
    pair_bytes,
    reduce_bytes,
    scatter_bytes,
)

SCHEMA = "topology.preflight/1"

# (level, number of ranks that communicate on it), innermost first: `Tier.level` and `Tier.size`.
Tiers = Sequence[tuple[str, int]]


# ------------------------------------------------------------------------------------------------ links


@dataclass(frozen=True)
class Link:
    """latency: seconds per message. bandwidth: bytes/s that one rank sends, in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Links:
    """Links of a machine, by level.

    Attributes:
        levels: Link of each level.
        source: Origin of the numbers, for messages.
        memory_bandwidth: Measured bytes/s of a streaming pass on the device; 0 if it was not measured.
        nominal: True for the unchanged numbers of a preset.
    """

    levels: Mapping[str, Link]
    source: str
    memory_bandwidth: float = 0.0
    nominal: bool = False

    def __getitem__(self, level: str) -> Link:
        if level not in self.levels:
            raise ValueError(
                f"{self.source} has no level {level!r}, only {', '.join(self.levels) or 'none'}; "
                "run the preflight on ranks that span that level, or take a preset"
            )
        return self.levels[level]

    @classmethod
    def from_machine(cls, machine: Machine) -> "Links":
        """Return the numbers of a machine: nominal, unless they were measured."""
        levels = {level.name: Link(level.latency * 1e-6, level.bandwidth * 1e9) for level in machine.levels}
        return cls(levels, machine.measured or f"preset {machine.name}", nominal=not machine.measured)

    @classmethod
    def from_json(cls, path: str | Path) -> "Links":
        """Read a file of `python -m torchtitan_scape.planner.preflight`. Raises ValueError for any other content."""
        try:
            stored = json.loads(Path(path).read_text())
            schema = stored.get("schema") if isinstance(stored, dict) else None
            if schema != SCHEMA:
                raise ValueError(f"schema {schema!r}, expected {SCHEMA!r}")
            levels = {name: Link(level["latency"], level["bandwidth"]) for name, level in stored["levels"].items()}
            return cls(levels, f"preflight {path}", stored["memory_bandwidth"])
        except KeyError as error:
            reason = f"it has no {error}"
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error)
        again = "run `python -m torchtitan_scape.planner.preflight` again"
        raise ValueError(f"links cannot be read from {path}: {reason}; {again}")

    def with_bandwidth(self, level: str, bandwidth: float) -> "Links":
        """Return a copy with another bandwidth, bytes/s, on one level. Raises ValueError for 0 or less."""
        if not bandwidth > 0:
            raise ValueError(f"the bandwidth of {level} is {bandwidth / 1e9:g} GB/s; it must be positive")
        levels = {**self.levels, level: Link(self[level].latency, bandwidth)}
        return replace(self, levels=levels, source=f"{self.source}, {level} set", nominal=False)


def with_measured_links(machine: Machine, links: Links) -> Machine:
    """Return the machine with measured links. Levels that were not measured keep the numbers of the preset."""
    found = []
    for level in machine.levels:
        if measured := links.levels.get(level.name):
            level = replace(level, bandwidth=measured.bandwidth / 1e9, latency=measured.latency * 1e6)
        found.append(level)
    return replace(machine, levels=tuple(found), measured=links.source)


# ------------------------------------------------------------------------------------------ collectives


@dataclass(frozen=True)
class Stage:
    """Part of a collective on one level.

    Attributes:
        level: Name of the link.
        rounds: Number of consecutive messages of one rank.
        sent: Bytes that one rank sends in them.
    """

    level: str
    rounds: float
    sent: float

    def of_a_share(self, share: float) -> "Stage":
        """Return the mean over steps, of which only this share contains the stage."""
        return Stage(self.level, share * self.rounds, share * self.sent)


def stage_seconds(stages: Sequence[Stage], links: Links) -> tuple[float, float]:
    """Return (latency, transfer time) in seconds of consecutive stages."""
    latency = sum((stage.rounds * links[stage.level].latency for stage in stages), 0.0)
    return latency, sum((stage.sent / links[stage.level].bandwidth for stage in stages), 0.0)


def bytes_by_level(stages: Sequence[Stage]) -> dict[str, float]:
    """Return the bytes that one rank sends, by level."""
    sent: dict[str, float] = defaultdict(float)
    for stage in stages:
        sent[stage.level] += stage.sent
    return dict(sent)


def all_reduce_stages(
    tiers: Tiers, nbytes: float, coded: MessageBytes | None = None, flat: bool = False
) -> list[Stage]:
    """Return the stages of an all-reduce, as in `topology.stages.all_reduce_`.

    Args:
        tiers: Levels, innermost first.
        nbytes: Size of the FP32 tensor, padding included.
        coded: Message size of the codec of the outermost level; None for FP32.
        flat: One ring over all ranks. The outermost link limits its speed, so all bytes are filed under that level.
    """
    levels = _levels(tiers, flat)
    if not levels:
        return []
    *inside, outside = [level.size - 1 for level in levels]
    stages = reduce_bytes(int(nbytes) // 4, levels, coded)
    return _stages(stages, [*inside, 2 * outside, *reversed(inside)])


def all_gather_stages(tiers: Tiers, nbytes: float, flat: bool = False) -> list[Stage]:
    """Return the stages of an all-gather of `nbytes` per rank, as in `topology.stages.all_gather_`."""
    levels = _levels(tiers, flat)
    return _stages(gather_bytes(int(nbytes), levels), [level.size - 1 for level in reversed(levels)])


def reduce_scatter_stages(
    tiers: Tiers, nbytes: float, coded: MessageBytes | None = None, flat: bool = False
) -> list[Stage]:
    """Return the stages of a reduce-scatter, as in `reduce_scatter_`. Args as in `all_reduce_stages`."""
    levels = _levels(tiers, flat)
    stages = scatter_bytes(int(nbytes) // 4, levels, coded)
    return _stages(stages, [level.size - 1 for level in levels])


def pair_mean_stages(tiers: Tiers, nbytes: float, flat: bool = False) -> list[Stage]:
    """Return the stages of a mean over random pairs, as in `topology.stages.pair_mean_`, averaged over draws.

    Args as in `all_reduce_stages`.
    """
    levels = _levels(tiers, flat)
    if not levels:
        return []
    inside, messages = [level.size - 1 for level in levels[:-1]], paired_share(levels[-1].size)
    rounds = [*inside, messages, *reversed(inside)]
    return _stages(pair_bytes(int(nbytes) // 4, levels, messages), rounds)


def _stages(stages: Iterable[tuple[str, int, float]], rounds: Iterable[float]) -> list[Stage]:
    return [Stage(level, count, sent) for (level, _, sent), count in zip(stages, rounds, strict=True)]


def scalar_stages(tiers: Tiers) -> list[Stage]:
    """Return the stages of an all-reduce of a few bytes, as a tree on each level."""
    return [Stage(level, 2 * math.ceil(math.log2(size)), 0.0) for level, size in _levels(tiers)]


def _levels(tiers: Tiers, flat: bool = False) -> list[LevelSize]:
    """Return the levels with more than one rank. flat: merge them into one level, the outermost of them."""
    levels = [LevelSize(level, size) for level, size in tiers if size > 1]
    return [LevelSize(levels[-1].level, math.prod(level.size for level in levels))] if flat and levels else levels

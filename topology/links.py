"""Links by level, and what collectives cost on them (alpha-beta model). Plain arithmetic: no torch.

A collective is a list of `Stage`s, one for each level that it visits, and read twice: as seconds, and as bytes that
a rank puts on each kind of link. Units: seconds and bytes; `topology.machines` and messages to people have GB/s and
microseconds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topology.machines import Machine
from topology.ring_bytes import LevelSize, MessageBytes, gather_bytes, reduce_bytes, scatter_bytes

SCHEMA = "topology.preflight/1"

# Levels that a group spans, from the inside out, with how many units meet at each: Tier.level and Tier.size.
Tiers = Sequence[tuple[str, int]]


# ------------------------------------------------------------------------------------------------ links


@dataclass(frozen=True)
class Link:
    """latency: seconds a message. bandwidth: bytes/s that one rank sends, one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Links:
    """The links of a machine by level.

    memory_bandwidth: measured bytes/s of a streaming pass on the device; 0 where nobody measured.
    nominal: true of a preset as it stands.
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
        """The preset's nominal figures."""
        levels = {level.name: Link(level.latency * 1e-6, level.bandwidth * 1e9) for level in machine.levels}
        return cls(levels, f"preset {machine.name}", nominal=True)

    @classmethod
    def from_json(cls, path: str | Path) -> "Links":
        """What `python -m torchtitan_scape.planner.preflight` stored. Raises ValueError for anything else."""
        try:
            stored = json.loads(Path(path).read_text())
            schema = stored.get("schema") if isinstance(stored, dict) else None
            if schema != SCHEMA:
                raise ValueError(f"schema {schema!r}, expected {SCHEMA!r}")
            levels = {name: Link(level["latency"], level["bandwidth"]) for name, level in stored["levels"].items()}
            return cls(levels, f"preflight {path}", stored["memory_bandwidth"])
        except KeyError as error:
            reason = f"it has no {error}"
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = str(error)
        again = "run `python -m torchtitan_scape.planner.preflight` again"
        raise ValueError(f"links cannot be read from {path}: {reason}; {again}")

    def with_bandwidth(self, level: str, bandwidth: float) -> "Links":
        """The same links, but for the bandwidth of one level, bytes/s. Raises ValueError for 0 or less."""
        if not bandwidth > 0:
            raise ValueError(f"the bandwidth of {level} is {bandwidth / 1e9:g} GB/s; it must be positive")
        levels = {**self.levels, level: Link(self[level].latency, bandwidth)}
        return replace(self, levels=levels, source=f"{self.source}, {level} set", nominal=False)


# ------------------------------------------------------------------------------------------ collectives


@dataclass(frozen=True)
class Stage:
    """Part of a collective on one level: messages that follow one another, and the bytes in them, of one rank."""

    level: str
    rounds: float
    sent: float

    def of_a_share(self, share: float) -> "Stage":
        """In the mean over steps of which this share has it."""
        return Stage(self.level, share * self.rounds, share * self.sent)


def stage_seconds(stages: Sequence[Stage], links: Links) -> tuple[float, float]:
    """(latency, transfer) of stages that follow one another."""
    latency = sum((stage.rounds * links[stage.level].latency for stage in stages), 0.0)
    return latency, sum((stage.sent / links[stage.level].bandwidth for stage in stages), 0.0)


def bytes_by_level(stages: Sequence[Stage]) -> dict[str, float]:
    """Bytes that one rank sends, by level."""
    sent: dict[str, float] = defaultdict(float)
    for stage in stages:
        sent[stage.level] += stage.sent
    return dict(sent)


def all_reduce_stages(
    tiers: Tiers, nbytes: float, coded: MessageBytes | None = None, flat: bool = False
) -> list[Stage]:
    """All-reduce of `nbytes` of FP32, as `topology.stages` makes it; `coded` is of what crosses the outermost level.

    `flat` is one ring over all, which the outermost link paces: its bytes are filed there. `nbytes` contains the
    padding.
    """
    rings = _rings(tiers, flat)
    if not rings:
        return []
    *inside, outside = [ring.size - 1 for ring in rings]
    stages = reduce_bytes(int(nbytes) // 4, rings, coded)
    return _stages(stages, [*inside, 2 * outside, *reversed(inside)])


def all_gather_stages(tiers: Tiers, nbytes: float, flat: bool = False) -> list[Stage]:
    """All-gather of every rank's own `nbytes`, as `topology.stages.gather_`."""
    rings = _rings(tiers, flat)
    return _stages(gather_bytes(int(nbytes), rings), [ring.size - 1 for ring in reversed(rings)])


def reduce_scatter_stages(
    tiers: Tiers, nbytes: float, coded: MessageBytes | None = None, flat: bool = False
) -> list[Stage]:
    """Reduce-scatter of `nbytes` of FP32 to the owners of its parts, as `topology.stages.scatter_`."""
    rings = _rings(tiers, flat)
    stages = scatter_bytes(int(nbytes) // 4, rings, coded)
    return _stages(stages, [ring.size - 1 for ring in rings])


def _stages(stages: Iterable[tuple[str, int, float]], rounds: Iterable[int]) -> list[Stage]:
    return [Stage(level, times, sent) for (level, _, sent), times in zip(stages, rounds, strict=True)]


def scalar_stages(tiers: Tiers) -> list[Stage]:
    """An all-reduce of a few bytes, as a tree in each level."""
    return [Stage(level, 2 * math.ceil(math.log2(size)), 0.0) for level, size in _rings(tiers)]


def _rings(tiers: Tiers, flat: bool = False) -> list[LevelSize]:
    """The levels at which anybody meets, or one ring over all at the outermost of them."""
    rings = [LevelSize(level, size) for level, size in tiers if size > 1]
    return [LevelSize(rings[-1].level, math.prod(ring.size for ring in rings))] if flat and rings else rings

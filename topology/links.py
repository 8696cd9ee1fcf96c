"""Links by level, and what collectives cost on them (alpha-beta model). Plain arithmetic: no torch.

A collective is a list of `Stage`s, one for each level that it visits, and read twice: as seconds, and as bytes that
a rank puts on each kind of link. Units: seconds and bytes; `topology.machines` and messages to people have GB/s and
microseconds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from topology.machines import Machine

SCHEMA = "topology.preflight/1"
WIRE_BYTES = {"float32": 4, "bfloat16": 2}

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
        except (OSError, ValueError) as error:
            raise ValueError(
                f"links cannot be read from {path}: {error}; run `python -m torchtitan_scape.planner.preflight`"
            ) from None
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if schema != SCHEMA:
            raise ValueError(
                f"{path} has schema {schema!r}, expected {SCHEMA!r}; run `python -m "
                f"torchtitan_scape.planner.preflight` again"
            )
        try:
            levels = {name: Link(level["latency"], level["bandwidth"]) for name, level in stored["levels"].items()}
            return cls(levels, f"preflight {path}", stored["memory_bandwidth"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} has no {error}; run `python -m torchtitan_scape.planner.preflight` again"
            ) from None

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
    rounds: int
    sent: float


def stage_seconds(stages: Sequence[Stage], links: Links) -> tuple[float, float]:
    """(latency, transfer) of stages that follow one another."""
    latency = sum(stage.rounds * links[stage.level].latency for stage in stages)
    return latency, sum(stage.sent / links[stage.level].bandwidth for stage in stages)


def bytes_by_level(stages: Sequence[Stage]) -> dict[str, float]:
    """Bytes that one rank sends, by level."""
    sent: dict[str, float] = defaultdict(float)
    for stage in stages:
        sent[stage.level] += stage.sent
    return dict(sent)


def all_reduce_stages(tiers: Tiers, nbytes: float, wire: str = "float32", flat: bool = False) -> list[Stage]:
    """All-reduce of `nbytes` of FP32: reduce-scatter from the inside out, all-reduce outside, gathers back inside.

    With wire "bfloat16" the reduce-scatters inside stay in FP32; outside BF16 goes as an all-to-all and an all-gather,
    and inside it is gathered in BF16. `flat` is one ring over all, which the outermost link paces: its bytes are
    filed there. Pieces are taken as even: padding is left out.
    """
    tiers = _joined(tiers) if flat else _worth(tiers)
    narrow = width(wire) / 4
    inside: list[Stage] = []
    back: list[Stage] = []
    for place, (level, size) in enumerate(tiers):
        sent = (size - 1) / size * nbytes
        if place == len(tiers) - 1:
            return [*inside, Stage(level, 2 * (size - 1), 2 * sent * narrow), *reversed(back)]
        inside.append(Stage(level, size - 1, sent))
        back.append(Stage(level, size - 1, sent * narrow))
        nbytes /= size
    return []


def all_gather_stages(tiers: Tiers, nbytes: float, flat: bool = False) -> list[Stage]:
    """All-gather of every rank's own `nbytes`: outermost level first, so that they cross it once a unit."""
    stages = []
    for level, size in reversed(_joined(tiers) if flat else _worth(tiers)):
        stages.append(Stage(level, size - 1, (size - 1) * nbytes))
        nbytes *= size
    return stages


def owner_stages(
    tiers: Tiers, nbytes: float, wire: str = "float32", values: str = "float32", flat: bool = False
) -> list[Stage]:
    """Reduce-scatter of `nbytes` of FP32 to the owners of its parts, and all-gather of what they make of them.

    With wire "bfloat16" the outermost reduce-scatter goes in BF16. values: the dtype of what is gathered.
    """
    tiers = _joined(tiers) if flat else _worth(tiers)
    stages, own = [], nbytes
    for place, (level, size) in enumerate(tiers):
        narrow = width(wire) / 4 if place == len(tiers) - 1 else 1.0
        stages.append(Stage(level, size - 1, (size - 1) / size * own * narrow))
        own /= size
    return stages + all_gather_stages(tiers, own * width(values) / 4)


def all_reduce_seconds(tiers: Tiers, nbytes: float, links: Links, wire: str = "float32", flat: bool = False) -> float:
    return sum(stage_seconds(all_reduce_stages(tiers, nbytes, wire, flat), links))


def all_gather_seconds(tiers: Tiers, nbytes: float, links: Links, flat: bool = False) -> float:
    return sum(stage_seconds(all_gather_stages(tiers, nbytes, flat), links))


def scalar_stages(tiers: Tiers) -> list[Stage]:
    """An all-reduce of a few bytes, as a tree in each level."""
    return [Stage(level, 2 * math.ceil(math.log2(size)), 0.0) for level, size in _worth(tiers)]


def _worth(tiers: Tiers) -> list[tuple[str, int]]:
    return [(level, size) for level, size in tiers if size > 1]


def _joined(tiers: Tiers) -> list[tuple[str, int]]:
    tiers = _worth(tiers)
    return [(tiers[-1][0], math.prod(size for _, size in tiers))] if tiers else []


def width(wire: str) -> int:
    if wire not in WIRE_BYTES:
        raise ValueError(f"the wire dtype is {wire!r}; it must be one of {', '.join(WIRE_BYTES)}")
    return WIRE_BYTES[wire]

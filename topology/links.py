"""Links by level, and the seconds of collectives on them (alpha-beta model). Plain arithmetic: no torch.

Units are seconds and bytes; `topology.machines` and error messages use GB/s and microseconds.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_scape.topology.machines import Machine
from torchtitan_scape.topology.ring_bytes import Stage

SCHEMA = "topology.preflight/1"


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


def stage_seconds(stages: Iterable[Stage], links: Links) -> tuple[float, float]:
    """Return (latency, transfer time) in seconds of consecutive stages."""
    latency = transfer = 0.0
    for stage in stages:
        latency += stage.rounds * links[stage.level].latency
        transfer += stage.sent / links[stage.level].bandwidth
    return latency, transfer

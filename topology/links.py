"""Links by level, and the seconds of collectives on them (alpha-beta model). Plain arithmetic: no torch.

Units are seconds and bytes; `topology.machines` and error messages use GB/s and microseconds.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_scape.topology.machines import Machine
from torchtitan_scape.topology.ring_bytes import Levels, MessageBytes, Stage, all_reduce_stages

SCHEMA = "topology.preflight/1"
MAX_CHUNKS = 8
# Each further chunk costs one latency. Below this share of its transfer time the latency is within a link's noise.
MAX_LATENCY_SHARE = 0.05


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
                "run the doctor on ranks that span that level, or take a preset"
            )
        return self.levels[level]

    @classmethod
    def from_machine(cls, machine: Machine) -> "Links":
        """Return the numbers of a machine: nominal, unless they were measured."""
        levels = {level.name: Link(level.latency * 1e-6, level.bandwidth * 1e9) for level in machine.levels}
        return cls(levels, machine.measured or f"preset {machine.name}", nominal=not machine.measured)

    @classmethod
    def from_json(cls, path: str | Path) -> "Links":
        """Read a file of `python -m torchtitan_scape.doctor --output`. Raises ValueError for any other content."""
        try:
            stored = json.loads(Path(path).read_text())
            schema = stored.get("schema") if isinstance(stored, dict) else None
            if schema != SCHEMA:
                raise ValueError(f"schema {schema!r}, expected {SCHEMA!r}")
            levels = {name: Link(level["latency"], level["bandwidth"]) for name, level in stored["levels"].items()}
            return cls(levels, f"measured, {path}", stored["memory_bandwidth"])
        except KeyError as error:
            reason = f"it has no {error}"
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error)
        again = "run `python -m torchtitan_scape.doctor --output` again"
        raise ValueError(f"links cannot be read from {path}: {reason}; {again}")

    def with_bandwidth(self, level: str, bandwidth: float) -> "Links":
        """Return a copy with another bandwidth, bytes/s, on one level. Raises ValueError for 0 or less."""
        if not bandwidth > 0:
            raise ValueError(f"the bandwidth of {level} is {bandwidth / 1e9:g} GB/s; it must be positive")
        levels = {**self.levels, level: Link(self[level].latency, bandwidth)}
        return replace(self, levels=levels, source=f"{self.source}, {level} set", nominal=False)


def with_measured_links(machine: Machine, links: Links) -> Machine:
    """Return the machine with measured links. Levels that were not measured keep the numbers of the preset."""
    levels = []
    for level in machine.levels:
        if measured := links.levels.get(level.name):
            level = replace(level, bandwidth=measured.bandwidth / 1e9, latency=measured.latency * 1e6)
        levels.append(level)
    return replace(machine, levels=tuple(levels), measured=links.source)


def stage_seconds(stages: Iterable[Stage], links: Links) -> tuple[float, float]:
    """Return (latency, transfer time) in seconds of consecutive stages."""
    latency = transfer = 0.0
    for stage in stages:
        latency += stage.rounds * links[stage.level].latency
        transfer += stage.sent / links[stage.level].bandwidth
    return latency, transfer


def pipeline_seconds(pack: float, transfer: float, latency: float, chunks: int) -> float:
    """Return the seconds to pack and exchange `chunks` equal chunks, each exchanged while the next one is packed.

    The result is pack + exchange / m if packing is slower, and pack / m + exchange + (m - 1) * latency if the link is.
    """
    packed, exchanged = pack / chunks, transfer / chunks + latency
    return packed + exchanged + (chunks - 1) * max(packed, exchanged)


def best_chunks(pack: float, transfer: float, latency: float) -> int:
    """Return the fastest number of chunks, from 1 to 8: close to sqrt(pack / latency) if the link is slower.

    The latency of a chunk never exceeds a twentieth of its transfer time.
    """
    allowed = [m for m in range(1, MAX_CHUNKS + 1) if m == 1 or latency <= MAX_LATENCY_SHARE * transfer / m]
    return min(allowed, key=lambda m: pipeline_seconds(pack, transfer, latency, m))


def best_chunk_bytes(
    nbytes: int,
    pack_seconds: float,
    levels: Levels,
    links: Links,
    message_bytes: MessageBytes | None = None,
) -> int:
    """Return the best chunk size of a payload in bytes of FP32, a multiple of 4.

    Args:
        nbytes: Size of the payload in FP32.
        pack_seconds: Seconds to pack the whole payload.
        levels: Levels of the exchange, innermost first.
        message_bytes: Encoded size of n elements on the outermost level; None for FP32.
    """
    latency, transfer = stage_seconds(all_reduce_stages(nbytes // 4, levels, message_bytes), links)
    chunks = best_chunks(pack_seconds, transfer, latency)
    return max(4, -(-nbytes // (4 * chunks)) * 4)

"""Machine presets, and measured links: ranks per node, the device of a rank, and the links between ranks.

The numbers of presets are nominal and come from the sources in machines.toml. Measurements on the machine itself are
more accurate. Units of `Links` are seconds and bytes; presets and error messages use GB/s and microseconds.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

SCHEMA = "topology.preflight/1"  # of the file of measured links
GIB = 2**30 / 1e9  # GB
ASSUMED_STORAGE = 10.0  # GB/s of a shared file system, where no figure is known
MEMORY_TOLERANCE = 0.03  # drivers keep different parts of a device's memory for themselves
MEMORY_EFFICIENCY = 0.7  # share of the nominal memory bandwidth that an optimizer's passes reach, if not measured


@dataclass(frozen=True)
class Level:
    """Kind of link between ranks.

    Attributes:
        name: "gcd_pair", "node" or "network".
        ranks: Ranks in one unit of this level; 0 for any number.
        bandwidth: GB/s (1e9 bytes) that one rank sends, in one direction.
        latency: Microseconds for a small message.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """Device of one rank.

    Attributes:
        name: Name of the device.
        memory: GB (1e9 bytes) of device memory, as the device reports it.
        memory_bandwidth: GB/s, nominal, reads and writes together.
        peak: TFLOP/s of dense BF16 matrix products, nominal.
        source: Origin of the numbers.
        host_memory: GB of host memory per rank.
        host_link: GB/s between host and device, in one direction, nominal.
        runtime: "CUDA" or "ROCm"; "" for a CPU.
    """

    name: str
    memory: float
    memory_bandwidth: float
    peak: float
    source: str
    host_memory: float
    host_link: float
    runtime: str = "CUDA"


@dataclass(frozen=True)
class Machine:
    """A kind of node and its links.

    Attributes:
        name: Name of the preset.
        ranks_per_node: Ranks per node; 0 if the launcher determines it.
        levels: Links, innermost first.
        source: Origin of the numbers.
        device: Device of a rank.
        measured: Origin of measured links, see `with_measured_links`; "" if they are nominal.
        storage: GB/s that all nodes together write to the shared file system, at its peak; 0 if it is not known.
    """

    name: str
    ranks_per_node: int
    levels: tuple[Level, ...]
    source: str
    device: Device
    measured: str = ""
    storage: float = 0.0


def _read_presets() -> Iterator[Machine]:
    presets = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())
    devices = {}
    for key, values in presets["devices"].items():
        if (gib := values.pop("memory_gib", None)) is not None:
            values["memory"] = gib * GIB
        devices[key] = Device(**values)
    for name, values in presets["machines"].items():
        levels = tuple(Level(*level) for level in values.pop("levels"))
        yield Machine(name, levels=levels, **values | {"device": devices[values["device"]]})


MACHINES = {machine.name: machine for machine in _read_presets()}


def get_machine(name: str) -> Machine:
    """Return the preset of that name. Raises ValueError, which lists all names, if there is none."""
    if name not in MACHINES:
        raise ValueError(f"there is no machine preset {name!r}; known are {', '.join(MACHINES)}")
    return MACHINES[name]


def memory_warning(machine: Machine, device: str, memory: float) -> str:
    """Return a warning if a device, with so many bytes of memory, is not that of the machine; "" otherwise."""
    gigabytes, expected = memory / 1e9, machine.device.memory
    if abs(gigabytes - expected) <= MEMORY_TOLERANCE * expected:
        return ""
    return (
        f'[topology] machine = "{machine.name}" has {machine.device.name} with {expected:.1f} GB of memory, and this '
        f"{device} has {gigabytes:.1f} GB: predictions for {machine.name} do not hold here; set another machine, or "
        '"auto"'
    )


def detect_machine(device_name: str) -> str:
    """Return the name of the preset for the name of an accelerator; "local" if no preset matches."""
    parts = {"GH200": "vista", "MI250X": "frontier", "A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200"}
    return next((name for part, name in parts.items() if part in device_name), "local")


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
            numbers = {f"{key} of {name}": getattr(link, key) for name, link in levels.items() for key in vars(link)}
            for name, number in {**numbers, "memory_bandwidth": stored["memory_bandwidth"]}.items():
                if not (0 < number < math.inf or (number == 0 and name.startswith("latency"))):
                    raise ValueError(f"the {name} is {number}; it must be positive")
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

"""How fast the optimizer's passes are on a GPU, from what `scripts/gpu_check.sh speed` has measured. No torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topology.links import Links
from topology.machines import Device
from torchtitan_scape.planner.volumes import PlannedRun

STORED = Path(__file__).resolve().parents[2] / "results" / "gpu"
AGAIN = "run scripts/gpu_check.sh speed on a machine with a GPU, or leave --kernels out"


@dataclass(frozen=True)
class Rate:
    """Bytes/s that (the pass that fills the payload, the other passes) of a step moved, of those that they must move.

    kind: as `PlannedRun.kind`. entries: of the model.
    """

    kind: str
    entries: int
    density: float
    wire: str
    pack: float
    rest: float


@dataclass(frozen=True)
class PassRates:
    """What was measured on one device.

    device: its name. runtime: "CUDA" or "ROCm". copy, nominal: bytes/s of a copy, and what its driver says the memory
    has, 0 where it does not. factor: what the rates are multiplied by, and why, for the device that is asked about.
    """

    source: str
    device: str
    runtime: str
    copy: float
    nominal: float
    rates: tuple[Rate, ...]
    factor: float = 1.0
    scaled: str = ""

    def of(self, method: PlannedRun) -> tuple[float, float]:
        """Bytes/s of (the pass that fills the payload, the other passes).

        Of the setting that is nearest: the kind, whether the wire has a code, density, and the largest model. Passes
        that nobody measured stream as those of dense AdamS.
        """

        def distance(rate: Rate) -> tuple[bool, bool, float, int]:
            coded = (rate.wire == "float32") != (method.wire == "float32")
            return rate.kind != method.kind, coded, abs(math.log(rate.density / method.density)), -rate.entries

        kind = method.kind if any(rate.kind == method.kind for rate in self.rates) else "adams"
        nearest = min((rate for rate in self.rates if rate.kind == kind), key=distance)
        return self.factor * nearest.pack, self.factor * nearest.rest

    def describe(self) -> str:
        return f"measured on {self.device} ({self.source}){self.scaled}"


def for_device(device: Device, links: Links, path: Path | None = None) -> PassRates | None:
    """What is to be taken for a device; None where nobody measured.

    Of all files those of the device itself go first, else of one of its maker the one whose memory is the most alike;
    its rates are then scaled: to the streaming bandwidth that the preflight measured, or to the nominal one.

    path: a file or a folder of them, by default the folders of `STORED`. Raises ValueError where it has none.
    """
    given = path or STORED
    found = [r for file in ([given] if given.is_file() else sorted(given.glob("**/speed.json"))) if (r := _read(file))]
    if path is not None and not found:
        raise ValueError(f"--kernels {path}: there is no speed.json of a GPU with times of AdamS and SCAPE; {AGAIN}")
    found = [rates for rates in found if rates.runtime == device.runtime]
    same = [rates for rates in found if device.name.split()[0] in rates.device]
    if same:
        return same[0]
    if not found:
        return None
    wanted = device.memory_bandwidth * 1e9
    nearest = min(found, key=lambda rates: abs(math.log((rates.nominal or rates.copy) / wanted)))
    if links.memory_bandwidth:
        factor, why = links.memory_bandwidth / nearest.copy, "the preflight's memory bandwidth"
    else:
        factor, why = wanted / (nearest.nominal or nearest.copy), f"the memory of {device.name}"
    return replace(nearest, factor=factor, scaled=f", times {factor:.2f} for {why}")


def _read(path: Path) -> PassRates | None:
    """None of what is no such file, of a smoke test, or of one that was cut off before dense AdamS and SCAPE."""
    try:
        stored = json.loads(path.read_text())
        machine, results = stored["machine"], [step.get("result") for step in stored["steps"].values()]
        passes = [result for result in results if result and result.get("settings") and result.get("dense")]
        if stored["smoke"] or not passes:
            return None
        rates = [rate for result in passes for rate in _rates(result)]
        runtime, copy = machine["runtime"].split()[0], max(result["copy_bandwidth"] for result in passes)
        return PassRates(_shown(path), machine["device"], runtime, copy, machine["nominal_bandwidth"], tuple(rates))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _rates(result: dict[str, Any]) -> Sequence[Rate]:
    """Of one model. A code's part of packing counts to the other passes, as in `scape_volumes.kernel_bytes`."""
    found, entries = [], result["settings"][0]["entries"]
    for kind, name in (("adamw", "fused AdamW"), ("adams", "dense AdamS")):
        rate = result["dense"][name]["bytes_a_second"]
        found.append(Rate(kind, entries, 1.0, "float32", rate, rate))
    for setting in result["settings"]:
        passes, step = setting["passes"], setting["step"]
        carry = passes.get("carry", {"ms": 0.0, "minimal_bytes": 0.0})
        pack = {key: passes["pack + select"][key] - carry[key] for key in ("ms", "minimal_bytes")}
        rest = {key: step[key] - pack[key] for key in pack}
        rates = [one["minimal_bytes"] / (one["ms"] / 1e3) for one in (pack, rest)]
        found.append(Rate("scape", entries, setting["density"], setting["wire"], *rates))
    return found


def _shown(path: Path) -> str:
    root = STORED.parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

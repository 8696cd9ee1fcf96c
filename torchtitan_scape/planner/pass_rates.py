"""Rates of the optimizer's passes on a GPU, as measured by `scripts/gpu_check.sh speed`. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_scape.core.files import parse_json
from torchtitan_scape.core.options import with_present_keys
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.machines import Device, Links

STORED = Path(__file__).with_name("measured")  # a link to results/gpu
AGAIN = "run scripts/gpu_check.sh speed on a machine with a GPU, or leave --kernels out"


@dataclass(frozen=True)
class Rate:
    """Bytes/s of (the packing pass, the other passes) of a step, of the bytes that they move at least.

    Attributes:
        kind: Method, or the optimizer of dense training in lower case.
        entries: Parameters of the model.
    """

    kind: str
    entries: int
    density: float
    code: str
    pack: float
    rest: float


@dataclass(frozen=True)
class PassRates:
    """Rates that were measured on one device.

    Attributes:
        device: Its name.
        runtime: "CUDA" or "ROCm".
        copy: Bytes/s of a copy.
        nominal: Memory bandwidth that the driver reports, in bytes/s; 0 if it reports none.
        factor: Factor on the rates for another device.
        scaled: Explanation of the factor.
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
        """Return the bytes/s of (the packing pass, the other passes).

        The nearest measurement is used: same kind, coded or FP32 payload, density, and the largest model. Passes
        without a measurement use the rates of dense AdamS.
        """
        options = method.options
        density, code = (options.density, options.code) if isinstance(options, ScapeOptions) else (1.0, "float32")

        def distance(rate: Rate) -> tuple[bool, float, int]:
            coded = (rate.code == "float32") != (code == "float32")
            return coded, abs(math.log(rate.density / density)), -rate.entries

        kind = method.optimizer.lower() if method.is_dense else options.method_name()
        kind = kind if any(rate.kind == kind for rate in self.rates) else "adams"
        nearest = min((rate for rate in self.rates if rate.kind == kind), key=distance)
        return self.factor * nearest.pack, self.factor * nearest.rest

    def describe(self) -> str:
        return f"measured on {self.device} ({self.source}){self.scaled}"


def for_device(device: Device, links: Links, path: Path | None = None) -> PassRates | None:
    """Return the rates for a device; None if there are no measurements.

    Files of the device itself take precedence. Otherwise the rates of a device with the same runtime and the most
    similar memory bandwidth are scaled: to the bandwidth that the doctor measured, or to the nominal one.

    Args:
        path: A file or a folder of files; by default the folders of `STORED`.

    Raises:
        ValueError: `path` contains no measurement.
    """
    given = path or STORED
    measurements = [
        r for file in ([given] if given.is_file() else sorted(given.glob("**/results.json"))) if (r := _read(file))
    ]
    if path is not None and not measurements:
        raise ValueError(f"--kernels {path}: there is no results.json of a GPU with times of AdamS and SCAPE; {AGAIN}")
    measurements = [rates for rates in measurements if rates.runtime == device.runtime]
    same = [rates for rates in measurements if device.name.split()[0] in rates.device]
    if same:
        return same[0]
    if not measurements:
        return None
    wanted = device.memory_bandwidth * 1e9
    nearest = min(measurements, key=lambda rates: abs(math.log((rates.nominal or rates.copy) / wanted)))
    if links.memory_bandwidth:
        factor, why = links.memory_bandwidth / nearest.copy, "the measured memory bandwidth"
    else:
        factor, why = wanted / (nearest.nominal or nearest.copy), f"the memory of {device.name}"
    return replace(nearest, factor=factor, scaled=f", times {factor:.2f} for {why}")


def _read(path: Path) -> PassRates | None:
    """Return the rates in a file; None for any other file, a smoke test, or a run without dense AdamS and SCAPE."""
    try:
        stored = parse_json(path.read_text())["speed"]
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
    """Return the rates of one model. The code's part of packing belongs to the other passes, as in `ScapeOptions`."""
    all_rates, entries = [], result["settings"][0]["entries"]
    for kind, name in (("adamw", "fused AdamW"), ("adams", "dense AdamS")):
        rate = result["dense"][name]["bytes_a_second"]
        all_rates.append(Rate(kind, entries, 1.0, "float32", rate, rate))
    for setting in (with_present_keys(one, "sync.scape") for one in result["settings"]):
        passes, step = setting["passes"], setting["step"]
        carry = passes.get("carry", {"ms": 0.0, "minimal_bytes": 0.0})
        pack = {key: passes["pack + select"][key] - carry[key] for key in ("ms", "minimal_bytes")}
        rest = {key: step[key] - pack[key] for key in pack}
        rates = [one["minimal_bytes"] / (one["ms"] / 1e3) for one in (pack, rest)]
        all_rates.append(Rate(ScapeOptions.method_name(), entries, setting["density"], setting["code"], *rates))
    return all_rates


def _shown(path: Path) -> str:
    root = STORED.parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

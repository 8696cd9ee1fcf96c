"""Recordings of the methods' steps for the planner: memory traffic, temporary memory and states, on meta tensors.

    python -m scripts.benchmarks.record_steps         # writes torchtitan_scape/methods/recorded.json, in minutes
    python -m scripts.benchmarks.record_steps topk    # records one method again

A new method needs an entry in `SETTINGS` only if its options change what a step moves.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from scripts.benchmarks.step_operators import META, OPTIONS, StepCounter, count_step
from torchtitan_scape.core.files import write_whole
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.methods.options import STORED, MethodOptions, StepRecording
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.topology.traffic import LevelSize, entries_in_flight

MODEL = replace(get_workload("llama_1_8b"), layers=8).local(1)
# (replicas, replicas of a node, the exchange starts early)
CASES = ((2, 1, False), (4, 1, False), (8, 1, False), (64, 1, False), (64, 4, False), (64, 1, True), (64, 4, True))
CODES = ("int8", "int4", "e2m1", "e3m0", "2bit", "1bit")
# The settings of each method that differ in what a step moves; {} are the defaults.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "quantized": [
        *({"code": code, "error_feedback": True} for code in CODES),
        {"code": "e2m1", "error_feedback": False},
    ],
    "quantized_update": [
        *({"interval": interval, "whiten_every": 200} for interval in (1, 2, 4)),
        *({"interval": interval, "whiten_every": 0} for interval in (1, 4)),
    ],
    "onebit_adam": [{"code": code} for code in ("int8", "e2m1", "2bit", "1bit")],
    "sparta": [{"code": code} for code in ("auto", "float32", "int8", "e2m1", "2bit", "1bit", "1bit_unbiased")],
    "diloco": [
        {"code": code, "decay": decay, "outer_momentum": momentum}
        for code, decay in (("float32", 0.0), ("int8", 0.0), ("e2m1", 0.0), ("e2m1", 0.9))
        for momentum in (0.9, 0.0)
    ],
    "streaming_diloco": [
        {"code": code, "decay": decay} for code, decay in (("float32", 0.0), ("e2m1", 0.0), ("e2m1", 0.9))
    ],
    "sparseloco": [{"code": code} for code in ("float32", "2bit")],
    "co2": [{"gap_penalty": penalty} for penalty in (True, False)],
    "noloco": [{"outer_momentum": momentum} for momentum in (0.5, 0.0)],
    "topk": [{"code": code, "selection": s} for code in ("float32", "2bit") for s in ("block", "tile")],
    "demo": [{"code": code} for code in ("float32", "sign")],
    "radius": [{"density": density} for density in (0.4, 0.1, 0.02)],
    "tagc": [{"density": density} for density in (0.3, 0.1, 0.02)],
}
# The whole model is exchanged, and its result applied, in the step that is counted.
AT_ONCE = {"streaming_diloco": {"fragments": 1, "delay": 0}}


def record(name: str, setting: dict[str, Any], replicas: int, per_node: int, early: bool) -> StepRecording:
    """Return `StepRecording` of a method on `MODEL`."""
    given = setting | AT_ONCE.get(name, {})
    options = METHODS[name].options(**OPTIONS.get(name, {}) | given)
    muon = options.divides_update and bool(setting.get("whiten_every"))
    count = count_step(name, MODEL, replicas, per_node=per_node, early=early, muon=muon, **given)
    moved = count.bytes
    if options.divides_update:  # the count contains the optimizer's step on the busiest replica
        updated = options.updated_model(MODEL, replicas).entries / len(options.update_groups(MODEL))
        moved -= updated * _optimizer_bytes(muon)
    # A step of local updates that is counted has a whole exchange.
    moved /= MODEL.entries * (1.0 if hasattr(options, "inner_steps") else options.exchange_share())
    held = {kind: round(nbytes / MODEL.entries, 3) for kind, nbytes in count.held.items()}
    return StepRecording(round(moved, 3), round(temporary_bytes(options, count.peak, replicas, early), 3), held)


def temporary_bytes(options: MethodOptions, peak: int, replicas: int, early: bool) -> float:
    """Return the temporary bytes of a step, in the unit of `StepRecording`."""
    calls = options.collective_calls(MODEL, [LevelSize("network", replicas)])
    kinds = options.held_memory(MODEL, replicas)
    streams = all(call.chunks for call in calls) and not early
    count = entries_in_flight(calls) if streams else MODEL.entries
    # Messages of all replicas, and displacements, are counted separately.
    separate = replicas * sum(call.count for call in calls if call.kind == "all_gather" and not call.chunks)
    separate += 4 * MODEL.entries if "displacements" in kinds else 0
    return max(0.0, peak - separate) / count if count else 0.0


def _optimizer_bytes(muon: bool) -> float:
    """Return the bytes per entry that a step of the optimizer moves."""
    if not muon:
        return 20.0  # AdamS
    counter, named = StepCounter(), list(zip(MODEL.names, _parameters(MODEL), strict=True))
    optimizer = Muon(named)
    for _ in range(2):  # the first one creates the state
        counter.count.bytes = 0.0
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        with counter:
            optimizer.step()
    return counter.count.bytes / MODEL.entries


def _parameters(model: LocalModel) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(shape, device=META)) for shape in model.shapes]


def record_method(name: str) -> list[dict[str, Any]]:
    """Return the entries of a method in recorded.json."""
    entries = []
    for setting in SETTINGS.get(name, [{}]):
        options = METHODS[name].options(**setting)
        rows = []
        for replicas, per_node, early in CASES:
            if early and not options.supports_overlap():
                continue
            rows.append([replicas, int(per_node > 1), int(early), *record(name, setting, replicas, per_node, early)])
            print(name, setting, rows[-1], flush=True)
        entries.append({"method": name, "options": setting, "rows": rows})
    return entries


def main(arguments: Sequence[str]) -> None:
    # The passes of scape have a closed form, because its kernels receive addresses of tensors.
    chosen = arguments or [name for name in METHODS if not METHODS[name].options.holds_optimizer_state]
    stored = json.loads(STORED.read_text())["settings"] if STORED.is_file() else []
    settings = [entry for entry in stored if entry["method"] not in chosen]
    for name in chosen:
        settings += record_method(name)
        lines = ",\n".join(
            json.dumps(entry) for entry in sorted(settings, key=lambda entry: list(METHODS).index(entry["method"]))
        )
        write_whole(STORED, f'{{"recorded_by": "scripts.benchmarks.record_steps", "settings": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])

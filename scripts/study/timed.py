"""Common parts of the launchers `emulated` and `slurm`: timed runs on several ranks, and their results."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.common import RunError
from scripts.study.grid import LAUNCH_KEYS, RunSpec

TIMED = ("scripts.study.timed_rank",)
NEVER = 1_000_000  # steps between two logs or validations
PEERS_NOTE = (
    "DDP and HSDP exchange during the backward pass: their exposed communication is the time by which forward and "
    "backward are slower than the same passes without an exchange. They count no bytes; the interfaces do."
)
STEPS, WARM_UP = 12, 4  # of a set that sets neither


def medians(launch: dict[str, Any]) -> str:
    steps, warm_up = launch.get("steps", STEPS), launch.get("warm_up", WARM_UP)
    return f"Medians over {steps} steps after {warm_up}; a step is that of its slowest rank"


def timing(spec: RunSpec) -> dict[str, int]:
    """Return the steps before the measured ones, the period of the exchange, and all steps: whole periods."""
    launch, period = spec.of.launch, spec.about.get("period", 1)
    warm_up = max(launch.get("warm_up", WARM_UP), spec.about.get("settles", 0))
    periods = -(-launch.get("steps", STEPS) // period)
    return {"warm_up": warm_up, "period": period, "steps": warm_up + periods * period}


def wanted(spec: RunSpec, raw: Path, **more: Any) -> str:
    """Return the variable TIMED_RUN of a run, whose measurement goes into the file `raw`."""
    found = timing(spec) | {key: spec.about[key] for key in LAUNCH_KEYS if key in spec.about}
    return json.dumps({"output": str(raw), **found, **more})


def from_raw(spec: RunSpec, raw: Path, per_node: int, compute: str) -> dict[str, Any]:
    """Return the result of a timed run from the measurement that timed_rank.py wrote. Raises RunError."""
    measured = json.loads(raw.read_text())
    summary = measured.pop("summary")
    if summary["skipped_steps"]:
        raise RunError(f"{summary['skipped_steps']} steps were skipped; the rest is no measurement")
    sent = (summary.get("interfaces") or {}).get("sent_per_step", {})
    nic = {level: fmean(node["interface"] for node in nodes) for level, nodes in sent.items()}
    counted = {level: fmean(node["counted"] for node in nodes) for level, nodes in sent.items()}
    batch = spec.options["training.global_batch_size"]
    found = {
        "launcher": spec.of.launcher,
        "recipe": spec.recipe_name,
        "label": spec.label,
        "size": spec.size,
        **measured,
        "nodes": spec.size // per_node,
        "ranks_per_node": per_node,
        "compute": compute,
        "layout": summary["layout"],
        "period": timing(spec)["period"],
        "nic": nic or None,
        "counted": counted if counted and measured["sent"] else None,
        "tokens_per_step": batch * summary["sequence"],
        "validation_loss": summary["validation_loss"],
        "payload_parts": summary["payload_parts"],
        "predicted": None,
    }
    if planned := summary.get("planned_shard_axis_bytes_per_step_and_rank"):
        planned = {key: per_node * value for key, value in planned.items()}
        if spec.about.get("every_forward"):  # the closed form has one gather per update
            planned["network weights"] *= batch // spec.size
        if spec.about.get("last_only"):  # the closed form has one reduce-scatter per micro-batch
            planned["network gradients"] /= batch // spec.size
        replicas = per_node * summary["planned_bytes_per_step_and_rank"]
        found["planned"] = planned | ({"network replicas": replicas} if replicas else {})
        found["by_kind"] = {
            level: {kind: fmean(n["by_kind"].get(kind, 0.0) for n in nodes) for kind in nodes[0]["by_kind"]}
            for level, nodes in sent.items()
        }
    return found

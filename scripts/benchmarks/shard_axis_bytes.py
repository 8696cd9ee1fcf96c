"""Bytes of ZeRO++ against FSDP2's own collectives, a shard axis over two nodes, on an emulated cluster's counters.

    python -m scripts.benchmarks.shard_axis_bytes run        # every form: three minutes, as root
    python -m scripts.benchmarks.shard_axis_bytes report     # table.md, from the stored runs alone

A run trains a few steps of the embedded recipe, gathers in BF16, on scripts/emulated_cluster.py: 2 nodes of 2 ranks,
links not limited. Bytes are those of the training steps after the first ("interfaces" in summary.json), in the mean
over nodes.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import emulated_bytes
from scripts.common import markdown, megabytes

NODES, RANKS_PER_NODE = 2, 2
KINDS = ("weights", "gradients")


class Form(NamedTuple):
    title: str
    options: tuple[str, ...] = ()


WEIGHTS, SECONDARY = "--sharding.weights=int8", "--sharding.secondary"
GRADIENTS = "--sharding.gradients=int8+int4"
FORMS = {
    "dense": Form("FSDP2's own"),
    "weights": Form("weights in INT8", (WEIGHTS,)),
    "secondary": Form("weights in INT8, across nodes once an update", (WEIGHTS, SECONDARY)),
    "gradients": Form("gradients in INT8, across nodes INT4", (GRADIENTS,)),
    "all": Form("all three", (WEIGHTS, SECONDARY, GRADIENTS)),
}
# Bytes on the network at most, of all three against `ring_bytes`, by micro-batches a step.
TARGETS = {1: 0.25, 2: 0.20}
OPTIONS = f"""
    --training.local_batch_size=1 --validation.steps=1 --validation.local_batch_size=1 --metrics.log_freq=100
    --training.mixed_precision_param=bfloat16 --sync.method=dense --optimizer.name=AdamW
    --parallelism.data_parallel_shard_degree={NODES * RANKS_PER_NODE}
"""


def train(micro_batches: int, form: Form, steps: int, folder: Path, timeout: float) -> dict[str, Any]:
    batch = f"--training.global_batch_size={micro_batches * NODES * RANKS_PER_NODE}"
    options = [f"--training.steps={steps}", batch, *OPTIONS.split(), *form.options]
    kept = ("layout", "validation_loss", "interfaces", "planned_shard_axis_bytes_per_step_and_rank")
    return emulated_bytes.train(NODES, RANKS_PER_NODE, options, kept, folder, timeout)


def run(steps: int, work: Path, timeout: float) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {}
    for micro_batches in TARGETS:
        for name, form in FORMS.items():
            print(f"{micro_batches} micro-batch(es): {form.title} ...", flush=True)
            found = train(micro_batches, form, steps, work / f"{micro_batches}-{name}", timeout)
            runs.setdefault(str(micro_batches), {})[name] = found
    return runs


# -------------------------------------------------------------------------------------------------- report


class Volume(NamedTuple):
    """Bytes a step and node over one kind of link: on the interfaces, as its ranks count them, and in closed form."""

    counter: float
    counted: float
    planned: float


def volume(one: Mapping[str, Any], level: str) -> Volume:
    nodes = one["interfaces"]["sent_per_step"][level]
    counter, counted = (sum(node[key] for node in nodes) / len(nodes) for key in ("interface", "counted"))
    planned = one["planned_shard_axis_bytes_per_step_and_rank"]
    return Volume(counter, counted, RANKS_PER_NODE * sum(planned.get(f"{level} {kind}", 0.0) for kind in KINDS))


def ring_bytes(dense: Mapping[str, Any]) -> float:
    """What FSDP2 needs on the network, by node: both of its collectives round a ring over all ranks, as NCCL has them.

    On gloo gradients go straight to their owners, which takes a third more of the network here.
    """
    planned = dense["planned_shard_axis_bytes_per_step_and_rank"]
    ranks = NODES * RANKS_PER_NODE
    shorter = (ranks - 1) / (RANKS_PER_NODE * (ranks - RANKS_PER_NODE))
    return RANKS_PER_NODE * (planned["network weights"] + shorter * planned.get("network gradients", 0.0))


def rows_of(runs: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for every form and number of micro-batches."""
    rows = []
    for micro_batches, forms in runs.items():
        ideal = ring_bytes(forms["dense"])
        for name, one in forms.items():
            network, inside = volume(one, "network"), volume(one, "node")
            target = TARGETS[int(micro_batches)] if name == "all" else None
            # The validation after the first step has left its secondary to the second one.
            spared = max(0.0, network.planned - network.counted)
            ratio = (network.counter + spared) / ideal
            row = {"micro-batches": micro_batches, "form": FORMS[name].title}
            row |= {f"network, {key}": megabytes(value) for key, value in zip(Volume._fields, network, strict=True)}
            row |= {"counter / counted": f"{network.counter / network.counted:.3f}", "against dense": f"{ratio:.3f}"}
            row["target"] = f"{target:.2f}" if target else "-"
            row["holds"] = ("yes" if ratio <= target else "no") if target else "-"
            row |= {"node, counter": megabytes(inside.counter), "node, planned": megabytes(inside.planned)}
            row["validation loss"] = f"{one['validation_loss']:.4f}"
            rows.append(row)
    return rows


def table(stored: Mapping[str, Any]) -> str:
    """table.md, from runs.json."""
    runs = stored["runs"]
    first = runs["1"]["dense"]
    return f"""# Bytes of ZeRO++ where the shard axis crosses nodes

MB (1e6 bytes) sent per step and node; {NODES} nodes of {RANKS_PER_NODE} ranks hold one replica of the embedded recipe
together, {first["interfaces"]["steps"]} steps after the first. "Counter" is what the interfaces themselves sent
(network namespaces as nodes, gloo over TCP, rates not limited), "counted" what the ranks count, all kinds of messages
together, "planned" the closed form of weights and gradients alone. "Against dense" is the counter against what FSDP2's
own collectives need round a ring over all ranks: gathers in BF16, gradients in FP32. The validation after the first
step leaves its secondary to the second one, which then counts less than planned: that is added to the counter. Made by

```
{stored["command"]}
```

with `{" ".join(first["options"])}` and what the form takes:

{chr(10).join(f"- {form.title}: `{' '.join(form.options)}`" for form in FORMS.values() if form.options)}

{markdown(rows_of(runs))}
"""


if __name__ == "__main__":
    sys.exit(emulated_bytes.main("shard_axis_bytes", __doc__, run, table, "shard_axis_bytes", steps=8))

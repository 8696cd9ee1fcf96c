"""Bytes of SCAPE's sharded update against the all-reduce of the replicated one, on an emulated cluster's counters.

    python -m scripts.benchmarks.sharded_bytes run        # every form on every cluster: six minutes, as root
    python -m scripts.benchmarks.sharded_bytes report     # table.md, from the stored runs alone

A run trains a few steps of the embedded recipe on scripts/emulated_cluster.py, its links not limited. Bytes are those
of the training steps after the first, which is dense ("interfaces" in summary.json). runs.json holds them by node,
table.md by replica. Mask bytes, as the ranks count them, are left out of both sides of a ratio; nothing else is.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import emulated_bytes
from scripts.common import markdown, megabytes


class Form(NamedTuple):
    """target: bytes against the replicated form at most; None for that itself."""

    title: str
    options: tuple[str, ...] = ()
    target: float | None = None


class Plan(NamedTuple):
    """A cluster, and how many ranks of a node hold a replica together."""

    title: str
    nodes: int
    ranks_per_node: int = 1
    shard: int = 1

    @property
    def replicas(self) -> int:
        return self.nodes * self.ranks_per_node // self.shard


SHARDED, VALUES = "--sync.scape.update=sharded", "--sync.scape.values=bfloat16"
# By the names under which runs are stored: update = "replicated" was "local", "sharded" was "gather".
FORMS = {
    "local": Form("replicated, FP32 (all-reduce)"),
    "gather": Form("sharded, FP32", (SHARDED,), 1.02),
    "gather-values": Form("sharded, values in BF16", (SHARDED, VALUES), 0.77),
    "gather-both": Form("sharded, BF16 both ways", (SHARDED, VALUES, "--sync.scape.wire=bfloat16"), 0.52),
}
PLANS = {
    "2x1": Plan("2 nodes of 1 rank", 2),
    "3x1": Plan("3 nodes of 1 rank", 3),
    "4x1": Plan("4 nodes of 1 rank", 4),
    "2x2": Plan("2 nodes of 2 ranks, 4 replicas, level by level", 2, 2),
    "2x2-shard": Plan("2 nodes of 2 ranks, 2 replicas x 2 shards", 2, 2, 2),
}
OPTIONS = """
    --training.local_batch_size=1 --validation.steps=1 --validation.local_batch_size=1
    --sync.scape.density=0.1 --sync.scape.wire=float32 --sync.scape.density_warmup_steps=0 --metrics.log_freq=100
"""


def train(plan: Plan, form: Form, steps: int, folder: Path, timeout: float) -> dict[str, Any]:
    options = [f"--training.steps={steps}", *OPTIONS.split(), *form.options]
    if plan.shard > 1:
        options.append(f"--parallelism.data_parallel_shard_degree={plan.shard}")
    kept = ("layout", "payload_parts", "messages_per_step", "validation_loss", "interfaces")
    found = emulated_bytes.train(plan.nodes, plan.ranks_per_node, options, kept, folder, timeout)
    return found | {"replicas": plan.replicas}


def run(steps: int, work: Path, timeout: float) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {}
    for cluster, plan in PLANS.items():
        for name, form in FORMS.items():
            print(f"{plan.title}: {form.title} ...", flush=True)
            runs.setdefault(cluster, {})[name] = train(plan, form, steps, work / f"{cluster}-{name}", timeout)
    return runs


# -------------------------------------------------------------------------------------------------- report


class Volume(NamedTuple):
    """Bytes per step over one kind of link: on the interfaces, as the ranks count them, and the masks among these."""

    counter: float
    counted: float
    masks: float

    def against(self, other: "Volume") -> tuple[float, float]:
        """Ratios without masks, (on the counter, as counted)."""
        return (
            (self.counter - self.masks) / (other.counter - other.masks),
            (self.counted - self.masks) / (other.counted - other.masks),
        )


def volume(nodes: Sequence[Mapping[str, Any]], replicas: int = 1) -> Volume:
    """What a replica sends, from nodes' entries in summary.json."""
    counter, counted = (sum(node[key] for node in nodes) / replicas for key in ("interface", "counted"))
    return Volume(counter, counted, sum(node["by_kind"].get("mask", 0.0) for node in nodes) / replicas)


def sent(forms: Mapping[str, Any], *levels: str) -> dict[str, list[dict[str, Any]]]:
    """The nodes' entries of "network", "node", or both, by form."""
    measured = {name: run["interfaces"]["sent_per_step"] for name, run in forms.items()}
    return {name: [node for level in levels for node in found[level]] for name, found in measured.items()}


def verdict(ratios: tuple[float, float], target: float) -> str:
    on_counter, counted = (ratio <= target for ratio in ratios)
    return "yes" if on_counter and counted else "as counted only" if counted else "no"


def rows_of(runs: Mapping[str, Any], level: str) -> list[dict[str, str]]:
    """A row for each form on each cluster whose ranks count bytes at this level; compared where payload is among it."""
    rows = []
    for cluster, forms in runs.items():
        entries = sent(forms, level)
        if not any(node["counted"] for node in entries["local"]):
            continue
        exchanged = any("payload" in node["by_kind"] for node in entries["local"])
        replicated = volume(entries["local"], forms["local"]["replicas"])
        for name, nodes in entries.items():
            own, target = volume(nodes, forms[name]["replicas"]), FORMS[name].target
            row = {"cluster": PLANS[cluster].title, "form": FORMS[name].title}
            row |= {"counter": megabytes(own.counter), "counted": megabytes(own.counted)}
            row |= {"masks": megabytes(own.masks), "counter without masks": megabytes(own.counter - own.masks)}
            row |= dict.fromkeys(("against replicated, counter", "against replicated, counted", "target", "holds"), "-")
            if exchanged:
                ratios = own.against(replicated)
                row["against replicated, counter"], row["against replicated, counted"] = (f"{r:.3f}" for r in ratios)
                if target is not None:
                    row |= {"target": f"{target:.2f}", "holds": verdict(ratios, target)}
            rows.append(row)
    return rows


def spread(runs: Mapping[str, Any]) -> tuple[float, float, float]:
    """Of the network: the least and the most that a counter has beyond what is counted, as shares of that; and how far
    the ratio of a single node is from that of all."""
    beyond, apart = [], []
    for forms in runs.values():
        entries = sent(forms, "network")
        for nodes in entries.values():
            own, replicated = volume(nodes), entries["local"]
            beyond.append(own.counter / own.counted - 1)
            ratio = own.against(volume(replicated))[0]
            pairs = zip(nodes, replicated, strict=True)
            apart += [abs(volume([one]).against(volume([same]))[0] - ratio) for one, same in pairs]
    return min(beyond), max(beyond), max(apart)


def table(stored: Mapping[str, Any]) -> str:
    """table.md, from runs.json."""
    runs = stored["runs"]
    first = runs["2x1"]["local"]
    least, most, apart = spread(runs)
    network, inside = rows_of(runs, "network"), rows_of(runs, "node")
    verdicts = [row["holds"] for row in network if row["holds"] != "-"]
    both = {name: volume(nodes) for name, nodes in sent(runs["2x2"], "network", "node").items()}
    options = "\n".join(f"- {form.title}: `{' '.join(form.options)}`" for form in FORMS.values() if form.options)
    return f"""# Bytes of the sharded update against the all-reduce

SCAPE at density 0.1 on the embedded recipe. MB (1e6 bytes) sent per step and replica: the mean over replicas, and over
the {first["interfaces"]["steps"]} steps after the first, which is dense. "Counter" is what the interfaces themselves
sent (network namespaces as nodes, gloo over TCP, rates not limited), "counted" what the ranks count. Made by

```
{stored["command"]}
```

which trains every form on every cluster, in a run of its own, with

`{" ".join(first["options"])}`

(for shards `--parallelism.data_parallel_shard_degree=2` besides) and what the form takes:

{options}

Ratios are without masks on both sides: their bytes, as the ranks count them, are taken from the counter, too. All else
stays in: the finite flag and the norm (some bytes), and on the counter headers and acknowledgements (those of the
masks, too), gloo's own messages, TorchTitan's scalars and the launcher. Both sides of a ratio have these, and some of
them do not shrink with the payload. An all-reduce of the payload and an all-gather of as much after it, as the paper
has them, would be 1.50.

## The network

Targets hold on the counter and as counted in {verdicts.count("yes")} of {len(verdicts)} cases. The counter has
{100 * least:.1f} to {100 * most:.1f} % more than is counted. The ratio of a single node is at most {apart:.4f} from
that of all.

{markdown(network)}

## Inside a node (loopback)

BF16 crosses the outermost level, the network. Inside a node sums travel in FP32, so that with BF16 both ways only what
comes back is halved there: 0.75 instead of 0.50, and {both["gather-both"].against(both["local"])[0]:.2f} on both links
together. Shards of one replica exchange nothing of SCAPE's but flag and norm; what else their loopback carries is
FSDP's, which every form has alike and which was not counted in these runs.

{markdown(inside)}
"""


if __name__ == "__main__":
    sys.exit(emulated_bytes.main("sharded_bytes", __doc__, run, table, "gather_bytes", steps=12))

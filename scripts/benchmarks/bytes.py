"""Bytes that are sent on an emulated cluster, and bytes that the passes of a SCAPE step move at least.

    python -m scripts.benchmarks.bytes sharded       # SCAPE's sharded update against the all-reduce: 6 minutes, as root
    python -m scripts.benchmarks.bytes shard-axis    # ZeRO++ against FSDP2's own collectives: 3 minutes, as root
    python -m scripts.benchmarks.bytes kernels       # closed form

Bytes sent are those of the training steps after the first ("interfaces" in summary.json); links are not limited.
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.harness import Benchmark, main
from scripts.common import EMBEDDED, OUTPUTS, RunError, markdown, megabytes
from scripts.emulated_cluster import Cluster
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.scape.options import ScapeOptions


class EmulatedLayout(NamedTuple):
    """Nodes and ranks of a run, and options of the trainer that belong to them."""

    title: str
    nodes: int
    ranks_per_node: int
    replicas: int
    options: str = ""


class BytesVariant(NamedTuple):
    """Options of the trainer. target: largest accepted ratio to the first variant of the benchmark."""

    title: str
    options: str = ""
    target: float | None = None


class BytesBenchmark(NamedTuple):
    """Every variant runs on every layout. summary: keys of summary.json that are stored."""

    results: str
    steps: int
    layouts: Mapping[str, EmulatedLayout]
    variants: Mapping[str, BytesVariant]
    options: str
    summary: tuple[str, ...]

    def option_list(self) -> str:
        return "\n".join(f"- {one.title}: `{one.options}`" for one in self.variants.values() if one.options)


COMMON = """
    --training.local_batch_size=1 --validation.steps=1 --validation.local_batch_size=1 --metrics.log_freq=100
    --sample.characters=0
"""
SHARDED = BytesBenchmark(
    "gather_bytes",
    12,
    {
        "2x1": EmulatedLayout("2 nodes of 1 rank", 2, 1, 2),
        "3x1": EmulatedLayout("3 nodes of 1 rank", 3, 1, 3),
        "4x1": EmulatedLayout("4 nodes of 1 rank", 4, 1, 4),
        "2x2": EmulatedLayout("2 nodes of 2 ranks, 4 replicas, level by level", 2, 2, 4),
        "2x2-shard": EmulatedLayout(
            "2 nodes of 2 ranks, 2 replicas x 2 shards", 2, 2, 2, "--parallelism.data_parallel_shard_degree=2"
        ),
    },
    {  # by the names in the stored runs: update = "replicated" was "local", "sharded" was "gather"
        "local": BytesVariant("replicated, FP32 (all-reduce)"),
        "gather": BytesVariant("sharded, FP32", "--sync.scape.update=sharded", 1.02),
        "gather-values": BytesVariant(
            "sharded, values in BF16", "--sync.scape.update=sharded --sync.scape.values=bfloat16", 0.77
        ),
        "gather-both": BytesVariant(
            "sharded, BF16 both ways",
            "--sync.scape.update=sharded --sync.scape.values=bfloat16 --sync.scape.wire=bfloat16",
            0.52,
        ),
    },
    "--sync.scape.density=0.1 --sync.scape.wire=float32 --sync.scape.density_warmup_steps=0",
    ("layout", "payload_parts", "messages_per_step", "validation_loss", "interfaces"),
)
NODES, RANKS_PER_NODE = 2, 2  # of the shard axis
PLANNED = "planned_shard_axis_bytes_per_step_and_rank"
SHARD_AXIS = BytesBenchmark(
    "shard_axis_bytes",
    8,
    {
        "1": EmulatedLayout("1 micro-batch", NODES, RANKS_PER_NODE, 1, "--training.global_batch_size=4"),
        "2": EmulatedLayout("2 micro-batches", NODES, RANKS_PER_NODE, 1, "--training.global_batch_size=8"),
    },
    {
        "dense": BytesVariant("FSDP2's own"),
        "weights": BytesVariant("weights in INT8", "--sharding.weights=int8"),
        "secondary": BytesVariant(
            "weights in INT8, across nodes once an update", "--sharding.weights=int8 --sharding.secondary"
        ),
        "gradients": BytesVariant("gradients in INT8, across nodes INT4", "--sharding.gradients=int8+int4"),
        "all": BytesVariant("all three", "--sharding.weights=int8 --sharding.secondary --sharding.gradients=int8+int4"),
    },
    "--training.mixed_precision_param=bfloat16 --sync.method=dense --optimizer.name=AdamW "
    "--parallelism.data_parallel_shard_degree=4",
    ("layout", "validation_loss", "interfaces", PLANNED),
)
# Largest accepted network bytes of all three together relative to `ring_bytes`, by micro-batches per step.
SHARD_AXIS_TARGETS = {"1": 0.25, "2": 0.20}
KERNEL_REPLICAS, PASSES = 8, ("finite", "pack", "squares", "update", "coding")


# ----------------------------------------------------------------------------------------------------- runs


def run_all(benchmark: BytesBenchmark, steps: int, work: Path, timeout: float) -> dict[str, dict[str, Any]]:
    """Train every variant on every layout; return options and parts of the summary by layout and variant.

    Raises:
        RunError: A run failed, skipped steps, or counted no bytes on the interfaces.
    """
    runs: dict[str, dict[str, Any]] = {}
    for (place, layout), (name, variant) in itertools.product(benchmark.layouts.items(), benchmark.variants.items()):
        print(f"{layout.title}: {variant.title} ...", flush=True)
        folder = work / f"{place}-{name}"
        (folder / "summary.json").unlink(missing_ok=True)
        options = [f"--training.steps={steps}"]
        options += " ".join([COMMON, benchmark.options, layout.options, variant.options]).split()
        given = ["-m", "torchtitan_scape.train", f"--job.config_file={EMBEDDED}", f"--job.dump_folder={folder}"]
        with Cluster(layout.nodes) as cluster:
            cluster.torchrun([*given, *options], layout.ranks_per_node, folder, timeout)
        summary = json.loads((folder / "summary.json").read_text())
        if summary["interfaces"] is None or summary["skipped_steps"]:
            raise RunError(f"{folder.name} counted no bytes on the interfaces, or skipped steps; logs are in {folder}")
        kept = {key: summary[key] for key in benchmark.summary}
        runs.setdefault(place, {})[name] = {"options": options, "replicas": layout.replicas, **kept}
    return runs


class WireBytes(NamedTuple):
    """Bytes per step over one kind of link: on the interfaces, as the ranks count them, and masks among the latter."""

    counter: float
    counted: float
    masks: float

    def ratios(self, other: "WireBytes") -> tuple[float, float]:
        """Return the ratios to another variant without masks, (on the counter, as counted)."""
        return (
            (self.counter - self.masks) / (other.counter - other.masks),
            (self.counted - self.masks) / (other.counted - other.masks),
        )


def wire_bytes(nodes: Sequence[Mapping[str, Any]], senders: int = 1) -> WireBytes:
    """Return what one of the senders sends, from the nodes' entries in summary.json."""
    counter, counted = (sum(node[key] for node in nodes) / senders for key in ("interface", "counted"))
    return WireBytes(counter, counted, sum(node["by_kind"].get("mask", 0.0) for node in nodes) / senders)


def nodes_of(run: Mapping[str, Any], *levels: str) -> list[dict[str, Any]]:
    """Return the nodes' entries of a run at "network", "node", or both."""
    return [node for level in levels for node in run["interfaces"]["sent_per_step"][level]]


# ------------------------------------------------------------------------------------------- sharded update


def verdict(ratios: tuple[float, float], target: float) -> str:
    on_counter, counted = (ratio <= target for ratio in ratios)
    return "yes" if on_counter and counted else "as counted only" if counted else "no"


def sharded_rows(runs: Mapping[str, Any], level: str) -> list[dict[str, str]]:
    """Return a row per variant and layout whose ranks count bytes at this level; ratios only if payload is sent."""
    rows = []
    for place, variants in runs.items():
        entries = {name: nodes_of(run, level) for name, run in variants.items()}
        if not any(node["counted"] for node in entries["local"]):
            continue
        exchanged = any("payload" in node["by_kind"] for node in entries["local"])
        replicated = wire_bytes(entries["local"], variants["local"]["replicas"])
        for name, nodes in entries.items():
            sent, variant = wire_bytes(nodes, variants[name]["replicas"]), SHARDED.variants[name]
            row = {"cluster": SHARDED.layouts[place].title, "form": variant.title}
            row |= {"counter": megabytes(sent.counter), "counted": megabytes(sent.counted)}
            row |= {"masks": megabytes(sent.masks), "counter without masks": megabytes(sent.counter - sent.masks)}
            row |= dict.fromkeys(("against replicated, counter", "against replicated, counted", "target", "holds"), "-")
            if exchanged:
                ratios = sent.ratios(replicated)
                row["against replicated, counter"], row["against replicated, counted"] = (f"{r:.3f}" for r in ratios)
                if variant.target is not None:
                    row |= {"target": f"{variant.target:.2f}", "holds": verdict(ratios, variant.target)}
            rows.append(row)
    return rows


def spread(runs: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return figures of the network: the smallest and the largest share of the counter in excess of the counted bytes,
    and the largest difference between the ratio of a single node and that of all."""
    excess, differences = [], []
    for variants in runs.values():
        replicated = nodes_of(variants["local"], "network")
        for run in variants.values():
            nodes = nodes_of(run, "network")
            sent = wire_bytes(nodes)
            excess.append(sent.counter / sent.counted - 1)
            ratio = sent.ratios(wire_bytes(replicated))[0]
            pairs = zip(nodes, replicated, strict=True)
            differences += [abs(wire_bytes([one]).ratios(wire_bytes([same]))[0] - ratio) for one, same in pairs]
    return min(excess), max(excess), max(differences)


def sharded_table(runs: Mapping[str, Any]) -> str:
    """Return table.md of the stored runs."""
    first = runs["2x1"]["local"]
    least, most, deviation = spread(runs)
    network, inside = sharded_rows(runs, "network"), sharded_rows(runs, "node")
    verdicts = [row["holds"] for row in network if row["holds"] != "-"]
    both = {name: wire_bytes(nodes_of(run, "network", "node")) for name, run in runs["2x2"].items()}
    return f"""# Bytes of the sharded update against the all-reduce

SCAPE at density 0.1 on the embedded recipe. MB (1e6 bytes) sent per step and replica: the mean over replicas, and over
the {first["interfaces"]["steps"]} steps after the first, which is dense. "Counter" is what the interfaces themselves
sent (network namespaces as nodes, gloo over TCP, rates not limited), "counted" what the ranks count. Made by

```
python -m scripts.benchmarks.bytes sharded
```

which trains every form on every cluster, in a run of its own, with

`{" ".join(first["options"])}`

(for shards `--parallelism.data_parallel_shard_degree=2` besides) and what the form takes:

{SHARDED.option_list()}

Ratios are without masks on both sides: their bytes, as the ranks count them, are taken from the counter, too. All else
stays in: the finite flag and the norm (some bytes), and on the counter headers and acknowledgements (those of the
masks, too), gloo's own messages, TorchTitan's scalars and the launcher. Both sides of a ratio have these, and some of
them do not shrink with the payload. An all-reduce of the payload and an all-gather of as much after it, as the paper
has them, would be 1.50.

## The network

Targets hold on the counter and as counted in {verdicts.count("yes")} of {len(verdicts)} cases. The counter has
{100 * least:.1f} to {100 * most:.1f} % more than is counted. The ratio of a single node is at most {deviation:.4f} from
that of all.

{markdown(network)}

## Inside a node (loopback)

BF16 crosses the outermost level, the network. Inside a node sums travel in FP32, so that with BF16 both ways only what
comes back is halved there: 0.75 instead of 0.50, and {both["gather-both"].ratios(both["local"])[0]:.2f} on both links
together. Shards of one replica exchange nothing of SCAPE's but flag and norm; what else their loopback carries is
FSDP's, which every form has alike and which was not counted in these runs.

{markdown(inside)}
"""


# ----------------------------------------------------------------------------------- ZeRO++ on the shard axis


def ring_bytes(dense: Mapping[str, Any]) -> float:
    """Return the network bytes per node of FSDP2's collectives on a ring over all ranks, as NCCL has them.

    gloo sends gradients directly to their owners instead, which is a third more on this network.
    """
    planned, ranks = dense[PLANNED], NODES * RANKS_PER_NODE
    shorter = (ranks - 1) / (RANKS_PER_NODE * (ranks - RANKS_PER_NODE))
    return RANKS_PER_NODE * (planned["network weights"] + shorter * planned.get("network gradients", 0.0))


def shard_axis_rows(runs: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row per variant and number of micro-batches."""
    rows = []
    for micro_batches, variants in runs.items():
        ideal = ring_bytes(variants["dense"])
        for name, one in variants.items():
            network, inside = (wire_bytes(nodes_of(one, level), NODES) for level in ("network", "node"))
            planned = {
                level: RANKS_PER_NODE
                * sum(one[PLANNED].get(f"{level} {kind}", 0.0) for kind in ("weights", "gradients"))
                for level in ("network", "node")
            }
            # The validation after the first step leaves its secondary partition to the second step.
            saved = max(0.0, planned["network"] - network.counted)
            ratio = (network.counter + saved) / ideal
            target = SHARD_AXIS_TARGETS[micro_batches] if name == "all" else None
            row = {"micro-batches": micro_batches, "form": SHARD_AXIS.variants[name].title}
            row |= {"network, counter": megabytes(network.counter), "network, counted": megabytes(network.counted)}
            row |= {"network, planned": megabytes(planned["network"])}
            row |= {"counter / counted": f"{network.counter / network.counted:.3f}", "against dense": f"{ratio:.3f}"}
            row["target"] = f"{target:.2f}" if target else "-"
            row["holds"] = ("yes" if ratio <= target else "no") if target else "-"
            row |= {"node, counter": megabytes(inside.counter), "node, planned": megabytes(planned["node"])}
            rows.append(row | {"validation loss": f"{one['validation_loss']:.4f}"})
    return rows


def shard_axis_table(runs: Mapping[str, Any]) -> str:
    """Return table.md of the stored runs."""
    first = runs["1"]["dense"]
    return f"""# Bytes of ZeRO++ where the shard axis crosses nodes

MB (1e6 bytes) sent per step and node; {NODES} nodes of {RANKS_PER_NODE} ranks hold one replica of the embedded recipe
together, {first["interfaces"]["steps"]} steps after the first. "Counter" is what the interfaces themselves sent
(network namespaces as nodes, gloo over TCP, rates not limited), "counted" what the ranks count, all kinds of messages
together, "planned" the closed form of weights and gradients alone. "Against dense" is the counter against what FSDP2's
own collectives need round a ring over all ranks: gathers in BF16, gradients in FP32. The validation after the first
step leaves its secondary to the second one, which then counts less than planned: that is added to the counter. Made by

```
python -m scripts.benchmarks.bytes shard-axis
```

with `{" ".join(first["options"])}` and what the form takes:

{SHARD_AXIS.option_list()}

{markdown(shard_axis_rows(runs))}
"""


# ---------------------------------------------------------------------------------------------- closed form


def kernel_table(facts: Mapping[str, Any]) -> str:
    """Return bytes per parameter that the passes of a SCAPE step read and write if each input and output moves once."""
    rows = []
    for title, workload in {"llama-500m": "llama_500m", "llama-1.8b": "llama_1_8b"}.items():
        model = get_workload(workload).local(1)
        for options in (ScapeOptions(density=0.1), ScapeOptions(density=0.05, wire="int4"), ScapeOptions(density=0.01)):
            least = options.cost().pass_bytes(model, KERNEL_REPLICAS)
            sums = {name: least.get(name, 0.0) for name in PASSES}
            sums["pack + update + coding"] = sums["pack"] + sums["update"] + sums["coding"]
            sums["all"] = sum(least.values())
            row = {"model": title, "parameters": f"{model.entries:,}"}
            row["density, wire"] = f"{options.density:g}, {options.wire}"
            rows.append(row | {name: f"{nbytes / model.entries:.2f}" for name, nbytes in sums.items()})
    return f"""`python -m scripts.benchmarks.bytes kernels`: bytes a parameter that must move, FP32, blocks of 1024, \
{KERNEL_REPLICAS} replicas.
Fused AdamW moves 28, dense AdamS 20, both without a finite check.

{markdown(rows)}
"""


def emulated(benchmark: BytesBenchmark, table: Callable[[Mapping[str, Any]], str]) -> Benchmark:
    return Benchmark(
        benchmark.results,
        lambda args, _: {"runs": run_all(benchmark, args.steps, OUTPUTS / benchmark.results, args.timeout)},
        lambda facts: table(facts["runs"]),
        arguments={
            "--steps": dict(type=int, default=benchmark.steps, help="steps per run, at least 2"),
            "--timeout": dict(type=float, default=300.0, help="seconds after which a run is ended"),
        },
    )


BENCHMARKS = {
    "sharded": emulated(SHARDED, sharded_table),
    "shard-axis": emulated(SHARD_AXIS, shard_axis_table),
    "kernels": Benchmark("bench_kernels", lambda *_: {}, kernel_table, file="", page="bytes.md"),
}

if __name__ == "__main__":
    sys.exit(main("scripts.benchmarks.bytes", __doc__, BENCHMARKS))

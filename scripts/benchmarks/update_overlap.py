"""Exposed exchange of `quantized_update` with and without overlap on emulated nodes, beside dense Muon and `quantized`.

    python -m scripts.benchmarks.update_overlap --rate 4

Needs root and iproute2. Every node has one replica. All variants run in one process per node and alternate every few
steps, because the speed of a shared machine changes. Every layer waits in its forward pass and twice as long in its
backward pass, as a host does for a device, so that the nodes do not compete for cores; its own computation is small.

The exposed exchange of a variant is the median of its steps minus that of the same steps with collectives that send
nothing, without overlap: encoding, decoding and the optimizer belong to both. A step is that of its slowest rank, from
the start of its forward pass to that of the next one. The first of these steps is not counted, and not the last one,
because no forward pass follows that could hide the rest.
"""

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts.common import OUTPUTS, RESULTS, RunError, command_of, markdown, read, run_command, write
from scripts.emulated_cluster import Cluster
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.models.llama import Llama
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.titan.models import RoPEScalingArgs, TransformerModelArgs
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.in_process import DryRunCollectives
from torchtitan_scape.topology.layout import RankGroup, plan_layout
from torchtitan_scape.topology.machines import get_machine

MODULE = "scripts.benchmarks.update_overlap"
ENVIRONMENT = "UPDATE_OVERLAP"  # of the ranks: the settings as JSON
SIZES: dict[str, Any] = dict(dim=128, n_layers=8, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=64)
SEQUENCE = 16  # tokens per step and rank
UPDATE, OVERLAP = "quantized_update", ", overlap"
# By name: method, its options, overlap. Every RARELY-th round has the variants of `RARE`, whose steps are long.
SILENT = ("dense Muon", "quantized e2m1", UPDATE)  # also run without an exchange, by method
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "dense Muon": ("dense", {}, False),
    "quantized e2m1": ("quantized", {"code": "e2m1", "block": 128}, False),
    "quantized e2m1" + OVERLAP: ("quantized", {"code": "e2m1", "block": 128}, True),
    UPDATE: (UPDATE, {}, False),
    UPDATE + OVERLAP: (UPDATE, {}, True),
}
RARE, RARELY = "dense Muon", 4


class Wait(torch.autograd.Function):
    """The identity, which waits for so many seconds, and twice as long in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2.0 * context.seconds)
        return gradient, None


class Variant:
    """A model and its optimizer, with real or silent collectives between the replicas."""

    def __init__(self, name: str, silent: bool, wait: float) -> None:
        method, options, overlap = VARIANTS[name]
        world, rank = dist.get_world_size(), dist.get_rank()
        if silent:
            collectives: Any = DryRunCollectives(replicas=world)
            collectives.replica, collectives.levels = rank, (RankGroup("network", world, rank),)
        else:
            layout = plan_layout(world, ranks_per_node=1, machine=get_machine("local"), replicate=world, shard=1)
            collectives = ReplicaCollectives(build_groups(layout, timedelta(minutes=10)))
            collectives.broadcast_from_first = lambda tensors: None  # the seed is the same; the link is slow
        arguments = TransformerModelArgs(**SIZES, max_seq_len=SEQUENCE, rope_scaling_args=RoPEScalingArgs(1.0))
        torch.manual_seed(0)
        self.model = Llama(arguments)
        self.model.init_weights()
        for layer in self.model.layers.values():
            layer.register_forward_hook(lambda _, inputs, output: Wait.apply(output, wait))
        self.optimizer = ReplicaOptimizer(
            partial(Muon, lr=0.01),
            METHODS[method].options(**options),
            OneReplica(collectives),
            model=self.model,
            max_norm=1.0,
            overlap=overlap and not silent,
        )
        self._generator = torch.Generator().manual_seed(rank)
        self._shape = 1, SEQUENCE + 1

    def run_steps(self, steps: int) -> list[float]:
        """Take some steps, and return the seconds of all but the first and the last one."""
        dist.barrier()
        begin = [time.perf_counter()]
        for _ in range(steps):
            tokens = torch.randint(SIZES["vocab_size"], self._shape, generator=self._generator)
            self.optimizer.zero_grad()
            self.optimizer.prepare_last_backward()
            logits = self.model(tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            begin.append(time.perf_counter())
        self.optimizer.finish_previous_step()
        return [end - start for start, end in pairwise(begin)][1:-1]


def measure(settings: dict[str, Any]) -> None:
    """Run all variants on this rank. Rank 0 writes the times of all of them."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    kinds = [(name, False) for name in VARIANTS] + [(name, True) for name in SILENT]
    variants = {kind: Variant(*kind, settings["wait"]) for kind in sorted(kinds)}
    times: dict[str, list[float]] = {f"{name}|{silent}": [] for name, silent in variants}
    sent = {}
    for round_ in range(-1, settings["rounds"]):  # the first one is a warm-up
        for (name, silent), variant in variants.items():
            if name == RARE and round_ % RARELY:
                continue
            steps = 2 if round_ < 0 else 4 if name == RARE else settings["steps"]
            before = sum(variant.optimizer.collectives.ledger.sent.values())
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, variant.run_steps(steps))
            if not silent:
                sent[name] = (sum(variant.optimizer.collectives.ledger.sent.values()) - before) / steps
            if round_ >= 0:
                times[f"{name}|{silent}"] += [max(each) for each in zip(*found, strict=True)]
        if dist.get_rank() == 0 and round_ >= 0:
            skipped = max(variant.optimizer.guard.skipped for variant in variants.values())
            parameters = sum(p.numel() for p in variants[UPDATE, False].model.parameters())
            facts = {"times": times, "sent": sent, "parameters": parameters, "skipped": skipped}
            write(Path(settings["output"]), facts)
            print(f"round {round_}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def table(facts: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table. Raises RunError if steps were skipped."""
    if facts["skipped"]:
        raise RunError(f"{facts['skipped']} steps were skipped; the rest is no measurement")
    middle = {name: statistics.median(times) for name, times in facts["times"].items()}
    times = {name: (middle[f"{name}|False"], middle[f"{name.removesuffix(OVERLAP)}|True"]) for name in VARIANTS}
    exposed = {name: step - silent for name, (step, silent) in times.items()}
    return [
        {
            "variant": name,
            "steps": str(len(facts["times"][f"{name}|False"])),
            "step, ms": f"{1e3 * step:,.0f}",
            "without exchange, ms": f"{1e3 * silent:,.0f}",
            "exposed exchange, ms": f"{1e3 * exposed[name]:,.0f}",
            f"of {UPDATE}'s": f"{100 * exposed[name] / exposed[UPDATE]:.0f} %",
            "MB sent": f"{facts['sent'][name] / 1e6:.2f}",
        }
        for name, (step, silent) in times.items()
    ]


def run(args: Namespace) -> int:
    raw = OUTPUTS / "update_overlap" / "measured.json"
    if not args.report:
        raw.unlink(missing_ok=True)
        settings = {"rounds": args.rounds, "steps": args.steps, "wait": args.wait, "output": str(raw)}
        with Cluster(args.nodes, args.rate) as cluster:
            environment = {ENVIRONMENT: json.dumps(settings)}
            cluster.torchrun(["-m", MODULE], 1, raw.parent, args.timeout, environment)
    if (facts := read(raw)) is None:
        raise RunError(f"nothing was measured (log in {raw.parent})")
    text = [
        "# Overlap of quantized_update",
        f"`{command_of(MODULE)}`",
        f"A Llama with {facts['parameters'] / 1e6:.2f} M parameters in {SIZES['n_layers']} layers, {args.nodes} "
        f"emulated nodes of one replica on {os.cpu_count()} cores, {args.rate:g} Mbit/s. A layer waits "
        f"{1e3 * args.wait:g} ms in its forward pass and {2e3 * args.wait:g} ms in its backward pass. All variants "
        f"alternated every {args.steps} steps in one run. Medians; the exposed exchange is the step minus the same "
        "step with collectives that send nothing.",
        markdown(table(facts)),
    ]
    write(args.output, "\n\n".join(text) + "\n")
    print(text[-1])
    return 0


if __name__ == "__main__":
    if ENVIRONMENT in os.environ:
        measure(json.loads(os.environ[ENVIRONMENT]))
    else:
        options: dict[str, dict[str, Any]] = {
            "--nodes": dict(type=int, default=4),
            "--rate": dict(type=float, default=4.0, help="of a NIC, each way, in Mbit/s"),
            "--rounds": dict(type=int, default=2),
            "--steps": dict(type=int, default=6, help="of a variant before the next one; 4 of dense Muon"),
            "--wait": dict(type=float, default=0.08, help="seconds of a layer's forward pass"),
            "--timeout": dict(type=float, default=1500.0, help="seconds after which the run is ended"),
            "--output": dict(type=Path, default=RESULTS / "update_overlap" / "table.md"),
            "--report": dict(action="store_true", help="write the table of the last run again"),
        }
        sys.exit(run_command(__doc__, run, options))

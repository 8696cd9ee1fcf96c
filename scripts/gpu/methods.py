"""Every method on four ranks of one GPU: NCCL, overlap, [sharding], Muon and local updates.

Each rank appears to NCCL as a host of its own, as in scripts/gpu/ranks.py. Each case trains a small network for some
steps, the last one with a complete exchange. Afterwards the replicas' parameters must be equal bit for bit, and so must
the outputs of all ranks for one input, which shows gathered weights. A case with overlap must have the bits of the case
without it. On a GPU, `torch.cuda.set_sync_debug_mode` counts the operations in which the optimizer's step waits for the
device.
"""

import hashlib
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessException, spawn

from scripts.common import RunError, read, write
from scripts.faults.fault_runs import free_endpoint
from scripts.gpu.ranks import own_host, start
from scripts.gpu.timing import waits_of
from torchtitan_scape import AdamS
from torchtitan_scape.core.parameters import local
from torchtitan_scape.kernels.backends import choose_backend
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.replicate import replicate
from torchtitan_scape.sharding.build import build_sharding, groups_for
from torchtitan_scape.sharding.levels import build_levels, holder_of
from torchtitan_scape.sharding.options import LevelsOptions, ShardingOptions
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology.groups import ReplicaGroups, build_groups, build_level_groups
from torchtitan_scape.topology.layout import Layout, plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.traffic import TrafficLedger

RANKS = 4
LAYOUTS = {"2x2": (2, True), "flat": (1, False)}  # ranks per node; whether exchanges go level by level
TIMEOUT = timedelta(seconds=120)  # of a collective: a rank that waits says so before the limit of the step
STEPS, MICRO_BATCHES, WIDTH, LAYERS, BATCH = 6, 2, 96, 2, 8
WARM = 3  # steps in which kernels are compiled and buffers allocated
OPTIMIZERS: dict[str, Any] = {
    "AdamS": AdamS,
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "Muon": partial(Muon, fused=True),
}
# Options with which a method compresses from an early step on.
OPTIONS: dict[str, dict[str, Any]] = {
    "scape": {"density": 0.1, "density_warmup_steps": 2, "code": "int4"},
    "topk": {"density": 0.05, "start": 1},
    "tagc": {"density": 0.05},
    "powersgd": {"rank": 4, "start": 1},
    "radius": {"density": 0.25, "interval": 2, "start": 1},
    "onebit_adam": {"warmup_steps": 2},
    "diloco": {"inner_steps": 2},
    "streaming_diloco": {"inner_steps": 3, "delay": 1, "fragments": 2, "code": "float32"},
    "sparta": {"interval": 2, "warmup_steps": 1},
    "sparseloco": {"inner_steps": 2, "density": 0.1},
    "co2": {"inner_steps": 2},
    "noloco": {"inner_steps": 2},
}


@dataclass(frozen=True)
class Case:
    """A run of four ranks.

    Attributes:
        method, options: Section [sync].
        optimizer: Key of `OPTIMIZERS`.
        overlap: Exchange during the backward pass.
        shard: Ranks of FSDP2's shard axis.
        sharding: Section [sharding].
        levels: Three-level sharding: weights over `shard` ranks, gradients over a node, optimizer states over all.
    """

    method: str = "dense"
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamS"
    overlap: bool = False
    shard: int = 1
    sharding: dict[str, Any] = field(default_factory=dict)
    levels: bool = False

    def layout(self, per_node: int) -> Layout:
        """Return the layout of the ranks; with three levels, at least two ranks share a node."""
        per_node = RANKS if self.levels and per_node == 1 else per_node
        shard = per_node if self.levels else self.shard
        machine = get_machine("local")
        return plan_layout(RANKS, ranks_per_node=per_node, machine=machine, replicate=RANKS // shard, shard=shard)

    def may_wait(self) -> bool:
        """Return whether a step may wait for the device: local updates, Radius, TAGC after a full exchange."""
        waits = METHODS[self.method].options.per_replica_weights or self.method == "radius"
        return waits or "tagc" in self.sharding


INT8 = {"weights_code": "int8", "gradients_code": "int8"}
CASES: dict[str, Case] = {
    **{
        name: Case(name, OPTIONS.get(name, {}), "AdamS" if "AdamS" in entry.optimizers else entry.optimizers[0])
        for name, entry in METHODS.items()
    },
    "scape, FP32 in parts": Case("scape", {"density": 0.1, "density_warmup_steps": 2, "chunk_bytes": 4096}),
    "scape, gather": Case("scape", OPTIONS["scape"] | {"update": "sharded", "code": "float32"}),
    "scape, coded gather": Case("scape", OPTIONS["scape"] | {"update": "sharded", "code": "int8"}),
    **{f"{name}, overlap": Case(name, overlap=True) for name in METHODS if METHODS[name].supports_overlap},
    "quantized_update, Muon": Case("quantized_update", {"whiten_every": 2}, "Muon"),
    "quantized_update, Muon, sharded": Case("quantized_update", {"whiten_every": 2}, "Muon", shard=2),
    "sparta, Muon": Case("sparta", OPTIONS["sparta"], "Muon"),
    "Muon": Case(optimizer="Muon"),
    "Muon, sharded": Case(optimizer="Muon", shard=2),
    "scape, sharded": Case("scape", OPTIONS["scape"], shard=2),
    "diloco, sharded": Case("diloco", OPTIONS["diloco"], shard=2),
    "dense, sharded": Case(shard=2),
    "dense, sharded, overlap": Case(shard=2, overlap=True),
    "[sharding] int8": Case(shard=2, sharding=INT8),
    "[sharding] int8, int4": Case(shard=4, sharding=INT8 | {"gradients_code": "int4"}),
    "[sharding.levels] int8": Case(shard=2, levels=True, sharding=INT8),
    "[sharding] tagc": Case(
        shard=4, sharding={"gradients_code": "tagc", "tagc": TagcShardingOptions(min_entries=1024)}
    ),
}


class Net(nn.Module):
    """Residual blocks, in numbered layers as Muon and fragments need them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x)


# Cases with the same layout share their groups, because communicators need memory.
replica_groups = cache(partial(build_groups, timeout=TIMEOUT))


@cache
def shard_mesh(device: str, shard: int) -> DeviceMesh:
    """Return the mesh of FSDP2's shard axis. Collective."""
    return init_device_mesh(device, (RANKS // shard, shard), mesh_dim_names=("replicate", "shard"))["shard"]


def build(case: Case, layout: Layout, hierarchical: bool, device: torch.device) -> tuple[nn.Module, ReplicaOptimizer]:
    """Return the model and its optimizer. Collective."""
    torch.manual_seed(0)
    model, mesh = Net().to(device), shard_mesh(device.type, case.shard)
    if case.shard > 1:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    kernels = choose_backend("auto", device)
    replicas, optimized, levels, sharding = replica_groups(layout, hierarchical=hierarchical), model, None, None
    if case.levels:
        options = ShardingOptions(levels=LevelsOptions(case.shard, layout.shard), **case.sharding)
        level_groups = build_level_groups(layout, case.shard, TIMEOUT)
        levels = build_levels(
            model, options, layout, level_groups, TrafficLedger(), sums=True, bf16=False, kernels=kernels
        )
        # Gradients are summed over nodes by the levels.
        replicas, optimized = ReplicaGroups(None, level_groups.world, layout), holder_of(levels.parameters)
        sharding = levels.sharding
    elif case.sharding:
        options = ShardingOptions(**case.sharding)
        options.check(layout)
        sharding = build_sharding(
            model, options, groups_for(options, layout, TIMEOUT), TrafficLedger(), kernels=kernels
        )
    optimizer = replicate(
        optimized,
        partial(OPTIMIZERS[case.optimizer], lr=1e-2),
        {"method": case.method, **case.options},
        replicas,
        max_norm=0.5,
        reduction="sum",
        total_steps=STEPS,
        overlap=case.overlap,
    )
    if sharding is not None:
        optimizer.sharding = sharding
    if levels is not None:
        optimizer.attach_levels(levels)
    return model, optimizer


def digest(tensors: list[torch.Tensor]) -> str:
    parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(case: Case, layout: Layout, hierarchical: bool, device: torch.device) -> dict[str, Any]:
    """Return digests of the parameters and of an output, and how often the warm steps waited for the device."""
    model, optimizer = build(case, layout, hierarchical, device)
    generator, waits = torch.Generator().manual_seed(dist.get_rank()), list[str]()
    for step in range(1, STEPS + 1):
        if step == STEPS:
            optimizer.request_full_exchange()
        for number in range(MICRO_BATCHES):
            last = number + 1 == MICRO_BATCHES
            optimizer.sharding.before_micro_batch(number, last)
            if last:
                optimizer.prepare_last_backward()
            x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
            (model(x).square().mean() / (MICRO_BATCHES * RANKS)).backward()
        lines = waits_of(optimizer.step, device)
        waits += lines if step > WARM else []
        optimizer.zero_grad()
    optimizer.finish_previous_step()
    optimizer.check_consistency(STEPS)
    parameters = [local(p).detach() for p in model.parameters()]
    with torch.no_grad():
        output = model(torch.linspace(-1, 1, 4 * WIDTH, device=device).view(4, WIDTH))
    return {
        "parameters": digest(parameters),
        "output": digest([output]),
        "finite": all(bool(p.isfinite().all()) for p in (*parameters, output)),
        "waits": len(waits) if device.type == "cuda" else None,
        "where": sorted(set(waits)),
    }


def run_rank(rank: int, result: Path, port: str) -> None:
    """Run all cases on a rank; rank 0 writes the result."""
    os.environ |= own_host(rank) | {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = start(TIMEOUT)
    found: dict[str, Any] = {"error": "", "backend": dist.get_backend(), "ranks": RANKS, "cases": []}
    outputs: dict[tuple[str, str], str] = {}
    for (layout, (per_node, hierarchical)), (name, case) in product(LAYOUTS.items(), CASES.items()):
        begin = time.monotonic()
        own = train(case, case.layout(per_node), hierarchical, device)
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, own)
        equal = agree(every, case.shard)
        outputs[layout, name] = own["output"]
        if case.overlap:
            equal &= own["output"] == outputs[layout, name.removesuffix(", overlap")]
        row = {"layout": layout, "case": name, "equal": equal, "may wait": case.may_wait()}
        row |= {"waits": own["waits"], "where": own["where"], "seconds": round(time.monotonic() - begin, 2)}
        found["cases"].append(row)
        if rank == 0:
            write(result, found)
            print(f"{layout}, {name}: {verdict(row) or 'equal'}, {row['waits']} waits", flush=True)
    dist.destroy_process_group()


def agree(ranks: list[dict[str, Any]], shard: int) -> bool:
    """Return whether ranks with the same shard have the same parameters, and all ranks the same finite output."""
    parameters = all(one["parameters"] == ranks[number % shard]["parameters"] for number, one in enumerate(ranks))
    return parameters and all(one["output"] == ranks[0]["output"] and one["finite"] for one in ranks)


def verdict(row: dict[str, Any]) -> str:
    """Return why a case failed; "" if it did not."""
    if not row["equal"]:
        return "different bits"
    return "waits for the device" if row["waits"] and not row["may wait"] else ""


def run_all(result: Path, smoke: bool) -> None:
    """Run the cases on all ranks, of which a failed one ends the others. Raises RunError if one failed."""
    error = ""
    try:
        spawn(run_rank, (result, free_endpoint().partition(":")[2]), RANKS, daemon=True)
    except ProcessException as failure:
        print(failure, flush=True)
        error = str(failure).strip().splitlines()[-1]
    found = (read(result) or {"cases": []}) | {"error": error}
    write(result, found)
    wrong = [f"{row['layout']}, {row['case']}: {why}" for row in found["cases"] if (why := verdict(row))]
    if missing := len(LAYOUTS) * len(CASES) - len(found["cases"]):
        wrong.append(f"{missing} cases did not run")
    if failures := [text for text in (error, *wrong) if text]:
        raise RunError("; ".join(failures))

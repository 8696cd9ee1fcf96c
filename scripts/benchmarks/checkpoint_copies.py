"""Time of a checkpoint with a copy on the next node, and of its restoration after the loss of a node's folder.

    python -m scripts.benchmarks.checkpoint_copies --nodes 4 --rate 1000

Needs root and iproute2. Every emulated node has one rank and a folder in memory. The state has the sizes of AdamW with
exact residuals: 12 bytes per parameter that all ranks have, of which each writes a part, and 4 that only one has.
Saves to a shared folder and to the folders of the nodes alternate in one process per node, because the speed of a
shared machine changes. Then the folder of the second node is deleted, the checkpoint is restored, and every tensor is
compared with that of the shared folder. Times are those of the slowest rank. Writes copies.json and copies.md.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from scripts.benchmarks.checkpoint_cost import timed
from scripts.common import OUTPUTS, RESULTS, RunError, command_of, markdown, read, run_command, write
from scripts.emulated_cluster import Cluster
from torchtitan_scape.checkpoint.metadata import load_into
from torchtitan_scape.checkpoint.node_folders import NodeFolders
from torchtitan_scape.checkpoint.storage import CheckedWriter, first_damage, read_manifest

MODULE = "scripts.benchmarks.checkpoint_copies"
ENVIRONMENT = "CHECKPOINT_COPIES"  # of the ranks: the settings as JSON
LAYERS = 12


def state_of(rank: int, parameters: int) -> dict[str, torch.Tensor]:
    common = torch.Generator().manual_seed(0)
    entries = parameters // LAYERS
    state = {f"{kind}.{i}": torch.randn(entries, generator=common) for i in range(LAYERS) for kind in "pmv"}
    own = torch.Generator().manual_seed(1 + rank)
    return state | {f"residual.{rank}.{i}": torch.randn(entries, generator=own) for i in range(LAYERS)}


def measure(settings: dict[str, Any]) -> None:
    """Measure in the ranks of all nodes; rank 0 writes the facts."""
    dist.init_process_group("gloo")
    rank, root = dist.get_rank(), Path(settings["folder"])
    shared, own = root / "shared" / "step-1", root / f"node{rank}" / "step-1"
    state, nodes = state_of(rank, settings["parameters"]), NodeFolders(copies=1)

    def save_shared() -> None:
        dcp.save(state, storage_writer=CheckedWriter(shared), checkpoint_id=shared)

    def save_private() -> None:
        nodes.begin(own)
        dcp.save(state, storage_writer=CheckedWriter(own, shared=False), checkpoint_id=own)
        nodes.publish(own)

    times: dict[str, list[float]] = {"shared": [], "private": []}
    for _ in range(settings["rounds"] + 1):
        times["shared"].append(timed(save_shared))
        times["private"].append(timed(save_private))
    sizes = {one.name: one.size for one in read_manifest(own)}
    held = {name for name in sizes if (own / name).exists()}
    facts: dict[str, Any] = {
        "bytes": sum(sizes.values()),
        "bytes on a node": sum(sizes[name] for name in held),
        "save, s": {name: statistics.median(column[1:]) for name, column in times.items()},
        "verify, shared, s": timed(first_damage, str(shared)),
    }
    if rank == 1:
        shutil.rmtree(own.parent)
        held = set()
    lacking = torch.tensor(sum(size for name, size in sizes.items() if name not in held))
    dist.all_reduce(lacking)
    reasons: list[str | None] = []

    def restore() -> None:
        nodes.exchange_manifests(own.parent)
        reasons.append(nodes.restore(own))

    facts |= {"restore, s": timed(restore), "bytes received": int(lacking), "reason": reasons[0]}
    found = [{name: torch.zeros_like(tensor) for name, tensor in state.items()} for _ in range(2)]
    for path, target in zip((shared, own), found, strict=True):
        load_into(str(path), target)
    equal = torch.tensor(all(torch.equal(found[0][name], found[1][name]) for name in state))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    if rank == 0:
        write(Path(settings["output"]), facts | {"equal": bool(equal)})
    dist.barrier()
    dist.destroy_process_group()


def run(args: Namespace) -> int:
    raw = OUTPUTS / "checkpoint_copies" / "measured.json"
    raw.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint_copies_", dir=args.folder) as folder:
        settings = {"folder": folder, "parameters": args.parameters, "rounds": args.rounds, "output": str(raw)}
        with Cluster(args.nodes, args.rate or None) as cluster:
            cluster.torchrun(["-m", MODULE], 1, raw.parent, args.timeout, {ENVIRONMENT: json.dumps(settings)})
    facts = read(raw)
    if facts is None or not facts["equal"] or facts["reason"]:
        raise RunError(f"the restored checkpoint is not that of the shared folder: {facts} (log in {raw.parent})")
    save = facts["save, s"]
    row = {
        "nodes": args.nodes,
        "MB": f"{facts['bytes'] / 1e6:.1f}",
        "MB on a node": f"{facts['bytes on a node'] / 1e6:.1f}",
        "save, shared folder, s": f"{save['shared']:.2f}",
        "save with a copy, s": f"{save['private']:.2f}",
        "ratio": f"{save['private'] / save['shared']:.2f}",
        "verify, shared folder, s": f"{facts['verify, shared, s']:.2f}",
        "restore, s": f"{facts['restore, s']:.2f}",
        "MB received by all nodes": f"{facts['bytes received'] / 1e6:.1f}",
    }
    text = (
        f"# Copies of checkpoints on other nodes\n\n`{command_of(MODULE)}`\n\n{args.nodes} emulated nodes of one rank "
        f"on {len(os.sched_getaffinity(0))} core(s), links of {args.rate:g} Mbit/s, {args.parameters:,} parameters, "
        f"folders in {args.folder}. Medians of {args.rounds} saves; one restoration, after the second node's folder "
        f"was deleted, whose tensors are equal to the shared folder's in every bit.\n\n{markdown([row])}\n"
    )
    write(args.output / "copies.json", facts)
    write(args.output / "copies.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    if ENVIRONMENT in os.environ:
        measure(json.loads(os.environ[ENVIRONMENT]))
    else:
        options: dict[str, dict[str, Any]] = {
            "--nodes": dict(type=int, default=4),
            "--rate": dict(type=float, default=1000.0, help="of a NIC, each way, in Mbit/s; 0: not limited"),
            "--parameters": dict(type=int, default=6_000_000),
            "--rounds": dict(type=int, default=5),
            "--folder": dict(type=Path, default=Path("/dev/shm")),
            "--timeout": dict(type=float, default=1500.0, help="seconds after which the run is ended"),
            "--output": dict(type=Path, default=RESULTS / "checkpoint_cost"),
        }
        sys.exit(run_command(__doc__, run, options))

"""Cost of checkpoints in folders of single nodes, and a start after a node and its folder were lost.

    python -m scripts.faults.private_folders --nodes 3 --rate 1000

Needs root and iproute2. Every node of an emulated cluster has one rank and its own memory file system as dump folder
(scripts/emulated_cluster.py; a mount namespace per node). A run saves with `checkpoint.copies = 1` until a node is
killed, whose folder is deleted; the same command then continues with an empty node in its place. The same is done with
a folder in memory that all nodes share, and the last checkpoints of both are compared bit by bit. Times are those of
rank 0's log. Writes private_folders.json and private_folders.md.
"""

import argparse
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, RunError, command_of, markdown, run_command, write
from scripts.emulated_cluster import Cluster
from scripts.faults.fault_runs import COMMON, Launch, PrivateFolders, differences, kill_node
from torchtitan_scape.checkpoint.storage import is_finished

INTERVAL, LOST_AT, STEPS = 3, 9, 15
ARGUMENTS = [
    *COMMON,
    *("--training.local_batch_size=1", "--training.seq_len=64", f"--training.steps={STEPS}"),
    *("--lr_scheduler.warmup_steps=2", "--optimizer.lr=2e-4", "--sync.scape.density_warmup_steps=3"),
    *(f"--checkpoint.interval={INTERVAL}", "--checkpoint.keep_latest_k=0"),
]
SAVED = re.compile(r"Finished saving the checkpoint.*?in ([\d.]+) seconds")
COPIED = re.compile(r"Copied \S+ to .*? in ([\d.]+) s")
RECEIVED = re.compile(r"nodes received ([\d,]+) bytes from other nodes in ([\d.]+) s")
RESUMED = re.compile(r"Resumed from \S+step-(\d+) in ([\d.]+) s")
LIMIT_SECONDS = 600.0


def lose_a_node(name: str, cluster: Cluster, scratch: Path, arguments: list[str], private: bool) -> dict[str, Any]:
    """Train, lose the second node with its folder, start again, and return times and the last checkpoint."""
    folder = scratch / name
    folder.mkdir()
    folders = PrivateFolders(folder, scratch / f"{name}-nodes", cluster.start)
    start = folders.start if private else cluster.start
    where = [folders.of(node) if private else folder for node in range(cluster.nodes)]
    with Launch(arguments, folder, cluster.nodes, 1, {}, start) as first:
        lost = [path / f"checkpoint/step-{LOST_AT}" for path in where]
        first.wait_until(lambda: all(map(is_finished, lost)), LIMIT_SECONDS, f"step {LOST_AT}", every=0.01)
        kill_node(first, 1)
        first.wait(LIMIT_SECONDS)
        before = first.output()
    if private:
        shutil.rmtree(where[1])
    begin = time.monotonic()
    with Launch(arguments, folder, cluster.nodes, 1, {}, start) as second:
        if (codes := second.wait(LIMIT_SECONDS)) != [0] * cluster.nodes:
            raise RunError(f"the second start ended with {codes}:\n{second.output()[-3000:]}")
        whole, after = time.monotonic() - begin, second._outputs()[0]
    step, seconds = RESUMED.findall(after)[0]
    if int(step) != LOST_AT:
        raise RunError(f"training continued from step {step}, not {LOST_AT}")
    received = RECEIVED.findall(after) or [("0", "0")]
    last = folders.merge(STEPS, cluster.nodes, scratch / "merged") if private else folder / f"checkpoint/step-{STEPS}"
    saves = [float(seconds) for seconds in SAVED.findall(before.split("Training starts")[1])]
    copies = [float(seconds) for seconds in COPIED.findall(before)]
    return {
        "checkpoint": last,
        "MB": sum(path.stat().st_size for path in last.iterdir()) / 1e6,
        "save, s": statistics.median(saves),
        "copies, s": statistics.median(copies) if copies else 0.0,
        "MB received at the start": int(received[0][0].replace(",", "")) / 1e6,
        "verify and receive, s": float(received[0][1]),
        "load, s": float(seconds),
        "second run, s": whole,
    }


def run(args: argparse.Namespace) -> int:
    if args.nodes < 2:
        raise ValueError(f"--nodes is {args.nodes}; it must be 2 or more")
    scratch = Path(tempfile.mkdtemp(prefix="scape-private-", dir="/dev/shm"))
    arguments, results = [*ARGUMENTS, *args.trainer], dict[str, Any]()
    try:
        with Cluster(args.nodes, args.rate) as cluster:
            for name, more in (("shared", []), ("private", ["--checkpoint.copies=1"])):
                results[name] = lose_a_node(name, cluster, scratch, [*arguments, *more], bool(more))
                print(name, results[name], flush=True)
        different = differences(results["shared"].pop("checkpoint"), results["private"].pop("checkpoint"), scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    command = command_of("scripts.faults.private_folders")
    facts = {
        "command": command,
        "nodes": args.nodes,
        "rate, Mbit/s": args.rate,
        "lost at": LOST_AT,
        "different tensors": different,
    }
    write(args.output / "private_folders.json", facts | {"folders": results})
    write(args.output / "private_folders.md", table(facts | {"folders": results}))
    return 1 if different else 0


def table(facts: dict[str, Any]) -> str:
    """Return the text of private_folders.md."""
    rows = [
        {"folder": name, **{key: f"{value:.2f}" for key, value in row.items()}}
        for name, row in facts["folders"].items()
    ]
    different = facts["different tensors"]
    equal = "equal in every bit" if not different else f"different in {len(different)} tensors"
    return (
        f"# Folders of single nodes\n\n`{facts['command']}`\n\n{facts['nodes']} nodes of one rank, links of "
        f"{facts['rate, Mbit/s']:g} Mbit/s, folders in memory. The second node and its folder were lost after step "
        f"{facts['lost at']}. The checkpoints of step {STEPS} after the second start are {equal}. Times of a save and "
        "of copies are medians of the first run; the second run includes the start of Python.\n\n"
        f"{markdown(rows)}\n"
    )


if __name__ == "__main__":
    options = {
        "--nodes": dict(type=int, default=3),
        "--rate": dict(type=float, default=1000.0, help="of a NIC, each way, in Mbit/s"),
        "--output": dict(type=Path, default=RESULTS / "faults"),
        "trainer": dict(nargs="*", help="-- and further arguments of the trainer"),
    }
    sys.exit(run_command(__doc__, run, options))

"""What a checkpoint costs: bytes, and the time until training goes on, by method, replicas and file system.

    python -m scripts.benchmarks.checkpoint_cost tmpfs=/dev/shm disk=/var/tmp [options of the trainer]

Every cell is the trainer in real processes on a CPU, a few steps of the embedded recipe and then saves, each to a new
folder: median of --repeats, the slowest rank's time. "asynchronous" is the time until training goes on, and then that
until the checkpoint is whole. "plain write" is one process that writes the same bytes to one file in the same folder,
in turn with the saves, and waits for the disk as they do. Ratios are to dense AdamW with as many replicas, in the same
invocation. Below: dense AdamW's state by this project's writer, by it without checksums, and by PyTorch's.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from scripts.common import RESULTS, command_of, guarded, markdown, megabytes, parser, torchrun, write

METHODS = {
    "adamw": ("dense AdamW", ["--sync.method=dense", "--optimizer.name=AdamW"]),
    "adams": ("dense AdamS", ["--sync.method=dense"]),
    "replicated-exact": ("SCAPE replicated, residual exact", ["--checkpoint.residual=exact"]),
    "replicated-mean": ("SCAPE replicated, residual mean", ["--checkpoint.residual=mean"]),
    "replicated-drop": ("SCAPE replicated, residual drop", ["--checkpoint.residual=drop"]),
    "sharded": ("SCAPE sharded, residual exact", ["--sync.scape.update=sharded"]),
}
WRITERS = ("checked", "without checksums", "PyTorch's")
OPTIONS = """
    --job.config_file=train_configs/embedded.toml --training.local_batch_size=1 --training.seq_len=64 --training.steps=3
    --validation.no-enable --metrics.no-enable-tensorboard --sync.scape.density_warmup_steps=0 --checkpoint.enable
    --checkpoint.interval=1000 --checkpoint.no-last-save-model-only
"""
Cell = dict[str, Any]


def timed(function: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def plain_write(folder: Path, nbytes: int) -> float:
    """Seconds that one process takes for as many bytes in one file, the disk's answer included."""
    path, chunk = folder / "plain", os.urandom(4 << 20)
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as stream:
        for start in range(0, nbytes, len(chunk)):
            stream.write(chunk[: nbytes - start])
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def whole(manager: Any) -> None:
    """Waits until an asynchronous save is whole."""
    if (future := getattr(manager, "save_future", None)) is not None:
        future.result()


def saves(trainer: Any, repeats: int) -> Cell:
    """Medians of `repeats` saves through the trainer's own checkpointer, after one that does not count."""
    manager, times, plain, nbytes = trainer.checkpointer, [], [], 0
    for i in range(repeats + 1):
        step = 1000 * (i + 1)
        path = Path(manager.folder, f"step-{step}")
        goes_on = timed(lambda step=step: (manager.save(step), manager.maybe_wait_for_staging()))  # type: ignore[misc]
        times.append((goes_on, goes_on + timed(lambda: whole(manager))))
        if dist.get_rank() == 0:
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)
            plain.append(plain_write(path.parent, nbytes))
    goes_on, complete = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"bytes": nbytes, "goes_on": goes_on, "whole": complete, "plain": statistics.median(plain[1:] or [0.0])}


def writers(trainer: Any, repeats: int) -> dict[str, float]:
    """Seconds of a synchronous save by writer, in turn."""
    from torchtitan_scape.checkpoint import storage

    manager = trainer.checkpointer
    state = {name: one.state_dict() for name, one in manager.states.items()}
    path = Path(manager.folder, "writer")
    times: dict[str, list[float]] = {name: [] for name in WRITERS}
    for _ in range(repeats + 1):
        for name in WRITERS:
            writer = (dcp.FileSystemWriter if name == "PyTorch's" else storage.CheckedWriter)(path)
            with patch.object(storage.zlib, "crc32", (lambda *_: 0) if name == "without checksums" else zlib.crc32):
                times[name].append(timed(lambda writer=writer: dcp.save(state, storage_writer=writer)))  # type: ignore[misc]
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    return {name: statistics.median(column[1:]) for name, column in times.items()}


def rank(wanted: Cell) -> None:
    """Measures all methods in this group of processes; rank 0 writes the cells."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    cells: dict[str, Cell] = {}
    for name in wanted["methods"]:
        for mode in ("disabled", "async"):
            where = [f"--job.dump_folder={wanted['folder']}/{name}-{mode}", f"--checkpoint.async_mode={mode}"]
            trainer = ScapeTrainer(parse([*OPTIONS.split(), *where, *METHODS[name][1], *wanted["rest"]]))
            with patch("time.sleep"), patch.object(trainer.checkpointer, "save"):
                trainer.train()
            cells.setdefault(name, {})[mode] = saves(trainer, wanted["repeats"])
            if (name, mode) == ("adamw", "disabled"):
                cells[name]["writers"] = writers(trainer, wanted["repeats"])
            trainer.close()
    if os.environ["RANK"] == "0":
        Path(wanted["folder"], "cells.json").write_text(json.dumps(cells))


def measure(folder: Path, replicas: int, args: argparse.Namespace, rest: list[str]) -> dict[str, Cell]:
    work = Path(tempfile.mkdtemp(prefix="checkpoint_cost_", dir=folder))
    wanted = {"folder": str(work), "methods": args.methods, "repeats": args.repeats, "rest": rest}
    environment = {"CHECKPOINT_COST": json.dumps(wanted), "CUDA_VISIBLE_DEVICES": ""}
    try:
        torchrun(replicas, ["-m", "scripts.benchmarks.checkpoint_cost"], work / "log", **environment)
        return dict(json.loads((work / "cells.json").read_text()))
    finally:
        shutil.rmtree(work)


def tables(cells: dict[str, dict[str, Cell]]) -> str:
    """Of one file system; `cells` by replicas and method."""
    rows, by_writer = [], []
    for replicas, methods in cells.items():
        dense = methods["adamw"]
        for name, cell in methods.items():
            now, later = cell["disabled"], cell["async"]
            row = {"replicas": replicas, "method": METHODS[name][0], "MB": megabytes(now["bytes"])}
            row["MB, ratio"] = f"{now['bytes'] / dense['disabled']['bytes']:.2f}"
            for title, mode in (("synchronous", "disabled"), ("asynchronous", "async")):
                row[f"{title}, ms"] = f"{1e3 * cell[mode]['goes_on']:.1f}"
                row[f"{title}, ratio"] = f"{cell[mode]['goes_on'] / dense[mode]['goes_on']:.2f}"
            row["until whole, ms"] = f"{1e3 * later['whole']:.1f}"
            row["plain write, ms"] = f"{1e3 * now['plain']:.1f}"
            row["synchronous / plain write"] = f"{now['goes_on'] / now['plain']:.2f}"
            rows.append(row)
        seconds = dense["writers"]
        row = {"replicas": replicas} | {f"{name}, ms": f"{1e3 * seconds[name]:.1f}" for name in WRITERS}
        by_writer.append(row | {f"checked / {n}": f"{seconds['checked'] / seconds[n]:.3f}" for n in WRITERS[1:]})
    return f"{markdown(rows)}\n\n{markdown(by_writer)}"


def run(args: argparse.Namespace, rest: list[str]) -> None:
    methods = ["adamw", *(name for name in args.methods if name != "adamw")]  # what the others are a ratio of
    args.methods = methods
    cells: dict[str, dict[str, dict[str, Cell]]] = {}
    for name, _, folder in (item.partition("=") for item in args.folders):
        if not os.path.isdir(folder):
            raise ValueError(f"{name}={folder} names no folder; give NAME=FOLDER")
        for replicas in args.replicas:
            print(f"{name}: {replicas} replicas ...", flush=True)
            cells.setdefault(name, {})[str(replicas)] = measure(Path(folder), replicas, args, rest)
    command = command_of("scripts.benchmarks.checkpoint_cost")
    text = "".join(f"\n## {name}\n\n{tables(one)}\n" for name, one in cells.items())
    write(args.output / "cells.json", {"command": command, "cells": cells})
    write(args.output / "table.md", f"# What a checkpoint costs\n\n`{command}`\n{text}")
    print(text)


def main() -> int:
    if "CHECKPOINT_COST" in os.environ:
        rank(json.loads(os.environ["CHECKPOINT_COST"]))
        return 0
    own = parser(__doc__)
    own.add_argument("folders", nargs="+", metavar="NAME=FOLDER", help="file systems to save to")
    own.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    own.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    own.add_argument("--repeats", type=int, default=5)
    own.add_argument("--output", type=Path, default=RESULTS / "checkpoint_cost", help="cells.json, table.md")
    args, rest = own.parse_known_args()
    return guarded(lambda: run(args, rest))


if __name__ == "__main__":
    sys.exit(main())

"""Bytes and time of a checkpoint by method, replicas and file system.

    python -m scripts.benchmarks.checkpoint_cost tmpfs=/dev/shm disk=/var/tmp [options of the trainer]

The trainer takes a few steps of the embedded recipe in CPU processes and saves --repeats times, each time to a new
folder. Times are medians of the slowest rank. "asynchronous" is the time until training continues; "until whole" ends
when the checkpoint is complete. "plain write" is one process that writes and syncs the same bytes to one file in the
same folder, alternating with the saves. Ratios are to dense AdamW with the same number of replicas. The last table
compares this project's writer with and without checksums and PyTorch's, on dense AdamW.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from scripts.benchmarks.harness import QUIET, Benchmark, main, measure_in_ranks, seconds_of, train
from scripts.common import EMBEDDED, markdown, megabytes, ms
from torchtitan_scape.core.patching import replaced

MODULE = "scripts.benchmarks.checkpoint_cost"
METHODS = {
    "adamw": ("dense AdamW", ["--sync.method=dense", "--optimizer.name=AdamW"]),
    "adams": ("dense AdamS", ["--sync.method=dense"]),
    "replicated-exact": ("SCAPE replicated, residual exact", ["--checkpoint.residual=exact"]),
    "replicated-mean": ("SCAPE replicated, residual mean", ["--checkpoint.residual=mean"]),
    "replicated-drop": ("SCAPE replicated, residual drop", ["--checkpoint.residual=drop"]),
    "sharded": ("SCAPE sharded, residual exact", ["--sync.scape.update=sharded"]),
}
REPLICAS = (1, 2, 4)
WRITERS = ("checked", "without checksums", "PyTorch's")
OPTIONS = f"""
    --job.config_file={EMBEDDED} --training.local_batch_size=1 --training.seq_len=64 --training.steps=3
    --sync.scape.density_warmup_steps=0 --checkpoint.enable --checkpoint.interval=1000
    --checkpoint.no-last-save-model-only
"""


def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Return the seconds of the slowest rank for a call."""
    dist.barrier()
    seconds = torch.tensor(seconds_of(function, *arguments, **options))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def plain_write(folder: Path, nbytes: int) -> float:
    """Return the seconds of one process that writes as many bytes to one file and syncs it to disk."""
    path, chunk = folder / "plain", os.urandom(4 << 20)

    def write() -> None:
        with open(path, "wb", buffering=0) as stream:
            for start in range(0, nbytes, len(chunk)):
                stream.write(chunk[: nbytes - start])
            os.fsync(stream.fileno())

    seconds = seconds_of(write)
    path.unlink()
    return seconds


def time_saves(trainer: Any, repeats: int) -> dict[str, Any]:
    """Return medians of `repeats` saves by the trainer's checkpoint manager, after a warm-up save."""
    manager, times, plain, nbytes = trainer.checkpointer, [], [], 0

    def save(step: int) -> None:
        manager.save(step)
        manager.maybe_wait_for_staging()

    def finish() -> None:
        if (future := getattr(manager, "save_future", None)) is not None:
            future.result()

    for step in range(1000, 1000 * (repeats + 2), 1000):
        path = Path(manager.folder, f"step-{step}")
        goes_on = timed(save, step)
        times.append((goes_on, goes_on + timed(finish)))
        if dist.get_rank() == 0:
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            shutil.rmtree(path)
            plain.append(plain_write(path.parent, nbytes))
    goes_on, whole = map(statistics.median, zip(*times[1:], strict=True))
    return {"bytes": nbytes, "goes_on": goes_on, "whole": whole, "plain": statistics.median(plain[1:] or [0.0])}


def time_writers(trainer: Any, repeats: int) -> dict[str, float]:
    """Return the seconds of a synchronous save by writer; the writers alternate."""
    from torchtitan_scape.checkpoint import storage

    state = {name: one.state_dict() for name, one in trainer.checkpointer.states.items()}
    path = Path(trainer.checkpointer.folder, "writer")
    times: dict[str, list[float]] = {name: [] for name in WRITERS}
    for name in (repeats + 1) * WRITERS:
        writer = (dcp.FileSystemWriter if name == "PyTorch's" else storage.CheckedWriter)(path)
        crc32 = (lambda *_: 0) if name == "without checksums" else storage.zlib.crc32
        with replaced(storage.zlib, "crc32", crc32):
            times[name].append(timed(dcp.save, state, storage_writer=writer))
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    return {name: statistics.median(column[1:]) for name, column in times.items()}


def measure_rank(request: dict[str, Any]) -> dict[str, Any]:
    """Measure all methods in this group of processes; return the cells by method."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    cells: dict[str, Any] = {}
    for name in METHODS:  # ratios are to the first
        for mode in ("disabled", "async"):
            where = [f"--job.dump_folder={request['folder']}/{name}-{mode}", f"--checkpoint.async_mode={mode}"]
            trainer = ScapeTrainer(parse([*OPTIONS.split(), *QUIET, *where, *METHODS[name][1], *request["rest"]]))
            with replaced(trainer.checkpointer, "save", lambda *_, **__: None):
                train(trainer)
            cells.setdefault(name, {})[mode] = time_saves(trainer, request["repeats"])
            if (name, mode) == ("adamw", "disabled"):
                cells[name]["writers"] = time_writers(trainer, request["repeats"])
            trainer.close()
    return cells


def measure(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    request = {"repeats": args.repeats, "rest": rest}
    for name, _, folder in (item.partition("=") for item in args.folders):
        if not os.path.isdir(folder):
            raise ValueError(f"{name}={folder} names no folder; give NAME=FOLDER")
        for replicas in REPLICAS:
            print(f"{name}: {replicas} replicas ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="checkpoint_cost_", dir=folder) as work:
                cells.setdefault(name, {})[str(replicas)] = measure_in_ranks(MODULE, replicas, work, request)
    return {"cells": cells}


def tables(cells: dict[str, dict[str, Any]]) -> str:
    """Return the tables of one file system; `cells` by replicas and method."""
    rows, by_writer = [], []
    for replicas, methods in cells.items():
        dense = methods["adamw"]
        for name, cell in methods.items():
            now, later = cell["disabled"], cell["async"]
            row = {"replicas": replicas, "method": METHODS[name][0], "MB": megabytes(now["bytes"])}
            row["MB, ratio"] = f"{now['bytes'] / dense['disabled']['bytes']:.2f}"
            for title, mode in (("synchronous", "disabled"), ("asynchronous", "async")):
                row[f"{title}, ms"] = ms(cell[mode]["goes_on"])
                row[f"{title}, ratio"] = f"{cell[mode]['goes_on'] / dense[mode]['goes_on']:.2f}"
            row |= {"until whole, ms": ms(later["whole"]), "plain write, ms": ms(now["plain"])}
            rows.append(row | {"synchronous / plain write": f"{now['goes_on'] / now['plain']:.2f}"})
        seconds = dense["writers"]
        row = {"replicas": replicas} | {f"{name}, ms": ms(seconds[name]) for name in WRITERS}
        by_writer.append(row | {f"checked / {n}": f"{seconds['checked'] / seconds[n]:.3f}" for n in WRITERS[1:]})
    return f"{markdown(rows)}\n\n{markdown(by_writer)}"


def table(facts: dict[str, Any]) -> str:
    text = "".join(f"\n### {name}\n\n{tables(cells)}\n" for name, cells in facts["cells"].items())
    return f"## What a checkpoint costs\n\n`{facts['command']}`\n{text}"


BENCHMARK = Benchmark(
    measure,
    table,
    takes_trainer_options=True,
    arguments={
        "folders": dict(nargs="*", metavar="NAME=FOLDER", help="file systems to save to"),
        "--repeats": dict(type=int, default=5),
    },
)

if __name__ == "__main__":
    sys.exit(main(MODULE, __doc__, {"all": BENCHMARK}, measure_rank))

"""Toy checkpoints of every method in format 1, and the losses and gradient norms of the steps after them.

    python -m tests.checkpoint.format1 FOLDER    # writes FOLDER/format1.tar.xz

The archive beside this file was written by commit bc06ed0, the last one that wrote this format: copy this file into a
worktree of that commit and run it there. The archive contains of every case the checkpoint of step SAVED_AT, written
with the case's arguments, and `expected.json` with the figures of the steps SAVED_AT + 1 to END of a run that resumed
from it, also by that commit.
"""

import dataclasses
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.training import LAYOUTS, METHODS, RECIPE

SAVED_AT, END = 4, 7
Figures = dict[str, list[float]]  # "losses" and "norms" of the steps taken

_COMMON = [
    *("--training.steps=20", "--training.seq_len=32", "--training.local_batch_size=1"),
    *("--validation.no-enable", "--metrics.no-enable-tensorboard"),
    *("--checkpoint.enable", "--checkpoint.no-last-save-model-only"),
]
_TAGC = ["--sync.method=tagc", "--sync.tagc.density=0.1", "--optimizer.name=AdamW"]
# At commit bc06ed0 the first key was sharding.gradients.
_SHARD_TAGC = ["--sharding.gradients_code=tagc", "--sharding.tagc.min_entries=1", "--sharding.tagc.sparsity=0.8"]
_MEAN = "--checkpoint.residual=mean"


def _simulated(replicas: int) -> list[str]:
    degrees = [f"--parallelism.data_parallel_{axis}_degree=1" for axis in ("replicate", "shard")]
    return [*degrees, f"--topology.simulate_replicas={replicas}"]


_SIMULATED = {
    **{name: METHODS[name] for name in ("topk", "demo", "radius", "quantized")},
    "powersgd": [*METHODS["powersgd"], "--sync.powersgd.rank=2"],  # smaller than the matrices of this model
    **{name: METHODS[name] for name in ("diloco", "streaming", "sparseloco", "sparta", "scape", "scape-int4")},
    "tagc": _TAGC,
}
_SPARTA_6 = [*METHODS["sparta"], "--sync.sparta.code=1bit", *_simulated(6)]  # the default of format 1
# By name: arguments of runs of one rank with simulated replicas, and of two ranks.
ONE_RANK = {
    **{name: [*METHODS[name], *_simulated(2)] for name in ("adamw", "adams", "muon", "diloco-muon")},
    **{name: [*METHODS[name], *_simulated(2)] for name in ("scape-tensor", "radius-adams")},
    **{name: [*arguments, *_simulated(2)] for name, arguments in _SIMULATED.items()},
    **{f"{name}-mean": [*arguments, *_simulated(2), _MEAN] for name, arguments in _SIMULATED.items()},
    "sparta-6": _SPARTA_6,  # the owner of a slice keeps its error
    "sparta-6-mean": [*_SPARTA_6, _MEAN],
}
TWO_RANKS = {
    **{name: [*METHODS[name], *LAYOUTS["1x2"]] for name in ("scape-gather", "scape-offload")},
    "scape-2x1": [*METHODS["scape"], *LAYOUTS["2x1"]],
    "scape-2x1-mean": [*METHODS["scape"], *LAYOUTS["2x1"], _MEAN],
    "shard-tagc": [*METHODS["adamw"], *LAYOUTS["2x1"], *_SHARD_TAGC],
    "shard-tagc-mean": [*METHODS["adamw"], *LAYOUTS["2x1"], *_SHARD_TAGC, _MEAN],
}


def train(folder: str, arguments: list[str], interval: int) -> Figures:
    """Train to step END, from the folder's checkpoint if there is one. `interval`: steps between checkpoints."""
    flavors: Any
    try:
        from torchtitan_scape.config.parsing import parse
        from torchtitan_scape.models.registry import MODEL_FAMILIES
        from torchtitan_scape.trainer.trainer import ScapeTrainer

        flavors = MODEL_FAMILIES["llama3"].flavors
    except ImportError:  # at commit bc06ed0, which wrote the archive
        from torchtitan_scape.models.llama import LLAMA_ARGS as flavors
        from torchtitan_scape.train import ScapeTrainer, parse

    flavors["study"] = dataclasses.replace(flavors["study"], dim=8, n_layers=1, multiple_of=16)
    options = [*RECIPE, f"--job.dump_folder={folder}", *_COMMON, f"--checkpoint.interval={interval}", *arguments]
    trainer = ScapeTrainer(parse(options))
    trainer.should_continue_training = lambda: trainer.step < END  # type: ignore[method-assign]
    losses: list[float] = []
    norms: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, max_loss: float, norm: float, *more: Any, **named: Any) -> None:
        losses.append(float(loss))
        norms.append(float(norm))
        log(step, loss, max_loss, norm, *more, **named)

    with patch.object(trainer.metrics_processor, "log", record), patch("time.sleep"):
        trainer.train()
    trainer.close()
    return {"losses": losses, "norms": norms}


def train_all(folder: str, cases: dict[str, list[str]], interval: int = 1000) -> dict[str, Figures]:
    """Train every case in this rank, each in the folder of its name."""
    return {name: train(f"{folder}/{name}", arguments, interval) for name, arguments in cases.items()}


def write(output: Path) -> None:
    """Write the archive."""
    from tests.checkpoint import format1
    from tests.pool import Pool

    def run(folder: Path, *interval: int) -> dict[str, Figures]:
        found: dict[str, Figures] = {}
        for ranks, cases in ((1, ONE_RANK), (2, TWO_RANKS)):
            found |= Pool(ranks)(format1.train_all, str(folder), cases, *interval, timeout=600)[0]
        return found

    work = output / "format1"
    whole = run(work, SAVED_AT)
    for folder in work.iterdir():
        kept = folder / "checkpoint" / f"step-{SAVED_AT}"
        for path in [*folder.iterdir(), *(folder / "checkpoint").iterdir()]:
            if path not in (kept, kept.parent):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed = run(Path(shutil.copytree(work, output / "resumed")))
    for name, figures in resumed.items():
        exact = all(figures[key] == whole[name][key][SAVED_AT:] for key in figures)
        print(f"{name}: {'the run that was not interrupted' if exact else 'another run'}")
        assert exact or name.endswith("-mean"), name
        assert len(figures["losses"]) == END - SAVED_AT, name
    (work / "expected.json").write_text(json.dumps(resumed, indent=1) + "\n")
    with tarfile.open(output / "format1.tar.xz", "w:xz", preset=9) as archive:
        archive.add(work, "format1", filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    write(Path(sys.argv[1]))

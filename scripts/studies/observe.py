"""The SCAPE paper's observations (Section III, Figures 3 to 6) in short runs of small models.

    python -m scripts.studies.observe run     # what is not stored yet; --again makes all of it anew
    python -m scripts.studies.observe plot    # pictures and table.md, from stored files alone

Four runs a recipe, each a process that simulates the replicas: dense training with AdamW and with AdamS, and both again
from their checkpoint at half the steps on, there with top-k of every tensor and error feedback, so that a pair differs
in nothing else. The same rates for both optimizers, as in the paper. Its steps, of 100,000, are scaled: histograms at
half of the learning rate's warm-up (step 1,000 of 2,000) and at half of the run (50,000), windows over the first
quarter of the run (from step 1) and from its middle on (from step 10,000).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.common import ALONE, OUTPUTS, RESULTS, ROOT, RunError, guarded, losses, names, parser, versions, write
from scripts.studies.observe_plots import draw
from torchtitan_scape.config.recipes import load

RECIPES, OPTIMIZERS = ("embedded", "speeches"), ("AdamW", "AdamS")
# Of Llamas with six layers: the paper's tensors, by depth, and others of other layers.
NAMES = (
    "layers.0.feed_forward.w1.weight+layers.0.feed_forward.w3.weight",
    "layers.3.attention.wo.weight",
    "tok_embeddings.weight",
    "layers.1.attention.wq.weight+layers.1.attention.wk.weight+layers.1.attention.wv.weight",
    "layers.5.feed_forward.w2.weight",
    "output.weight",
)
RUN = ("--validation.local_batch_size=8", "--validation.steps=4", "--metrics.log_freq=1", "--sample.characters=0")


@dataclass(frozen=True)
class Cell:
    """A run. switched: it goes on from the dense one's checkpoint with top-k."""

    recipe: str
    optimizer: str
    switched: bool

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.optimizer.lower()}" + ("-topk" if self.switched else "")


CELLS = [Cell(r, o, switched) for r in RECIPES for o in OPTIMIZERS for switched in (False, True)]


def options(cell: Cell, args: argparse.Namespace) -> list[str]:
    """Of the trainer, but for the folder."""
    half, replicas = args.steps // 2, args.replicas
    method = ["--sync.method=topk", "--sync.topk.selection=tensor", f"--sync.topk.density={args.density}"]
    return [
        f"--job.config_file=train_configs/{cell.recipe}.toml",
        f"--optimizer.name={cell.optimizer}",
        *(method if cell.switched else ["--sync.method=dense"]),
        f"--training.steps={args.steps}",
        f"--topology.simulate_replicas={replicas}",
        f"--training.local_batch_size={16 // replicas}",
        f"--validation.freq={half}",
        *RUN,
        *("--checkpoint.enable", f"--checkpoint.interval={half}", "--checkpoint.no-last-save-model-only"),
        "--observe.enable",
        f"--observe.names={','.join(NAMES)}",
        f"--observe.density={args.density}",
        f"--observe.windows=[[1,{args.steps // 4}],[{half + 1},{args.steps - half}]]",
        *("--observe.histograms", str(warmup(cell.recipe) // 2), str(half)),
        *args.rest,
    ]


def warmup(recipe: str) -> int:
    """Steps of the learning rate's."""
    steps: int = load(str(ROOT / "train_configs" / f"{recipe}.toml")).table["lr_scheduler"]["warmup_steps"]
    return steps


def train(cell: Cell, args: argparse.Namespace) -> None:
    """Raises RunError with the log's end."""
    folder, half = args.work / cell.name, args.steps // 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if cell.switched:
        dense = args.work / Cell(cell.recipe, cell.optimizer, False).name / "checkpoint" / f"step-{half}"
        if not dense.exists():
            raise ValueError(f"{dense} is not there; make the dense run again: run --again --runs {cell.recipe}")
        shutil.copytree(dense, folder / "checkpoint" / dense.name)
    given = options(cell, args)
    command = [sys.executable, "-m", "torchtitan_scape.train", *given, f"--job.dump_folder={folder}"]
    environment = {**os.environ, **ALONE, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "log.txt", "wb") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    if code:
        end = (folder / "log.txt").read_text(errors="replace")[-3000:]
        raise RunError(f"{cell.name} ended with exit code {code}:\n{end}")
    tags = {"norm": "grad_norm"} | ({"residual": "sync/residual_norm"} if cell.switched else {})
    curves = {key: [[s, round(value, 6)] for s, value in curve] for key, curve in losses(folder, **tags).items()}
    args.output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "observations.npz", args.output / f"{cell.name}.npz")
    begin = "the checkpoint of the dense run, then: " if cell.switched else ""
    content = {"begins": f"{begin}step {half + 1 if cell.switched else 1}", "options": given, "versions": versions()}
    write(
        args.output / f"{cell.name}.json", json.dumps(content | {"curves": curves}) + "\n"
    )  # a point is no four lines


def run(args: argparse.Namespace) -> None:
    wanted = [cell for cell in CELLS if any(cell.name.startswith(some) for some in args.runs)]
    if not wanted:
        raise ValueError(f"--runs {','.join(args.runs)}: known are {', '.join(cell.name for cell in CELLS)}")
    args.output, args.work = args.output.resolve(), args.work.resolve()
    for cell in wanted:
        if (args.output / f"{cell.name}.json").exists() and not args.again:
            continue
        print(f"{cell.name} ...", flush=True)
        train(cell, args)


def main() -> int:
    own = parser(__doc__, epilog="Further --section.key=value arguments of `run` go to every run.")
    own.add_argument("command", choices=("run", "plot"))
    own.add_argument("--output", type=Path, default=RESULTS / "observations")
    own.add_argument("--work", type=Path, default=OUTPUTS / "observations", help="folders of the runs")
    own.add_argument("--runs", type=names, default=[""], help="names, or how they begin, with commas between")
    own.add_argument("--steps", type=int, default=200)
    own.add_argument("--replicas", type=int, default=4, help="simulated; 16 sequences a step are theirs together")
    own.add_argument("--density", type=float, default=0.1, help="of what is sent, and of the largest that are compared")
    own.add_argument("--again", action="store_true", help="what is stored, too")
    args, args.rest = own.parse_known_args()
    if args.command == "plot" and args.rest:
        own.error(f"unrecognized arguments: {' '.join(args.rest)}")
    return guarded(lambda: run(args) if args.command == "run" else draw(args.output))


if __name__ == "__main__":
    sys.exit(main())

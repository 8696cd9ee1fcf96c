"""Trains the same recipe with several methods and sets them side by side: a table and a loss plot.

    python -m scripts.studies.compare_methods                       # the list below, on the embedded recipe
    python -m scripts.studies.compare_methods scape-0.1 adams --steps 100 --seed 1

Every method gets the same seed, learning rate, data and steps; nothing is tuned. Results go to
results/compare_methods/: table.md, loss.png, results.json. What is measured on a CPU is a ratio, not a speed.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts import methods
from scripts.common import (
    EMBEDDED,
    OUTPUTS,
    RESULTS,
    command_of,
    guarded,
    losses,
    markdown,
    parser,
    torchrun,
    write,
)
from scripts.plots import figure, save

METHODS = ("adamw", "adams", "scape-0.1", "scape-0.1-plain", "scape-0.047-int4", "scape-0.01", "scape-0.01-plain")


def method(name: str) -> tuple[str, list[str]]:
    """(label, options of the trainer). Raises ValueError for a name that is none."""
    plain, scape = name.endswith("-plain"), name.startswith("scape-")
    try:
        found = methods.parse(name.removesuffix("-plain") if scape else name)
    except ValueError:
        raise ValueError(f"there is no method {name!r}; known are {KNOWN}") from None
    scaling = "--sync.scape.no-staleness-scaling" if plain else "--sync.scape.staleness_scaling"
    label = found.label + (", dense" if name in methods.OPTIMIZERS else ", no staleness scaling" if plain else "")
    return label, [*found.options, *([scaling] if scape else [])]


KNOWN = f"{methods.KNOWN}, and SCAPE with -plain"
OPTIMIZER_PHASES = ("check", "wait", "pack", "exchange", "clip", "update")


def train(name: str, folder: Path, args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Trains one method; its summary, with the curves from its TensorBoard log."""
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"--job.config_file={args.config}", f"--job.dump_folder={folder}", "--metrics.enable_tensorboard"]
    options += ["--sample.characters=0", f"--training.steps={args.steps}", f"--debug.seed={args.seed}"]
    options += [*method(name)[1], *rest]
    torchrun(args.ngpu, ["-m", "torchtitan_scape.train", *options], folder / "log.txt")
    return {**json.loads((folder / "summary.json").read_text()), "curves": losses(folder)}


def table(results: dict[str, Any]) -> str:
    """Markdown. The optimizer's share is its step, exchange included, over forward and backward."""
    rows = []
    for name, result in results.items():
        seconds = result["seconds_by_phase"]
        own = sum(seconds.get(phase, 0.0) for phase in OPTIMIZER_PHASES)
        compute = seconds["forward_backward"]
        sent, planned = sum(result["bytes_sent_per_step_and_rank"].values()), result["planned_bytes_per_step_and_rank"]
        rows.append(
            {
                "method": method(name)[0],
                "final validation loss": f"{result['validation_loss']:.4f}",
                "step, ms": f"{1e3 * result['seconds_per_step']:.0f}",
                "optimizer, % of forward + backward": f"{100 * own / compute:.1f}",
                "without the exchange, %": f"{100 * (own - seconds.get('exchange', 0.0)) / compute:.1f}",
                "sent per step and rank, MB": f"{sent / 1e6:.3f}",
                "after warm-up, MB": f"{planned / 1e6:.3f}",
                "then against dense": f"{100 * planned / result['dense_bytes_per_step_and_rank']:.1f} %",
            }
        )
    return markdown(rows)


def plot(results: dict[str, Any], path: Path) -> None:
    drawn, axes = figure(1, 2, (11, 4.2))
    for axis, kind in zip(axes[0], ("training", "validation"), strict=True):
        for name, result in results.items():
            steps, values = zip(*result["curves"][kind], strict=True)
            style = "--" if name.endswith("plain") else "-"
            axis.plot(steps, values, style, label=method(name)[0], marker="o" if kind == "validation" else None, ms=3)
        axis.set_xlabel("step")
        axis.set_ylabel(f"{kind} loss (nats per token)")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    save(drawn, path)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    chosen = args.methods or list(METHODS)
    for name in chosen:
        method(name)  # before the first one runs
    results = {}
    for i, name in enumerate(chosen):
        print(f"[{i + 1}/{len(chosen)}] {method(name)[0]} ...", flush=True)
        results[name] = train(name, args.work.resolve() / name, args, rest)
        print(f"    validation loss {results[name]['validation_loss']:.4f}", flush=True)
    command = command_of("scripts.studies.compare_methods")
    note = (
        f"Made by `{command}`: {args.config}, {args.steps} steps, {args.ngpu} replicas, seed {args.seed}, "
        f"the same learning rate for all, one run each, on {os.cpu_count()} {platform.machine()} cores without a GPU."
    )
    write(args.output / "table.md", f"{table(results)}\n\n{note}\n")
    write(args.output / "results.json", {"command": command, "results": results})
    plot(results, args.output / "loss.png")
    print(table(results))


def main() -> int:
    own = parser(__doc__, epilog="Further --section.key=value arguments go to every run.")
    own.add_argument("methods", nargs="*", help=f"{KNOWN}; by default {' '.join(METHODS)}")
    own.add_argument("--config", default=EMBEDDED)
    own.add_argument("--steps", type=int, default=200)
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--ngpu", type=int, default=2, help="processes, so replicas")
    own.add_argument("--output", type=Path, default=RESULTS / "compare_methods")
    own.add_argument("--work", type=Path, default=OUTPUTS / "compare_methods", help="logs of the runs")
    args, rest = own.parse_known_args()
    return guarded(lambda: run(args, rest))


if __name__ == "__main__":
    sys.exit(main())

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
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

METHODS = {
    "adamw": ("AdamW, dense", ["--sync.method=dense", "--optimizer.name=AdamW"]),
    "adams": ("AdamS, dense", ["--sync.method=dense", "--optimizer.name=AdamS"]),
}
for _density in ("0.1", "0.01"):
    _scape = ["--sync.method=scape", f"--sync.scape.density={_density}"]
    METHODS[f"scape-{_density}"] = (f"SCAPE {_density}", [*_scape, "--sync.scape.wait_scaling"])
    METHODS[f"scape-{_density}-plain"] = (
        f"SCAPE {_density}, no wait scaling",
        [*_scape, "--sync.scape.no-wait-scaling"],
    )

OPTIMIZER_PHASES = ("check", "wait", "pack", "exchange", "clip", "update")


def run(name: str, folder: Path, args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Trains one method through ./run_train.sh; its summary, and the curves from its TensorBoard log."""
    out = folder / name
    command = [
        str(ROOT / "run_train.sh"),
        f"--job.dump_folder={out}",
        f"--training.steps={args.steps}",
        f"--debug.seed={args.seed}",
        "--metrics.enable_tensorboard",
        *METHODS[name][1],
        *rest,
    ]
    environment = {**os.environ, "CONFIG_FILE": args.config, "NGPU": str(args.ngpu), "PYTHON": sys.executable}
    out.mkdir(parents=True, exist_ok=True)
    for old in out.rglob("events.out*"):
        old.unlink()
    with open(out / "log.txt", "w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{name} ended with exit code {code}; see {out / 'log.txt'}")
    summary = json.loads((out / "summary.json").read_text())
    summary["curves"] = curves(out)
    return summary


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of training and validation."""
    return scalars(folder, {"training": "loss_metrics/global_avg_loss", "validation": "validation_metrics/loss"})


def scalars(folder: Path, tags: dict[str, str]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each of `tags` from the one TensorBoard log under `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    return {name: [(e.step, e.value) for e in accumulator.Scalars(tag)] for name, tag in tags.items()}


def table(results: dict[str, Any]) -> str:
    """Markdown. The optimizer's share is its step, exchange included, over forward and backward."""
    rows = [
        "| method | final validation loss | step, ms | optimizer, % of forward + backward | without the exchange, % "
        "| sent per step and rank, MB | after warm-up, MB | then against dense |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        seconds = result["seconds_by_phase"]
        own = sum(seconds.get(phase, 0.0) for phase in OPTIMIZER_PHASES)
        compute = seconds["forward_backward"]
        sent, planned = sum(result["bytes_sent_per_step_and_rank"].values()), result["planned_bytes_per_step_and_rank"]
        rows.append(
            f"| {METHODS[name][0]} | {result['validation_loss']:.4f} | {1e3 * result['seconds_per_step']:.0f} "
            f"| {100 * own / compute:.1f} | {100 * (own - seconds.get('exchange', 0.0)) / compute:.1f} "
            f"| {sent / 1e6:.3f} | {planned / 1e6:.3f} "
            f"| {100 * planned / result['dense_bytes_per_step_and_rank']:.1f} % |"
        )
    return "\n".join(rows)


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("training", "validation"), strict=True):
        for name, result in results.items():
            steps, losses = zip(*result["curves"][kind], strict=True)
            style = "--" if name.endswith("plain") else "-"
            axis.plot(steps, losses, style, label=METHODS[name][0], marker="o" if kind == "validation" else None, ms=3)
        axis.set_xlabel("step")
        axis.set_ylabel(f"{kind} loss (nats per token)")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further --section.key=value arguments go to every run.",
    )
    parser.add_argument("methods", nargs="*", help=f"any of {', '.join(METHODS)}; all by default")
    parser.add_argument("--config", default="train_configs/embedded.toml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ngpu", type=int, default=2, help="processes, so replicas")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "compare_methods")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "compare_methods", help="logs of the runs")
    args, rest = parser.parse_known_args()
    names = args.methods or list(METHODS)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        parser.error(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")

    results = {}
    for i, name in enumerate(names):
        print(f"[{i + 1}/{len(names)}] {METHODS[name][0]} ...", flush=True)
        results[name] = run(name, args.runs, args, rest)
        print(f"    validation loss {results[name]['validation_loss']:.4f}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    given = " ".join(["python -m scripts.studies.compare_methods", *sys.argv[1:]])
    note = (
        f"Made by `{given}`: {args.config}, {args.steps} steps, {args.ngpu} replicas, seed {args.seed}, "
        f"the same learning rate for all, one run each, on {os.cpu_count()} {platform.machine()} cores without a GPU."
    )
    (args.output / "table.md").write_text(f"{table(results)}\n\n{note}\n")
    (args.output / "results.json").write_text(json.dumps({"command": given, "results": results}, indent=1) + "\n")
    plot(results, args.output / "loss.png")
    print(table(results))


if __name__ == "__main__":
    main()

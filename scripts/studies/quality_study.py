"""The quality study: the loss that methods reach at several budgets, from many short runs of a small recipe.

    python -m scripts.studies.quality_study run --jobs 2  # every set of scripts/studies/quality_grid.toml
    python -m scripts.studies.quality_study run --sets 20-large,20-small
    python -m scripts.studies.quality_study list  # what there is to run, and how long it will take
    python -m scripts.studies.quality_study report  # tables and plots, from the stored cells alone

run     trains what is missing; a run that was stopped goes on where it was. Every method gets the same learning rates
        with the first seed, and the other seeds at its best one. A cell is known by the values of all its options:
        sets share cells, and a changed grid or recipe trains what is new. What the options do not show (the code, the
        versions) is stored beside the result and not compared: remove cells that a change of the code made obsolete.
        Failed runs are reported, do not stop the others, and are tried again next time.
report  writes table.md and plots beside the cells. Numbers come from the cells; the grid is not read.

Every run is one process with --threads threads, which plays all replicas in turn.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.studies.quality_cells import Grid  # noqa: E402
from scripts.studies.quality_runs import TRAINER, Queue  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    output = ROOT / "results" / "quality_study"
    for name in ("run", "list"):
        one = commands.add_parser(name)
        one.add_argument("--grid", type=Path, default=ROOT / "scripts" / "quality_grid.toml")
        one.add_argument("--sets", default="", help="names, with commas between; all by default")
        one.add_argument("--jobs", type=int, default=2, help="runs at a time")
        one.add_argument("--threads", type=int, default=1, help="of each run")
        one.add_argument("--output", type=Path, default=output)
        one.add_argument("--work", type=Path, default=ROOT / "outputs" / "quality_study", help="logs of the runs")
    commands.add_parser("report").add_argument("--output", type=Path, default=output)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, trainer: Sequence[str]) -> int:
    grid = Grid(args.grid)
    names = [name for name in args.sets.split(",") if name]
    queue = Queue(grid, grid.choose(names), args.output, args.jobs, args.threads, trainer, args.work.resolve())
    if args.command == "list":
        for cell in queue.missing():
            print(cell.title)
    total, _ = queue.counts()
    print(f"{total} cells, {queue.done()} of them done; {queue.remaining()}", flush=True)
    if args.command == "list":
        return 0
    failed = queue.run()
    print(
        f"{queue.done()} cells done, {failed} failed; next: python -m scripts.studies.quality_study report", flush=True
    )
    return 1 if failed else 0


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None, trainer: Sequence[str] = TRAINER) -> int:
    args = parse(arguments)
    try:
        if args.command == "report":
            from scripts.studies.quality_report import write_report

            print(f"wrote {write_report(args.output)}")
            return 0
        before = signal.signal(signal.SIGTERM, stop)
        try:
            return run(args, trainer)
        finally:
            signal.signal(signal.SIGTERM, before)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

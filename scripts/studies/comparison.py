"""The comparison: loss for bytes and for seconds of every method of [sync], each tuned by one small budget of runs.

    python -m scripts.studies.comparison run --jobs 2  # every set of scripts/studies/comparison_grid.toml
    python -m scripts.studies.comparison list  # what there is to run, and how long it will take
    python -m scripts.studies.comparison table  # results/comparison/table.md
    python -m scripts.studies.comparison bytes  # results/comparison/loss_against_bytes.png
    python -m scripts.studies.comparison seconds  # results/comparison/loss_against_seconds.png
    python -m scripts.studies.comparison report  # the last three

run     trains what is missing, as the quality study does, whose stored cells it takes where they are the same. A run
        that was stopped goes on where it was.
others  read stored cells alone; the grid says which, and nothing of a number.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.common import RESULTS, ROOT, guarded, parser
from scripts.studies.comparison_figures import draw_bytes, draw_seconds
from scripts.studies.comparison_methods import budgets
from scripts.studies.comparison_report import page
from scripts.studies.quality_cells import Grid, Store
from scripts.studies.quality_study import TRAINER, queue_options, work_off

GRID = ROOT / "scripts" / "studies" / "comparison_grid.toml"
OUTPUT, SHARED = RESULTS / "comparison", (RESULTS / "quality_study",)
MADE = {"table": (page, "table.md"), "bytes": (draw_bytes, "loss_against_bytes.png")}
MADE["seconds"] = (draw_seconds, "loss_against_seconds.png")


def report(args: argparse.Namespace) -> None:
    """Writes what the command names. Raises ValueError where there is nothing to compare."""
    found = budgets(Grid(args.grid), Store(args.output, args.shared))
    if not found:
        raise ValueError(f"{args.output / 'cells'} has no finished cells to compare; first run comparison run")
    for name in MADE if args.command == "report" else (args.command,):
        make, file = MADE[name]
        make(found, args.output / file)
        print(f"wrote {args.output / file}")


def run(args: argparse.Namespace, trainer: Sequence[str]) -> int:
    if args.command in ("run", "list"):
        return work_off(args, trainer, "comparison", args.shared)
    report(args)
    return 0


def main(arguments: Sequence[str] | None = None, trainer: Sequence[str] = TRAINER) -> int:
    own = parser(__doc__)
    commands = own.add_subparsers(dest="command", required=True)
    for name in ("run", "list", *MADE, "report"):
        one = commands.add_parser(name)
        one.add_argument("--output", type=Path, default=OUTPUT)
        one.add_argument("--shared", type=Path, nargs="*", default=SHARED, help="outputs whose cells are taken, too")
        one.add_argument("--grid", type=Path, default=GRID)
        if name in ("run", "list"):
            queue_options(one, "comparison")
    args = own.parse_args(arguments)
    return guarded(lambda: run(args, trainer))


if __name__ == "__main__":
    sys.exit(main())

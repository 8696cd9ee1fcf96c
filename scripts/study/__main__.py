"""Studies: many runs of the trainer that a grid declares, the store of their results, and the report.

    python -m scripts.study run comparison --jobs 2
    python -m scripts.study list quality_study --sets 20-large,20-small
    python -m scripts.study report comparison
    python -m scripts.study compare outputs/adamw outputs/scape --plot losses.png

STUDY is the name of a grid in scripts/study/grids, or the path of another one.

run     runs everything that results/STUDY/runs.jsonl does not have. The same command continues after a stop or a kill:
        a simulated run with a budget from its newest complete checkpoint in the folder --work, with the result of an
        uninterrupted run; other unfinished runs start anew. A run is identified by the values of all its options, so
        sets and studies share runs, and a changed grid or recipe starts new ones. The code's version is stored with a
        result and not compared: delete lines, and folders of unfinished runs, that a change of the code has made
        obsolete. A failed run is reported, does not stop the others, and is tried again by the next command.
list    prints the missing runs and the estimated time.
report  writes report.md and the figures, from the store alone.
compare prints final losses and times of finished runs of the trainer, of any machine, and their gaps to the first one.
"""

import argparse
import sys
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path

from scripts.common import OUTPUTS, RESULTS, guarded, names, numbers, parser
from scripts.study import emulated, slurm
from scripts.study.curves import compare
from scripts.study.grid import GRIDS, Grid
from scripts.study.launchers import predicted_set
from scripts.study.queue import Queue
from scripts.study.report import write_report
from scripts.study.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    own = parser(__doc__)
    commands = own.add_subparsers(dest="command", required=True)
    for name in ("run", "list", "report"):
        one = commands.add_parser(name)
        one.add_argument(
            "study", help=f"one of {', '.join(sorted(grid.stem for grid in GRIDS.glob('*.toml')))}, or a file"
        )
        one.add_argument("--output", type=Path, help="folder of the results; results/STUDY")
        if name != "report":
            one.add_argument("--sets", type=names, default=[], help="names, with commas between; all by default")
            one.add_argument("--methods", type=names, default=[], help="names of methods, or recipe files, instead")
            one.add_argument("--sizes", type=numbers, default=[], help="numbers of ranks, instead of the grid's")
            one.add_argument("--no-compile", action="store_true", help="train without torch.compile")
            one.add_argument("--jobs", type=int, default=2, help="runs at a time, where a launcher runs several")
            one.add_argument("--work", type=Path, help="folder of the runs' logs; outputs/STUDY")
            one.add_argument("--sbatch", default="", help='options of sbatch: --sbatch="-A ACCOUNT --time=01:00:00"')
            one.add_argument("--poll", type=float, default=30.0, help="seconds between two looks at Slurm's queue")
    compared = commands.add_parser("compare")
    compared.add_argument("folders", type=Path, nargs="+", help="dump folders; the first is the baseline")
    compared.add_argument("--plot", type=Path, help="file for the curves, such as losses.png")
    args = own.parse_args(arguments)
    return guarded(lambda: command(args))


def command(args: argparse.Namespace) -> int:
    if args.command == "compare":
        compare(args.folders, args.plot)
        return 0
    path = Path(args.study) if args.study.endswith(".toml") else GRIDS / f"{args.study}.toml"
    grid = Grid(path)
    output = (args.output or RESULTS / path.stem).resolve()
    if args.command == "report":
        print(f"wrote {write_report(grid, output)}")
        return 0
    options = {"compile.enable": False} if args.no_compile else {}
    sets = grid.choose(args.sets, args.methods, args.sizes, options)
    store = Store(output, [RESULTS / name for name in grid.shared])
    every = Queue(grid, sets, store, args.jobs, (args.work or OUTPUTS / path.stem).resolve())
    if args.command == "list":
        print("".join(f"{spec.title}\n" for spec in every.missing()), end="")
    print(f"{len(every.runs(guess=True))} runs, {every.done()} of them done; {every.remaining()}", flush=True)
    if args.command == "list":
        return 0
    for launcher in dict.fromkeys(one.launcher for one in sets):
        part = copy(every)  # has the same set of failed runs
        part.sets = [one for one in sets if one.launcher == launcher]
        if launcher == "slurm":
            slurm.run(part, args)
        elif launcher == "emulated":
            emulated.run(part)
        elif launcher == "predicted":
            part.run_in_turn(partial(predicted_set, store))
        else:
            part.jobs = args.jobs if launcher == "simulated" else 1  # ranks of several runs would share the cores
            part.run()
    text = f"{every.done()} runs done, {len(every.failed)} failed, {len(every.stopped)} stopped"
    print(f"{text}; next: python -m scripts.study report {args.study}", flush=True)
    return 1 if every.failed or every.stopped else 0


if __name__ == "__main__":
    sys.exit(main())

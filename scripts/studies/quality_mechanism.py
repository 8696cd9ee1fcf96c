"""How SCAPE's update moves entries, beside dense AdamS: waits, distances and residuals, from a probe in short runs.

    python -m scripts.studies.quality_mechanism run  # every method below; --again trains those that are stored too
    python -m scripts.studies.quality_mechanism report         # table.md and plots, from the stored cells alone

Runs are those of the quality study (methods and recipe of quality_grid.toml, simulated replicas in one process,
on the CPU), each in a process of its own. A stored one is not run again unless asked for: use --again after a change
of the code. Runs of other lengths belong into an --output of their own.

All figures are of the sparsified entries, from a fifth of the steps on: the density has then been at its target for a
tenth. A wait is the number of steps that an entry has spent outside the mask when it enters; a visit is its steps
inside from then on. Movement is in learning rates, without weight decay. The factor on the first step of a visit is
against (1 - beta1) / sqrt(1 - beta2), which an entry without a moment moves by. The best mask is the one that the
replicas' mean of their new moments, residuals included, would select.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.common import OUTPUTS, RESULTS, ROOT, guarded, names, parser, versions
from scripts.studies.quality_cells import GRID, Cell, Grid, Set, Store
from scripts.studies.quality_movement import report
from scripts.studies.quality_probe import Probe
from scripts.studies.quality_study import ENVIRONMENT, arguments

RATES = {"dense-adams": 4e-3} | {
    f"scape-{density:g}{rule}": rate for density, rate in ((0.1, 4e-3), (0.01, 2e-3)) for rule in ("-paper", "")
}
REPLICAS, SEED = 4, 0
# The probe looks at what runs on a CPU.
NO_GPU = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")


def cell_of(args: argparse.Namespace, method: str) -> Cell:
    """Raises ValueError for a method that there is not."""
    grid = Grid(args.grid)
    if method not in RATES or method not in grid.methods:
        raise ValueError(f"there is no method {method!r} here; known are {', '.join(RATES)}")
    one = Set("mechanism", args.steps, args.batch, REPLICAS, (method,), (RATES[method],), (SEED,))
    return grid.cell(one, method, RATES[method], SEED)


def train(args: argparse.Namespace) -> int:
    """Trains one method in this process and stores what the probe saw."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    cell = cell_of(args, args.methods)
    trainer = ScapeTrainer(parse([*arguments(Grid(args.grid), cell), f"--job.dump_folder={args.work / cell.name}"]))
    probe = Probe(trainer.replica_optimizer, cell.of.steps)
    trainer.train()
    short = json.loads(json.dumps(probe.figures()), parse_float=lambda text: float(f"{float(text):.4g}"))
    content = {"validation_loss": trainer.validator.last_loss, "versions": versions(), "figures": short}
    Store(args.output).keep(cell, content)
    os._exit(0)  # as the trainer's own: threads that are still there may abort a process that ends


def run(args: argparse.Namespace) -> int:
    """Each method in a process of its own: process groups and seeds do not mix."""
    args.grid, args.output, args.work = (path.resolve() for path in (args.grid, args.output, args.work))
    cells = [cell_of(args, method) for method in names(args.methods)]
    args.work.mkdir(parents=True, exist_ok=True)
    failed = 0
    for cell in cells:
        if Store(args.output).read(cell) is not None and not args.again:
            continue
        path = args.work / f"{cell.name}.txt"
        command = [sys.executable, "-m", "scripts.studies.quality_mechanism", "one", f"--methods={cell.method}"]
        command += [f"--{key}={getattr(args, key)}" for key in ("grid", "steps", "batch", "output", "work")]
        with open(path, "wb") as log:
            environment = {**os.environ, **ENVIRONMENT, **NO_GPU}
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        failed += bool(code)
        print(f"{cell.title}: " + (f"failed with exit code {code}, log: {path}" if code else "done"), flush=True)
    return 1 if failed else 0


def tell(args: argparse.Namespace) -> int:
    report(args.output, " ".join((__doc__ or "").split("\n\n")[-1].split()))
    print(f"wrote {args.output / 'table.md'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    own = parser(__doc__)
    commands = own.add_subparsers(dest="command", required=True)
    for name, work in (("run", run), ("one", train), ("report", tell)):  # `one` is what `run` starts
        one = commands.add_parser(name)
        one.set_defaults(work_of=work)
        one.add_argument("--output", type=Path, default=RESULTS / "quality_mechanism")
        if name != "report":
            one.add_argument("--methods", default=",".join(RATES), help="names, with commas between; all by default")
            one.add_argument("--steps", type=int, default=980)
            one.add_argument("--batch", type=int, default=4096, help="tokens a step")
            one.add_argument("--again", action="store_true", help="train what is stored, too")
            one.add_argument("--grid", type=Path, default=GRID)
            one.add_argument("--work", type=Path, default=OUTPUTS / "quality_mechanism", help="logs of the runs")
    args = own.parse_args(arguments)
    return guarded(lambda: args.work_of(args))


if __name__ == "__main__":
    sys.exit(main())

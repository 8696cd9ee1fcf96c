"""The shard axis across nodes: step times, bytes and losses of ZeRO++, three levels and TAGC against FSDP2's own.

    python -m scripts.studies.shard_axis speed        # 2 nodes of 2 ranks, slow links; every form
    python -m scripts.studies.shard_axis tagc         # 2 nodes of a rank
    python -m scripts.studies.shard_axis tagc --micro-batches 20 --forms dense,tagc-0.9 \\
        --output results/shard_axis/tagc_20           # as many as in its paper
    python -m scripts.studies.shard_axis losses       # 40 and 300 steps, three seeds
    python -m scripts.studies.shard_axis report       # table.md, from the stored cells alone

Runs are of the embedded recipe on scripts/emulated_cluster.py, as root. `speed` and `tagc` choose the links' rate so
that a step of FSDP2's own collectives, with one micro-batch, takes --slowdown times its compute-only step; what a
collective takes is what a rank waits in it, as gloo has no streams beside which it could run. Losses are compared
by seed, links not limited. A command that was stopped goes on where it was; cells are in OUTPUT/NAME/cells.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common import (
    EMBEDDED,
    OUTPUTS,
    RESULTS,
    RunError,
    command_of,
    guarded,
    names,
    numbers,
    parser,
    read,
    write,
)
from scripts.emulated_cluster import Cluster
from scripts.studies.quality_cells import digest
from scripts.studies.scaling_emulated import Emulated
from scripts.studies.scaling_sweep import NEVER, Cell, Plan, Sweep, from_raw
from scripts.studies.shard_axis_forms import DENSE, LOSSES, RANKS, SPEED, TAGC, Form
from scripts.studies.shard_axis_report import write_report

MODULE = "scripts.studies.shard_axis"
NODES = 2
FORMS = {"speed": SPEED, "tagc": TAGC}
# Of the model in forward and backward: as the papers of ZeRO++ and three levels have it, and FP32 as TAGC's.
DTYPES = {"speed": "bfloat16", "tagc": "float32"}
BATCH = 16  # sequences a step of a run for the loss


# --------------------------------------------------------------------------------------------- step times


class ShardSweep(Sweep):
    """Forms by numbers of micro-batches: "zeropp-x2" has two a step."""

    module = MODULE
    others = (*Sweep.others, "forms", "micro_batches", "timeout")

    def __init__(self, args: argparse.Namespace) -> None:
        self.forms = FORMS[args.launcher]
        for name in args.forms:
            if name not in self.forms:
                raise ValueError(f"there is no form {name!r}; known are {', '.join(self.forms)}")
        if min(args.micro_batches, default=0) < 1:
            raise ValueError(f"--micro-batches {args.micro_batches}: give numbers of 1 or more")
        args.methods = [f"{name}-x{count}" for count in args.micro_batches for name in args.forms or self.forms]
        super().__init__(args)

    def plan(self, name: str) -> Plan:
        form, _, count = name.rpartition("-x")
        one, sequences = self.forms[form], int(count) * self.args.batch
        options = (*one.arguments(), f"--training.mixed_precision_param={DTYPES[self.args.launcher]}")
        options += (f"--training.global_batch_size={sequences}",)
        return Plan(name, f"{one.title}, {count} micro-batch(es)", options, None, again=one.again)

    def report(self) -> Path:
        return write_report(self.folder.parent)


class OneMicroBatch(Emulated):
    """Runs whose ranks take the recipe's batch a sequence at a time; plans say how many."""

    def trainer(self, recipe: Path, size: int, log: Path) -> list[str]:
        return [option for option in super().trainer(recipe, size, log) if "global_batch_size" not in option]


def measured(emulated: Emulated, cell: Cell) -> dict[str, Any]:
    """A cell: the step, its parts, and bytes a step and node, as counted by kind and in closed form."""
    raw = emulated.measure(cell, emulated.steps(cell.plan), emulated.rate, cell.name)
    summary = json.loads(raw.read_text())["summary"]
    form, _, count = cell.plan.name.rpartition("-x")
    content = from_raw(raw, int(count) * emulated.args.batch)
    if summary["skipped_steps"]:
        raise RunError(f"{summary['skipped_steps']} steps were skipped; what is stored would be no measurement")
    print(f"    {1e3 * content['step_seconds']:.0f} ms a step", flush=True)
    per_node = emulated.args.ranks_per_node
    planned = {key: per_node * value for key, value in summary["planned_shard_axis_bytes_per_step_and_rank"].items()}
    if cell.plan.again:
        planned["network weights"] *= int(count)  # the closed form knows our way alone, once an update
    if summary["planned_bytes_per_step_and_rank"]:
        planned["network replicas"] = per_node * summary["planned_bytes_per_step_and_rank"]
    return {
        **content,
        "form": form,
        "micro_batches": int(count),
        "layout": summary["layout"],
        "rate_mbit": emulated.rate,
        "by_kind": {
            level: {kind: sum(n["by_kind"].get(kind, 0.0) for n in nodes) / len(nodes) for kind in nodes[0]["by_kind"]}
            for level, nodes in summary["interfaces"]["sent_per_step"].items()
        },
        "planned": planned,
    }


def speed(args: argparse.Namespace) -> int:
    sweep = ShardSweep(args)
    emulated, machine = OneMicroBatch(sweep), f"{os.cpu_count()} cores, gloo over TCP between network namespaces"
    sweep.store(machine)
    if args.slowdown:
        emulated.calibrate_rate(sweep.plan(f"{DENSE}-x1"))
    sweep.notes = [f"NICs limited to {emulated.rate:.4g} Mbit/s each way." if emulated.rate else "NICs not limited."]
    return 1 if sweep.run(lambda cell: measured(emulated, cell), machine) else 0


# ------------------------------------------------------------------------------------------------- losses


class Trained(NamedTuple):
    """A run for its loss."""

    name: str
    form: Form
    steps: int
    seed: int

    def options(self, rest: list[str]) -> list[str]:
        return [
            f"--training.steps={self.steps}",
            f"--training.local_batch_size={BATCH // RANKS}",
            f"--training.global_batch_size={BATCH}",
            f"--lr_scheduler.warmup_steps={max(1, self.steps // 10)}",
            f"--validation.freq={NEVER}",
            f"--debug.seed={self.seed}",
            *self.form.arguments(),
            *rest,
        ]


def losses(args: argparse.Namespace) -> int:
    chosen = args.forms or list(LOSSES)
    for name in chosen:
        if name not in LOSSES:
            raise ValueError(f"there is no form {name!r}; known are {', '.join(LOSSES)}")
    runs = [Trained(n, LOSSES[n], steps, seed) for steps in args.steps for seed in args.seeds for n in chosen]
    failed = 0
    for number, one in enumerate(runs, 1):
        options = one.options(args.rest)
        own = f"{one.name}-{one.steps}-s{one.seed}-{digest(options)}"
        path = args.output / "cells" / f"{own}.json"
        if "error" not in (read(path) or {"error": ""}):
            continue
        print(f"[{number}/{len(runs)}] {one.form.title}, {one.steps} steps, seed {one.seed} ...", flush=True)
        content = {"form": one.name, "steps": one.steps, "seed": one.seed, "options": options}
        try:
            content |= trained(options, OUTPUTS / "shard_axis" / args.output.name / own, args.timeout)
            print(f"    {content['validation_loss']:.4f}", flush=True)
        except RunError as error:
            failed += 1
            content["error"] = str(error)
            print(f"    failed: {error}", flush=True)
        write(path, content)
        write(args.output / "sweep.json", {"command": command_of(MODULE)})
    print(f"wrote {write_report(args.output.parent)}; {failed} failed")
    return 1 if failed else 0


def trained(options: list[str], folder: Path, timeout: float) -> dict[str, Any]:
    """What a run ends with. Raises RunError."""
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    given = ["-m", "torchtitan_scape.train", f"--job.config_file={EMBEDDED}", f"--job.dump_folder={folder}"]
    given += ["--sample.characters=0", *options]
    with Cluster(NODES) as cluster:
        cluster.torchrun(given, RANKS // NODES, folder, timeout)
    if (found := read(summary)) is None:
        raise RunError(f"the run has left no summary (log in {folder})")
    return {key: found[key] for key in ("validation_loss", "training_loss", "skipped_steps", "layout")}


# ------------------------------------------------------------------------------------------------ commands


def parse(arguments: list[str]) -> argparse.Namespace:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = parser(__doc__)
    commands = own.add_subparsers(dest="launcher", required=True)
    for name, per_node, slowdown in (("speed", RANKS // NODES, 7.4), ("tagc", 1, 4.5)):
        one = commands.add_parser(name)
        one.add_argument("--forms", type=names, default=[], help=f"all by default: {', '.join(FORMS[name])}")
        one.add_argument("--micro-batches", type=numbers, default=[1, 2], help="a step and rank, of a sequence; 1,2")
        one.add_argument("--steps", type=int, default=10, help="measured steps of a run")
        one.add_argument("--warm-up", type=int, default=3, help="steps before them")
        one.add_argument("--slowdown", type=float, default=slowdown, help="chooses the rate; 0: takes --rate")
        one.add_argument("--rate", type=float, default=0.0, help="of a NIC, each way, Mbit/s; 0: not limited")
        one.add_argument("--timeout", type=float, default=900, help="seconds that a run may take")
        one.add_argument("--output", type=Path, default=RESULTS / "shard_axis" / name)
        size = NODES * per_node
        one.set_defaults(ranks_per_node=per_node, sizes=[size], recipes=[EMBEDDED], batch=size)
        one.set_defaults(compute="real", plain=False, loss_steps=0)
    one = commands.add_parser("losses")
    one.add_argument("--forms", type=names, default=[], help=f"all by default: {', '.join(LOSSES)}")
    one.add_argument("--steps", type=numbers, default=[40, 300], help="of the runs; 40,300")
    one.add_argument("--seeds", type=numbers, default=[0, 1, 2], help="0,1,2")
    one.add_argument("--timeout", type=float, default=1800, help="seconds that a run may take")
    one.add_argument("--output", type=Path, default=RESULTS / "shard_axis" / "losses")
    commands.add_parser("report").add_argument("--output", type=Path, default=RESULTS / "shard_axis")
    args = own.parse_args(arguments[:end])
    args.rest = arguments[end + 1 :]
    return args


def run(args: argparse.Namespace) -> int:
    if args.launcher == "report":
        print(write_report(args.output).read_text())
        return 0
    args.output = args.output.resolve()
    return losses(args) if args.launcher == "losses" else speed(args)


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(parse(sys.argv[1:]))))

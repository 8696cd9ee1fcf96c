"""The Slurm launcher of strong_scaling.py: one job a size, which runs every method in turn on the same nodes."""

import json
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from scripts.common import ROOT, read, write
from scripts.studies.scaling_sweep import NEVER, PEERS_NOTE, Cell, Sweep, from_raw, recipe_value

RANKS_PER_NODE = {"vista": 1, "frontier": 8}


class Jobs:
    """Job files and what they measured, in `sweep.folder`: jobs/, raw/, cells/."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.args = sweep, sweep.args
        self.per_node = RANKS_PER_NODE[self.args.machine]
        uneven = [size for size in sweep.sizes if size % self.per_node]
        if uneven:
            raise ValueError(f"--sizes has {uneven[0]}, but a node of {self.args.machine} has {self.per_node} ranks")
        if any(plan.peer == "powersgd" and not plan.rank for plan in sweep.plans):
            raise ValueError("powersgd needs its rank here, such as powersgd-4")
        if shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch on PATH; run this on a login node, or take the launcher 'predicted'")

    def raw(self, cell: Cell) -> Path:
        return (self.sweep.folder / "raw" / f"{cell.name}.json").resolve()

    def write_job(self, size: int, cells: list[Cell]) -> Path:
        """The job of one size: the machine's own file, once for every method; one that fails does not stop the next."""
        machine = ROOT / "scripts" / "slurm" / f"{self.args.machine}.sbatch"
        headers = [line for line in machine.read_text().splitlines() if line.startswith("#SBATCH")]
        folder = (self.sweep.folder / "jobs").resolve()
        lines = ["#!/bin/bash", *headers, f"#SBATCH --job-name=scape-{size}", f"#SBATCH --output={folder}/%x-%j.out"]
        lines += [f"cd {shlex.quote(str(ROOT))} || exit 2", 'export TRAIN_SCRIPT="-m scripts.studies.scaling_rank"']
        for cell in cells:
            raw = self.raw(cell)
            wanted = {"output": str(raw), "warm_up": self.warm_up(cell), "period": cell.plan.period}
            if cell.plan.peer:
                wanted |= {"peer": cell.plan.peer, "rank": cell.plan.rank}
            values = {"CONFIG_FILE": str(cell.recipe.resolve()), "SCALING": json.dumps(wanted)}
            values["LOG_DIR"] = f"{folder}/{cell.name}"
            assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
            command = shlex.join(["timeout", f"{self.args.timeout:g}", "bash", str(machine), *self.options(cell)])
            failed = shlex.quote(str(raw.with_suffix(".error")))
            lines += ["", f"rm -f {failed}", f'{assigned} {command} || echo "exit code $?" >{failed}']
        (self.sweep.folder / "raw").mkdir(parents=True, exist_ok=True)
        path = folder / f"size-{size}.sh"
        write(path, "\n".join(lines) + "\n")
        return path

    def options(self, cell: Cell) -> list[str]:
        """The trainer's command line. The global batch stays; a rank's share goes in micro-batches of the recipe's."""
        batch, micro = self.batch(cell), recipe_value(cell.recipe, "training", "local_batch_size")
        if batch % cell.size:
            raise ValueError(
                f"the global batch {batch} of {cell.recipe} is no multiple of {cell.size} ranks; set --batch"
            )
        each, period = batch // cell.size, cell.plan.period
        return [
            f"--job.dump_folder={self.sweep.folder.resolve() / 'runs' / cell.name}",
            f"--training.steps={self.warm_up(cell) + -(-self.args.steps // period) * period}",
            f"--training.local_batch_size={next(n for n in range(min(micro, each), 0, -1) if each % n == 0)}",
            f"--training.global_batch_size={batch}",
            f"--metrics.log_freq={NEVER}",
            "--validation.no-enable",
            "--sample.characters=0",
            "--checkpoint.no-enable",
            *cell.plan.options,
            *self.args.rest,
        ]

    def warm_up(self, cell: Cell) -> int:
        return max(self.args.warm_up, cell.plan.settles)

    def batch(self, cell: Cell) -> int:
        return self.args.batch or recipe_value(cell.recipe, "training", "global_batch_size")

    # ------------------------------------------------------------------------------------- submit, collect

    def submit(self, size: int, cells: list[Cell]) -> None:
        """Submits the job of a size, unless it is queued or running already."""
        if self.alive(size):
            print(f"[{size} ranks] job {self.number(size)} is in the queue")
            return
        command = ["sbatch", "--parsable", f"--nodes={size // self.per_node}", *shlex.split(self.args.sbatch)]
        told = subprocess.run([*command, str(self.write_job(size, cells))], capture_output=True, text=True)
        if told.returncode:
            raise ValueError(f"sbatch refused the job of {size} ranks: {' '.join(told.stderr.split())}")
        number = told.stdout.strip().split(";")[0]
        write(self.sweep.folder / "jobs" / f"size-{size}.json", {"job": number})
        print(f"[{size} ranks] submitted job {number} with {len(cells)} runs")

    def number(self, size: int) -> str:
        return (read(self.sweep.folder / "jobs" / f"size-{size}.json") or {"job": ""})["job"]

    def alive(self, size: int) -> bool:
        if not (number := self.number(size)):
            return False
        told = subprocess.run(["squeue", "--noheader", f"--jobs={number}"], capture_output=True, text=True)
        if told.returncode:  # a controller that does not answer says nothing about the job
            return "Invalid job id" not in told.stderr
        return bool(told.stdout.strip())

    def missing(self) -> list[Cell]:
        """The cells that are not done, once what was measured meanwhile is taken."""
        left = []
        for cell in self.sweep.cells():
            if not self.sweep.done(cell) and self.raw(cell).exists():
                content = from_raw(self.raw(cell), self.batch(cell))
                content |= {"nodes": cell.size // self.per_node, "ranks_per_node": self.per_node, "compute": "real"}
                self.sweep.keep(cell, content)
                print(
                    f"    {cell.plan.label} on {cell.size} ranks, {cell.recipe.stem}: {content['step_seconds']:.3f} s"
                )
            left += [] if self.sweep.done(cell) else [cell]
        return left

    def why(self, cell: Cell) -> str:
        """Why a job that has ended left nothing."""
        told = self.raw(cell).with_suffix(".error")
        ended = f"job {self.number(cell.size)} ended before this run (time limit, cancelled, or a node failed)"
        return f"{told.read_text().strip() if told.exists() else ended}; logs in {self.sweep.folder / 'jobs'}"


def run(sweep: Sweep) -> int:
    """Submits what is missing, waits, collects. Returns the number of failed cells."""
    jobs, args = Jobs(sweep), sweep.args
    sweep.notes = [
        f"Medians over {args.steps} steps after {args.warm_up}; a step is that of its slowest rank.",
        "All methods of a size ran on the same nodes, one after the other; sizes are jobs of their own.",
        PEERS_NOTE,
    ]
    for cell in sweep.cells():
        jobs.options(cell)  # refuses here, not in a job that has waited for hours
    sweep.store(args.machine)
    missing, begin = jobs.missing(), time.monotonic()
    for size in dict.fromkeys(cell.size for cell in missing):
        jobs.submit(size, [cell for cell in missing if cell.size == size])
    while waiting := [size for size in sorted({cell.size for cell in jobs.missing()}) if jobs.alive(size)]:
        done, minutes = len(sweep.cells()) - len(jobs.missing()), (time.monotonic() - begin) / 60
        print(f"[{done}/{len(sweep.cells())}] {minutes:.0f} min; jobs in the queue: {waiting}", flush=True)
        time.sleep(args.poll)
    for cell in jobs.missing():
        sweep.fail(cell, jobs.why(cell))
    return sweep.finish(args.machine)

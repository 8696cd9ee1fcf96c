"""The launcher `slurm`: one job for each size, which runs every method in turn on the same nodes.

A job that has been submitted continues without this process; the same command later collects the results.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from scripts.common import ROOT, RunError, command_of, read, write
from scripts.study.grid import BudgetSet, RunSpec
from scripts.study.queue import Queue
from scripts.study.store import SETUP
from scripts.study.timed import NEVER, PEERS_NOTE, TIMED, from_raw, medians, timing
from topology.machines import get_machine


class SlurmSet:
    """The jobs of one set. Job files and measurements are in `folder`, which the nodes must see."""

    def __init__(self, queue: Queue, one: BudgetSet, args: argparse.Namespace) -> None:
        self.queue, self.one, self.args = queue, one, args
        self.machine = one.launch["machine"]
        self.per_node = get_machine(self.machine).ranks_per_node
        self.folder = (queue.work / one.name).resolve()
        self.timeout = float(one.launch.get("timeout", 1200))
        try:
            self.options_of_sbatch = shlex.split(args.sbatch)
        except ValueError as error:
            raise ValueError(f"--sbatch {args.sbatch!r}: {error}") from None
        uneven = [size for size in one.sizes if size % self.per_node]
        if uneven:
            raise ValueError(f"set {one.name!r}: {uneven[0]} ranks, but a node of {self.machine} has {self.per_node}")
        if shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch on PATH; run this on a login node, or with launcher = 'predicted'")

    def raw(self, spec: RunSpec) -> Path:
        return self.folder / "raw" / f"{spec.name}-{spec.size}.json"

    def write_job(self, size: int, specs: list[RunSpec]) -> Path:
        """Write the job of a size: the machine's own file, once per method. A failed method does not stop the next."""
        machine = ROOT / "scripts" / "slurm" / f"{self.machine}.sbatch"
        headers = [line for line in machine.read_text().splitlines() if line.startswith("#SBATCH")]
        lines = ["#!/bin/bash", *headers, f"#SBATCH --job-name=scape-{size}"]
        lines += [f"#SBATCH --output={self.folder}/%x-%j.out"]
        lines += [f"cd {shlex.quote(str(ROOT))} || exit 2", f'export TRAIN_SCRIPT="-m {" ".join(TIMED)}"']
        for spec in specs:
            raw = self.raw(spec)
            wanted = {"output": str(raw), **{k: v for k, v in timing(spec).items() if k != "steps"}}
            wanted |= {key: spec.about[key] for key in ("peer", "rank") if key in spec.about}
            values = {"CONFIG_FILE": str(ROOT / spec.recipe), "TIMED_RUN": json.dumps(wanted)}
            values["LOG_DIR"] = f"{self.folder}/{spec.name}"
            assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
            command = shlex.join(["timeout", f"{self.timeout:g}", "bash", str(machine), *self.options(spec)])
            failed = shlex.quote(str(raw.with_suffix(".error")))
            lines += ["", f"rm -f {failed}", f'{assigned} {command} || echo "exit code $?" >{failed}']
        (self.folder / "raw").mkdir(parents=True, exist_ok=True)
        path = self.folder / f"size-{size}.sh"
        write(path, "\n".join(lines) + "\n")
        return path

    def options(self, spec: RunSpec) -> list[str]:
        """Return the trainer's command line without the recipe, which ./run_train.sh adds."""
        return [
            *spec.arguments[1:],
            f"--job.dump_folder={self.folder / 'runs' / spec.name}",
            f"--training.steps={timing(spec)['steps']}",
            f"--metrics.log_freq={NEVER}",
            "--validation.no-enable",
            "--sample.characters=0",
            "--checkpoint.no-enable",
        ]

    def submit(self, size: int, specs: list[RunSpec]) -> None:
        """Submit the job of a size, unless it is in the queue."""
        if self.alive(size):
            print(f"[{size} ranks] job {self.number(size)} is in the queue")
            return
        command = ["sbatch", "--parsable", f"--nodes={size // self.per_node}", *self.options_of_sbatch]
        answer = subprocess.run([*command, str(self.write_job(size, specs))], capture_output=True, text=True)
        if answer.returncode:
            raise ValueError(f"sbatch refused the job of {size} ranks: {' '.join(answer.stderr.split())}")
        number = answer.stdout.strip().split(";")[0]
        write(self.folder / f"size-{size}.json", {"job": number})
        print(f"[{size} ranks] submitted job {number} with {len(specs)} runs")

    def number(self, size: int) -> str:
        return (read(self.folder / f"size-{size}.json") or {"job": ""})["job"]

    def alive(self, size: int) -> bool:
        if not (number := self.number(size)):
            return False
        answer = subprocess.run(["squeue", "--noheader", f"--jobs={number}"], capture_output=True, text=True)
        if answer.returncode:  # a controller that does not answer gives no information about the job
            return "Invalid job id" not in answer.stderr
        return bool(answer.stdout.strip())

    def collect(self) -> list[RunSpec]:
        """Store what has been measured; return the runs that are missing."""
        for spec in (spec for spec in self.missing() if self.raw(spec).exists()):
            try:
                self.queue.keep(spec, from_raw(spec, self.raw(spec), self.per_node, "real"), 0.0)
            except RunError as error:
                self.queue.fail(spec, str(error))
        return self.missing()

    def missing(self) -> list[RunSpec]:
        return [spec for spec in self.queue.missing() if spec.of is self.one]

    def reason(self, spec: RunSpec) -> str:
        """Return why a job that has ended left no measurement."""
        error = self.raw(spec).with_suffix(".error")
        ended = f"job {self.number(spec.size)} ended before this run (time limit, cancelled, or a node failed)"
        return f"{error.read_text().strip() if error.exists() else ended}; logs in {self.folder}"

    def run(self) -> None:
        """Submit what is missing, wait, and collect."""
        launch = self.one.launch
        notes = [
            medians(launch) + ".",
            "All methods of a size ran on the same nodes, one after the other; every size is a job of its own.",
            PEERS_NOTE,
        ]
        setup = {"launcher": "slurm", "machine": self.machine, "notes": notes}
        self.queue.store.note(SETUP, self.one.name, {}, setup, command_of("scripts.study"))
        missing, begin = self.collect(), time.monotonic()
        for size in dict.fromkeys(spec.size for spec in missing):
            self.submit(size, [spec for spec in missing if spec.size == size])
        while waiting := [size for size in sorted({spec.size for spec in self.collect()}) if self.alive(size)]:
            minutes = (time.monotonic() - begin) / 60
            print(f"{minutes:.0f} min: {len(self.missing())} runs missing; {waiting} ranks queued", flush=True)
            time.sleep(self.args.poll)
        for spec in self.missing():
            self.queue.fail(spec, self.reason(spec))


def run(queue: Queue, args: argparse.Namespace) -> None:
    """Run the sets of a queue."""
    for one in [SlurmSet(queue, one, args) for one in queue.sets]:
        one.run()

"""The launcher `slurm`: jobs that run the methods of a size in turn on the same nodes.

A job that has been submitted continues without this process; the same command later collects the results.

Settings of a set's `launch`:

    machine         preset of the planner; its job file in scripts/slurm, otherwise cluster.sbatch there
    steps, warm_up  measured steps, and steps before them
    timeout         a run's share of the job's time in seconds, in the place of START and MARGIN

Tokens are random, of the model's vocabulary. Methods that exceed the limit of a job's time (HOURS, or --time in
--sbatch) are divided over several jobs.
"""

import argparse
import math
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.common import ROOT, RunError, command_of, read, write
from scripts.study.grid import BudgetSet, RunSpec
from scripts.study.peers import PEERS
from scripts.study.queue import Queue
from scripts.study.store import SETUP
from scripts.study.timed import NEVER, PEERS_NOTE, TIMED, from_raw, medians, timing, wanted
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.patching import environment
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.configured import method_of, shard_axis_of
from torchtitan_scape.planner.step import predict
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import Links, Machine, get_machine
from torchtitan_scape.trainer.layout import checked_layout
from torchtitan_scape.trainer.specs import register

DEVICE = "cuda"  # of the nodes; this process may run on a login node without a GPU
START = 300.0  # seconds of a run before its first step: imports, groups, torch.compile
MARGIN = 2.0  # factor on the predicted step time
END = 60.0  # seconds of a run after its last step: the summary, and the grace period of a run that is ended
HOURS = {"vista": 48.0, "frontier": 2.0}  # TACC: queue gh; OLCF: up to 91 nodes
# A sweep is neither requeued nor asked for checkpoints, and its time follows from its runs.
NOT_OF_A_SWEEP = ("--requeue", "--signal", "--time", "--job-name", "--output")
# Options that replace gated tokenizers and data of the hub by files of this repository.
OFFLINE = ("--model.hf_assets_path=./torchtitan_scape/data/tokenizer", "--training.dataset=standard_library")


class SlurmSet:
    """The jobs of one set. Job files and measurements are in `folder`, which the nodes must see."""

    def __init__(self, queue: Queue, one: BudgetSet, args: argparse.Namespace) -> None:
        self.queue, self.one, self.args = queue, one, args
        self.machine = one.launch["machine"]
        self.per_node = get_machine(self.machine).ranks_per_node
        self.folder = (queue.work / one.name).resolve()
        try:
            self.options_of_sbatch = shlex.split(args.sbatch)
        except ValueError as error:
            raise ValueError(f"--sbatch {args.sbatch!r}: {error}") from None
        uneven = [size for size in one.sizes if size % self.per_node]
        if uneven:
            raise ValueError(f"set {one.name!r}: {uneven[0]} ranks, but a node of {self.machine} has {self.per_node}")
        self.limit = time_limit(self.options_of_sbatch) or 3600.0 * HOURS.get(self.machine, 24.0)
        self.shares = {spec.key: self.share(spec) for spec in self.missing()}
        if shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch on PATH; run this on a login node, or with launcher = 'predicted'")

    def share(self, spec: RunSpec) -> float:
        """Return the seconds that a run may take. Raises ValueError if the run cannot start or does not fit."""
        try:
            step = step_seconds(spec, self.options(spec), get_machine(self.machine))
        except ValueError as error:
            raise ValueError(f"{spec.title}: {error}") from None
        planned = math.ceil(START + MARGIN * timing(spec)["steps"] * step)
        share = float(self.one.launch.get("timeout", planned))
        if share + END > self.limit:
            raise ValueError(
                f"{spec.title}: {timing(spec)['steps']} steps of {step:.1f} s (predicted) need {share / 60:.0f} min, "
                f"and a job has {self.limit / 60:.0f}; give more with --sbatch, or fewer steps or more ranks"
            )
        return share

    def raw(self, spec: RunSpec) -> Path:
        return self.folder / "raw" / f"{spec.name}-{spec.size}.json"

    def jobs(self, specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
        """Divide runs of a size over as few jobs as their time allows, in order."""
        jobs: list[list[RunSpec]] = []
        for spec in specs:
            if not jobs or self.seconds([*jobs[-1], spec]) > self.limit:
                jobs.append([])
            jobs[-1].append(spec)
        return jobs

    def seconds(self, specs: Sequence[RunSpec]) -> float:
        return sum(self.shares[spec.key] + END for spec in specs)

    def node_hours(self, specs: Sequence[RunSpec]) -> float:
        """Return the node-hours that the jobs of these runs request."""
        return sum(self.seconds([spec]) * spec.size / self.per_node for spec in specs) / 3600.0

    def write_job(self, name: str, specs: Sequence[RunSpec]) -> Path:
        """Write a job: the machine's own file, once per method. A failed method does not stop the next."""
        folder = ROOT / "scripts" / "slurm"
        own = folder / f"{self.machine}.sbatch"
        machine = own if own.exists() else folder / "cluster.sbatch"
        given = [line for line in machine.read_text().splitlines() if line.startswith("#SBATCH")]
        headers = [line for line in given if not any(option in line for option in NOT_OF_A_SWEEP)]
        minutes = math.ceil(self.seconds(specs) / 60)
        lines = ["#!/bin/bash", *headers, f"#SBATCH --job-name=scape-{name}", "#SBATCH --no-requeue"]
        lines += [f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00"]
        lines += [f"#SBATCH --output={self.folder}/%x-%j.out"]
        lines += [f"cd {shlex.quote(str(ROOT))} || exit 2", "source scripts/slurm/limit.sh"]
        lines += [f'export TRAIN_SCRIPT="-m {" ".join(TIMED)}" REQUEUE_LIMIT=0']
        for spec in specs:
            raw = self.raw(spec)
            values = {"CONFIG_FILE": spec.config_file, "TIMED_RUN": wanted(spec, raw, synthetic=True)}
            values["LOG_DIR"] = f"{self.folder}/{spec.name}"
            exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
            command = shlex.join([f"{self.shares[spec.key]:g}", "bash", str(machine), *self.options(spec)])
            failed = shlex.quote(str(raw.with_suffix(".error")))
            lines += ["", f"rm -f {failed}", f"export {exported}"]
            lines += [f'limited {command} || echo "exit code $?" >{failed}']
        (self.folder / "raw").mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.sh"
        write(path, "\n".join(lines) + "\n")
        return path

    def options(self, spec: RunSpec) -> list[str]:
        """Return the trainer's command line without the recipe, which ./run_train.sh adds."""
        return [
            *spec.arguments[1:],
            *OFFLINE,
            f"--job.dump_folder={self.folder / 'runs' / spec.name}",
            f"--training.steps={timing(spec)['steps']}",
            f"--metrics.log_freq={NEVER}",
            "--validation.no-enable",
            "--checkpoint.no-enable",
        ]

    def submit(self, size: int, specs: Sequence[RunSpec]) -> None:
        """Submit the jobs of a size."""
        numbers: list[str] = []
        jobs = self.jobs(specs)
        for i, part in enumerate(jobs):
            name = f"size-{size}" + (f"-{i + 1}" if len(jobs) > 1 else "")
            command = ["sbatch", "--parsable", f"--nodes={size // self.per_node}", *self.options_of_sbatch]
            answer = subprocess.run([*command, str(self.write_job(name, part))], capture_output=True, text=True)
            if answer.returncode:  # some sites' filters print the reason to the standard output
                output = " ".join((answer.stdout + answer.stderr).split())
                raise ValueError(f"sbatch refused the job of {size} ranks: {output}")
            numbers.append(job_number(answer.stdout))
            write(self.folder / f"size-{size}.json", {"jobs": numbers})
            minutes = math.ceil(self.seconds(part) / 60)
            print(f"[{size} ranks] submitted job {numbers[-1]} with {len(part)} runs, at most {minutes} min")

    def numbers(self, size: int) -> list[str]:
        return list((read(self.folder / f"size-{size}.json") or {}).get("jobs", ()))

    def alive(self, size: int) -> bool:
        if not (numbers := self.numbers(size)):
            return False
        command = ["squeue", "--noheader", f"--jobs={','.join(numbers)}"]
        answer = subprocess.run(command, capture_output=True, text=True)
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
        numbers = ", ".join(self.numbers(spec.size))
        ended = f"job {numbers} ended before this run (time limit, cancelled, or a node failed)"
        return f"{error.read_text().strip() if error.exists() else ended}; logs in {self.folder}"

    def run(self) -> None:
        """Submit what is missing, wait, and collect."""
        notes = [
            medians(self.one.launch) + ".",
            "The methods of a job ran on the same nodes, one after the other. A size has a job of its own, or several "
            "if its methods need more time than a job may have.",
            "Tokens are random, of the model's vocabulary; nothing is learned.",
            PEERS_NOTE,
        ]
        setup = {"launcher": "slurm", "machine": self.machine, "notes": notes}
        self.queue.store.note(SETUP, self.one.name, {}, setup, command_of("scripts.study"))
        missing, begin = self.collect(), time.monotonic()
        new: dict[int, list[RunSpec]] = {}
        for size in dict.fromkeys(spec.size for spec in missing):
            if self.alive(size):
                print(f"[{size} ranks] job {', '.join(self.numbers(size))} is in the queue")
            else:
                new[size] = [spec for spec in missing if spec.size == size]
        runs = [spec for specs in new.values() for spec in specs]
        hours = math.ceil(self.node_hours(runs))
        print(f"{self.one.name}: {len(runs)} runs to submit, at most {hours} node-hours", flush=True)
        for size, specs in new.items():
            self.submit(size, specs)
        while waiting := [size for size in sorted({spec.size for spec in self.collect()}) if self.alive(size)]:
            minutes = (time.monotonic() - begin) / 60
            print(f"{minutes:.0f} min: {len(self.missing())} runs missing; {waiting} ranks queued", flush=True)
            time.sleep(self.args.poll)
        for spec in self.missing():
            self.queue.fail(spec, self.reason(spec))


def step_seconds(spec: RunSpec, arguments: list[str], machine: Machine) -> float:
    """Return the step time of a run that the planner predicts from the links of its machine.

    Args:
        arguments: The trainer's command line.
        machine: Where the recipe leaves it to the device's name.

    Raises:
        ValueError: The trainer would refuse the run before its first step.
    """
    config, layout = checked(spec, arguments, machine)
    return predict(
        method_of(config),
        workload_of(config),
        layout,
        Links.from_machine(layout.machine),
        batch=config.training.global_batch_size,
        micro_batch=config.training.local_batch_size,
        shard_axis=shard_axis_of(config, layout)[0],
    ).step


def checked(spec: RunSpec, arguments: list[str], machine: Machine) -> tuple[JobConfig, Layout]:
    """Return configuration and layout after the checks of the trainer before its first step."""
    config = parse([f"--job.config_file={spec.config_file}", *arguments])
    config.topology.ranks_per_node = config.topology.ranks_per_node or machine.ranks_per_node
    if config.topology.machine == "auto":
        config.topology.machine = machine.name  # type: ignore[assignment]  # one of the presets
    with environment(WORLD_SIZE=str(spec.size)):
        layout = checked_layout(config, DEVICE)
    register(config, with_data=False)
    peer = str(spec.about.get("peer", ""))
    if peer and peer not in PEERS:
        raise ValueError(f"there is no peer {peer!r}; known are {', '.join(PEERS)}")
    shards = layout.shard * layout.context
    if peer.startswith("ddp") and shards > 1:
        raise ValueError(f"DDP has no shards, but the shard degree is {shards}; set data_parallel_shard_degree = 1")
    if peer == "distributed-optimizer" and shards == 1:
        raise ValueError("the distributed optimizer shards over all ranks; set data_parallel_shard_degree = -1")
    return config, layout


def job_number(output: str) -> str:
    """Return the job number in the output of `sbatch --parsable`: the last line of the form NUMBER or NUMBER;CLUSTER.

    Some sites print a banner around it. Raises ValueError if there is no such line; the job may have been submitted.
    """
    numbers = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
    if not numbers:
        raise ValueError(f"sbatch printed no job number, see squeue --me for the job: {' '.join(output.split())}")
    return str(numbers[-1])


def time_limit(options: Sequence[str]) -> float:
    """Return the seconds of --time or -t among the options of sbatch: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    0 without it. Raises ValueError for a time that sbatch does not know.
    """
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("-t", "--time", default="0")
    text = known.parse_known_args(options)[0].time
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ValueError(f"--sbatch: the time {text!r} is none that sbatch knows; write H:M:S")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400.0 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def run(queue: Queue, args: argparse.Namespace) -> None:
    """Run the sets of a queue."""
    for one in [SlurmSet(queue, one, args) for one in queue.sets]:
        one.run()

"""A stand-in for srun: starts the tasks of a step as local processes, with Slurm's environment variables.

Nodes differ only in SLURM_NODEID. The variables and their formats are those of Slurm's env.c (release 26.05):
SLURM_STEP_* describe the step, SLURM_TASKS_PER_NODE is compressed ("8(x2)"), SLURM_NTASKS_PER_NODE is the requested
number. An unknown option is an error, so that mistakes in a launch line are found.

STANDIN_SIGNAL_WHEN=PATH sends SIGUSR1 to the batch script once PATH exists and the tasks run Python, as
--signal=B:USR1@... does near the time limit. Like srun, this program passes SIGUSR1 to the tasks.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

# GCD of each of Frontier's L3 regions; with --gpu-bind=closest these are the GCDs of local tasks 0 to 7.
CLOSEST = (4, 5, 2, 3, 6, 7, 0, 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in ("nodes", "ntasks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, default=1)
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--gpus-per-task", type=int)
    parser.add_argument("--gpu-bind", choices=("closest",))
    parser.add_argument("--cpu-bind", choices=("none",))
    parser.add_argument("--distribution", default=os.environ.get("SLURM_DISTRIBUTION", "block"))
    parser.add_argument("--kill-on-bad-exit", type=int, choices=(0, 1), default=0)
    parser.add_argument("--export", choices=("ALL",), required=True)
    for name in ("image", "mounts", "workdir", "env"):  # of Pyxis
        parser.add_argument(f"--container-{name}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def place(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return node and local index of every task."""
    # Not a variable of Slurm: a test sets it to simulate a site with another distribution than the requested one.
    distribution = os.environ.get("STANDIN_DISTRIBUTION", options.distribution)
    taken = [0] * options.nodes
    places = []
    for task in range(options.ntasks):
        cyclic = distribution.startswith("cyclic")
        node = task % options.nodes if cyclic else task // options.ntasks_per_node
        places.append((node, taken[node]))
        taken[node] += 1
    return places


def compressed(counts: list[int]) -> str:
    parts = []
    for count, repeats in groupby(counts):
        times = len(list(repeats))
        parts.append(f"{count}(x{times})" if times > 1 else str(count))
    return ",".join(parts)


def environments(options: argparse.Namespace) -> list[dict[str, str]]:
    places = place(options)
    per_node = compressed([sum(node == n for node, _ in places) for n in range(options.nodes)])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NUM_NODES": str(options.nodes),
        "SLURM_STEP_NUM_TASKS": str(options.ntasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_NNODES": str(options.nodes),
        "SLURM_NTASKS": str(options.ntasks),
        "SLURM_NPROCS": str(options.ntasks),
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_DISTRIBUTION": os.environ.get("STANDIN_DISTRIBUTION", options.distribution),
    }
    step["STANDIN_OPTIONS"] = " ".join(sys.argv[1 : -len(options.command)])
    if options.cpus_per_task:
        step["SLURM_CPUS_PER_TASK"] = str(options.cpus_per_task)
    found = []
    for task, (node, local) in enumerate(places):
        own = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        if options.gpus_per_task == 1 and options.gpu_bind == "closest":
            own["ROCR_VISIBLE_DEVICES"] = str(CLOSEST[local])
        found.append({**os.environ, **step, **own})
    return found


def runs_python(task: subprocess.Popen[bytes]) -> bool:
    """Return whether rank.sh has become Python. Just before, it loses a signal (see there)."""
    try:
        program = Path(f"/proc/{task.pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:  # it has ended
        return False
    return "python" in Path(os.fsdecode(program)).name


def end(tasks: list[subprocess.Popen[bytes]]) -> None:
    """Terminate the tasks, and kill those that do not end."""
    for sign, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, sign)
        limit = time.monotonic() + patience
        while time.monotonic() < limit and any(task.poll() is None for task in tasks):
            time.sleep(0.05)


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tasks: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    try:
        for environment in environments(options):
            tasks.append(subprocess.Popen(options.command, env=environment, start_new_session=True))
        near_the_end = os.environ.get("STANDIN_SIGNAL_WHEN")
        while any(task.poll() is None for task in tasks):
            if near_the_end and Path(near_the_end).exists() and all(map(runs_python, tasks)):
                near_the_end = None
                os.kill(os.getppid(), signal.SIGUSR1)
            if options.kill_on_bad_exit and any(task.poll() for task in tasks):
                break
            time.sleep(0.05)
    finally:
        end(tasks)
    # The code of a task that was ended by a signal is 128 plus the signal; the step's code is the highest one.
    return max(code if (code := task.wait()) >= 0 else 128 - code for task in tasks)


if __name__ == "__main__":
    sys.exit(main())

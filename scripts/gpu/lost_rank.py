"""SIGKILL of a rank under NCCL: whether the other one ends, who it says was lost, and after how long.

    python -m scripts.gpu.lost_rank --result FILE
    python -m scripts.gpu.lost_rank --smoke --result FILE    # gloo on a CPU

The trainer on two launchers of one rank each, both on the first GPU, as `scripts.gpu.ranks` has them. No start again.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common import RunError, guarded, parser, write
from scripts.faults.fault_runs import TINY, Launch, free_endpoint, seconds_until_gone
from scripts.gpu.machine import patience
from scripts.gpu.ranks import nccl_alone

BEGIN_SECONDS, GONE_SECONDS, END_SECONDS = 75.0, 15.0, 10.0


def start(node: int, command: Sequence[str], environment: dict[str, str], log: Any) -> "subprocess.Popen[Any]":
    env = {**os.environ, **environment, **nccl_alone(node)}
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def run(args: argparse.Namespace) -> None:
    found, more = dict[str, Any](ranks=2), patience(args.smoke)
    environment = {"NNODES": "2", "RDZV_ENDPOINT": free_endpoint(), "PYTHON": os.environ.get("PYTHON", sys.executable)}
    environment["PET_LOCAL_ADDR"] = "127.0.0.1"  # the machine's own name may not resolve
    arguments = [*TINY, "--training.steps=100000", "--checkpoint.no-enable", "--lr_scheduler.decay_ratio=0.1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Launch(arguments, Path(folder), nodes=2, ranks_per_node=1, environment=environment, start=start) as launch,
    ):
        launch.wait_for_training(1, more * BEGIN_SECONDS)
        launch.wait_until(lambda: max(launch.steps(), default=0) >= 3, more * BEGIN_SECONDS, "step 3")
        ranks = launch.ranks()
        found["step"] = max(launch.steps())
        os.kill(ranks[1], signal.SIGKILL)
        found["seconds until all ranks had ended"] = round(
            seconds_until_gone(list(ranks.values()), more * GONE_SECONDS), 2
        )
        write(args.result, found)
        found["exit codes"] = launch.wait(more * END_SECONDS)
        told = [line for line in launch.output().splitlines() if line.startswith("error: ") or "lost" in line]
        found["lost rank named"] = any("rank 1" in line for line in told)
        found["told"] = told[:6]
        write(args.result, found)
        print(f"gone after {found['seconds until all ranks had ended']} s: {told[:2]}", flush=True)
    if not found["lost rank named"] or 0 in found["exit codes"]:
        raise RunError(f"exit codes {found['exit codes']}; told was {found['told']}")


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--result", type=Path, required=True)
    own.add_argument("--smoke", action="store_true", help="on whatever device there is")
    args = own.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())

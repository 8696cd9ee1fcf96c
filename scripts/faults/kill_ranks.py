"""Kill random ranks at random moments, and compare each run's last checkpoint with that of an undisturbed run.

    python -m scripts.faults.kill_ranks --seeds 20

Every second seed kills while a checkpoint is being written; two of four save asynchronously, and two of four run on two
launchers. A run survives if it restarts by itself and its last checkpoint equals the undisturbed run's in every bit,
optimizer state included. Results are stored in results/faults/kill.json and kill.md; stored seeds are skipped.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, RunError, markdown, read, run_command, write
from scripts.faults.fault_runs import TINY, Launch, differences, seconds_until_gone

STEPS = 24
ARGUMENTS = [*TINY, f"--training.steps={STEPS}"]
LIMIT_SECONDS = 600.0  # for a start, on a shared machine


def one(seed: int, folder: Path, whole: Path) -> dict[str, Any]:
    """Run one seed; return the row of the table."""
    dice = random.Random(seed)
    during_a_save, saving, nodes = seed % 2 == 1, ("sync", "async")[seed // 2 % 2], 1 + seed % 4 // 2
    arguments = [*ARGUMENTS, *(["--checkpoint.async_mode=async"] if saving == "async" else [])]
    with Launch(arguments, folder, nodes, 2 // nodes, {"MAX_RESTARTS": "3"}) as run:
        run.wait_for_training(1, LIMIT_SECONDS)
        time.sleep(dice.uniform(0.0, 4.0))
        caught = run.wait_for_a_save() if during_a_save else False
        ranks = run.ranks()
        victim = dice.choice(sorted(ranks))
        reached = max(run.steps(), default=0)
        os.kill(ranks[victim], signal.SIGKILL)
        seconds = seconds_until_gone(list(ranks.values()), 60.0)
        codes = run.wait(LIMIT_SECONDS)
        resumed, named = run.resumed_at(), f"error: rank {victim} (" in run.output()
    ended = codes == [0] * nodes
    last = f"checkpoint/step-{STEPS}"
    equal = ended and not differences(whole / last, folder / last, folder)
    return {
        "seed": seed,
        "rank": victim,
        "nodes": nodes,
        "saving": saving,
        "during a save": caught,
        "step reached": reached,
        "seconds until all ranks had ended": round(seconds, 2),
        "lost rank named": named,
        "steps taken again": reached - max(resumed) + 1,
        "exit codes": codes,
        "equal to the last bit": equal,
    }


def table(rows: list[dict[str, Any]]) -> str:
    survived = [row for row in rows if row["equal to the last bit"]]
    seconds = sorted(row["seconds until all ranks had ended"] for row in rows)
    cells = [{k: {True: "yes", False: "no"}[v] if isinstance(v, bool) else v for k, v in row.items()} for row in rows]
    return f"""# Ranks killed at random

{len(rows)} runs of {STEPS} steps on 2 ranks (`python -m scripts.faults.kill_ranks`), each with one SIGKILL: \
{len(survived)} started again by themselves and ended as the undisturbed run, to the last bit. From the fault to the \
end of all ranks: median {seconds[len(seconds) // 2]:.2f} s, at most {seconds[-1]:.2f} s, on two CPU cores that \
others used as well.

{markdown(cells)}
"""


def run(args: argparse.Namespace) -> int:
    if args.seeds < 1:
        raise ValueError(f"--seeds is {args.seeds}; it must be 1 or more")
    stored = args.output / "kill.json"
    rows: list[dict[str, Any]] = read(stored) or []
    scratch = Path(tempfile.mkdtemp(prefix="scape-kill-"))
    whole = scratch / "whole"
    with Launch(ARGUMENTS, whole) as undisturbed:
        if undisturbed.wait(LIMIT_SECONDS) != [0]:
            raise RunError(f"the undisturbed run failed: {undisturbed.output()[-2000:]}")
    for seed in sorted(set(range(args.seeds)) - {row["seed"] for row in rows}):
        folder = scratch / f"seed-{seed}"
        rows = sorted([*rows, one(seed, folder, whole)], key=lambda row: row["seed"])
        print(next(row for row in rows if row["seed"] == seed), flush=True)
        write(stored, rows)
        write(args.output / "kill.md", table(rows))
        shutil.rmtree(folder)
    shutil.rmtree(scratch)
    return 0 if all(row["equal to the last bit"] for row in rows) else 1


if __name__ == "__main__":
    options = {"--seeds": dict(type=int, default=20), "--output": dict(type=Path, default=RESULTS / "faults")}
    sys.exit(run_command(__doc__, run, options))

"""Kills random ranks at random moments, and holds the end of each run against that of one that nobody disturbed.

    python -m scripts.faults.kill_ranks --seeds 20

Of every two seeds one waits until a checkpoint is being written, and of every four two save asynchronously and two run
on two launchers. A run counts as survived if it started again by itself, came to its end, and its last checkpoint
equals the undisturbed run's, optimizer state included, to the last bit. The table goes to results/faults/kill.md and
.json; seeds that are there already are not run again.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # where the packages are not installed
    sys.path.insert(0, str(ROOT))

from scripts.faults.fault_runs import TINY, Launch, differences, seconds_until_gone  # noqa: E402

STEPS = 24
ARGUMENTS = [*TINY, f"--training.steps={STEPS}"]
LIMIT_SECONDS = 600.0  # of a start, on a machine that others use as well


def one(seed: int, folder: Path, whole: Path) -> dict[str, Any]:
    """Runs one seed; what happened."""
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
        output = run.output()
        resumed = [int(step) for step in re.findall(r"rank0\]:.* Training starts at step (\d+)", output)]
    named = f"error: rank {victim} (" in output
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
    names = list(rows[0])
    survived = [row for row in rows if row["equal to the last bit"]]
    seconds = sorted(row["seconds until all ranks had ended"] for row in rows)
    lines = [
        "# Ranks killed at random",
        "",
        f"{len(rows)} runs of {STEPS} steps on 2 ranks (`python -m scripts.faults.kill_ranks`), each with one SIGKILL: "
        f"{len(survived)} started again by themselves and ended as the undisturbed run, to the last bit. From the "
        f"fault to the end of all ranks: median {seconds[len(seconds) // 2]:.2f} s, at most {seconds[-1]:.2f} s, on "
        "two CPU cores that others used as well.",
        "",
        "| " + " | ".join(names) + " |",
        "| " + " | ".join("---" for _ in names) + " |",
    ]
    for row in rows:
        cells = [{True: "yes", False: "no"}[v] if isinstance(v, bool) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "faults")
    options = parser.parse_args()
    if options.seeds < 1:
        print(f"error: --seeds is {options.seeds}; it must be 1 or more", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    stored = options.output / "kill.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text()) if stored.exists() else []
    todo = [seed for seed in range(options.seeds) if seed not in {row["seed"] for row in rows}]
    scratch = Path(tempfile.mkdtemp(prefix="scape-kill-"))
    whole = scratch / "whole"
    with Launch(ARGUMENTS, whole) as run:
        if run.wait(LIMIT_SECONDS) != [0]:
            print(f"error: the undisturbed run failed: {run.output()[-2000:]}", file=sys.stderr)
            return 1
    for seed in todo:
        folder = scratch / f"seed-{seed}"
        try:
            row = one(seed, folder, whole)
        except RuntimeError as error:
            print(f"error: seed {seed}: {error}", file=sys.stderr)
            return 1
        rows = sorted([*rows, row], key=lambda row: row["seed"])
        print(row, flush=True)
        stored.write_text(json.dumps(rows, indent=1) + "\n")
        (options.output / "kill.md").write_text(table(rows))
        shutil.rmtree(folder)
    shutil.rmtree(scratch)
    return 0 if all(row["equal to the last bit"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

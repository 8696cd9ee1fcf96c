"""A run of a study over several sittings: one that was killed continues from its newest complete checkpoint.

A simulated run with a budget saves its exact state about CHECKPOINTS times, at steps that are logged and not validated.
The metrics logged until a checkpoint are then on the disk with it, and the values of the next sitting are those of an
uninterrupted run. A validation follows the save of its step, so that a kill between the two would lose it.

Every run with these options continues from the folder until its result is stored, whatever the version of the code and
the reason of its end; delete the folder to start the run anew.
"""

import math
import shutil
import time
from pathlib import Path

from scripts.common import read, write
from scripts.study.grid import RunSpec
from torchtitan_scape.checkpoint.storage import is_complete, remove, steps_in
from torchtitan_scape.runtime.folder_lock import FolderLock
from torchtitan_scape.runtime.liveness import STOPPED

CHECKPOINTS = 16
LOG, TIMES = "log.txt", "sitting.json"


def interval(spec: RunSpec) -> int:
    """Return the number of steps between a run's checkpoints; 0 for a run that always starts anew.

    These are short runs, those of a module that may have state of its own, and those whose grid sets `checkpoint`.
    """
    if spec.of.launcher != "simulated" or not spec.of.batch or "program" in spec.about:
        return 0
    if "checkpoint.enable" in spec.options:
        return 0
    logged, validated = spec.overrides["metrics.log_freq"], spec.overrides["validation.freq"]
    first = logged * max(1, round(spec.steps / CHECKPOINTS / logged))
    found = (n for n in range(first, spec.steps, logged) if n > 1 and math.lcm(n, validated) >= spec.steps)
    return next(found, 0)


def checkpoint_arguments(spec: RunSpec) -> list[str]:
    """Return the trainer's options of checkpoints, which are not part of a run's identity."""
    if not (steps := interval(spec)):
        return []
    return ["--checkpoint.enable", f"--checkpoint.interval={steps}", "--checkpoint.keep_latest_k=2"]


def begin(spec: RunSpec, out: Path) -> float:
    """Prepare a run's folder for a sitting: empty, or with the checkpoints from which the trainer continues.

    Returns:
        The seconds of the earlier sittings, which the log's last line ends.

    Raises:
        ValueError: A process uses the folder, for example the trainer of a study that was killed.
    """
    FolderLock(out).release()
    folder, every, seconds = out / "checkpoint", interval(spec), 0.0
    # A trainer that was stopped on request saves any step, and the last one stores the model alone.
    usable = {step for step in steps_in(str(folder)) if every and step % every == 0 and step < spec.steps}
    usable = {step for step in usable if is_complete(folder / f"step-{step}")}
    if usable and (times := read(out / TIMES)):
        seconds = times["earlier"] + max(0.0, (out / LOG).stat().st_mtime - times["begun"])
        for step in set(steps_in(str(folder))) - usable:
            remove(folder / f"step-{step}")
    else:
        shutil.rmtree(out)
        out.mkdir()
    write(out / TIMES, {"earlier": seconds, "begun": time.time()})
    return seconds


def stopped(code: int) -> bool:
    """Return whether a trainer with this exit code, negative for a signal, was stopped and can continue."""
    return code < 0 or code >= 128 or code == STOPPED


def end(spec: RunSpec, out: Path) -> None:
    """Delete the checkpoints of a run whose result is stored."""
    if interval(spec):
        shutil.rmtree(out / "checkpoint", ignore_errors=True)

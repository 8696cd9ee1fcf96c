"""Shared by the scripts: commands, files, tables, and the trainer as a process.

Scripts are modules, started from the repository's root: `python -m scripts.study run quality_study`.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_scape.core.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS, OUTPUTS = ROOT / "results", ROOT / "outputs"
EMBEDDED = "train_configs/embedded.toml"
# The variables that torchrun sets for a single process; its imports take as long as a short run.
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
Curve = list[tuple[int, float]]


class RunError(RuntimeError):
    """A run that failed; the message is for the user."""


# --------------------------------------------------------------------------------------------- commands


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a script's argument parser, described by its docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
    )


def run_command(
    doc: str | None,
    work: Callable[[argparse.Namespace], int | None],
    arguments: Mapping[str, Any],
    stopped: str = "stopped; the same command goes on from here",
) -> int:
    """Parse a command's arguments, options by flag and others by name, and do its work with them, as in `guarded`."""
    own = parser(doc)
    for name, options in arguments.items():
        own.add_argument(name, **options)
    args = own.parse_args()
    return guarded(lambda: work(args), stopped)


def given_command(arguments: list[str]) -> list[str]:
    """Return the command that a user has given after "--". Raises ValueError without one."""
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        raise ValueError("no command is given; put it after --, such as -- ./run_train.sh --training.steps=20")
    return command


def guarded(work: Callable[[], int | None], stopped: str = "stopped; the same command goes on from here") -> int:
    """Do a command's work and return its exit code.

    Wrong input and failed runs print one line and return 2. Ctrl-C and SIGTERM raise KeyboardInterrupt in the work, so
    that it ends its children, and return 130.
    """

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return work() or 0
    except (ValueError, OSError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def command_of(module: str) -> str:
    """Return the command of this process, for a report."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def names(text: str) -> list[str]:
    """Split an argument at its commas."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


# -------------------------------------------------------------------------------------------- processes


def process_state(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def kill(pids: Sequence[int]) -> None:
    """Send SIGKILL to those processes that exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ files


def write(path: Path, content: Any) -> None:
    """Write a text, or anything else as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content if isinstance(content, str) else json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Any:
    """Return the JSON content of a file; None if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"python": platform.python_version()} | {name: package_version(name) for name in ("torch", "torchtitan")}


def commit(*paths: str, untracked: str = "no") -> str:
    """Return the commit, with "-dirty" if files in `paths` have changed; "" outside of a git repository.

    untracked: "normal" if new files count, too; see `git status --untracked-files`.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", f"--untracked-files={untracked}", "--", *paths)
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def without_paths(text: str) -> str:
    """Shorten absolute paths to their last part."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


# ----------------------------------------------------------------------------------------------- tables


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table; the keys of the first row are its header."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(str(field).replace("|", "\\|") for field in line) + " |" for line in lines)


def spread(values: Sequence[float], form: str) -> str:
    """Return mean and sample standard deviation, the latter only of several values."""
    if not values:
        return "-"
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}"


def number(value: float | None, form: str = ".1f", scale: float = 1.0) -> str:
    return "-" if value is None else format(scale * value, form)


def ms(seconds: float | None) -> str:
    return number(seconds, ".1f", 1e3)


def megabytes(value: float | None) -> str:
    return number(value, ".3f" if value is not None and value < 1e8 else ".1f", 1e-6)


# ------------------------------------------------------------------------------------------ the trainer


def losses(folder: Path, **more: str) -> dict[str, Curve]:
    """Return (step, value) of the losses of training and validation and of further tags from the logs under `folder`.

    A run that was resumed has a log of each start; the last value of a step counts. Validation may be missing.

    Raises:
        KeyError: No TensorBoard log has one of the other tags.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    tags = {"training": "loss_metrics/global_avg_loss", "validation": "validation_metrics/loss"} | more
    found: dict[str, dict[int, float]] = {name: {} for name in tags}
    for events in sorted(folder.rglob("events.out*"), key=lambda path: path.name):  # the name has the time
        accumulator = EventAccumulator(str(events), size_guidance={SCALARS: 0})
        accumulator.Reload()
        for name in (name for name, tag in tags.items() if tag in accumulator.Tags()[SCALARS]):
            found[name] |= {event.step: event.value for event in accumulator.Scalars(tags[name])}
    for name, curve in found.items():
        if not curve and name != "validation":
            raise KeyError(f"{tags[name]} is in no TensorBoard log under {folder}")
    return {name: sorted(curve.items()) for name, curve in found.items()}

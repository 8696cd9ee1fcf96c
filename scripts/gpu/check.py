"""One part of the GPU check, step by step: `scripts/gpu_check.sh PART`.

    python -m scripts.gpu.check speed
    python -m scripts.gpu.check training --only throughput-adamw,throughput-scape --output DIR
    python -m scripts.gpu.check correctness --smoke    # tiny sizes, on a CPU too
    python -m scripts.gpu.check lease --seconds 540    # the most important steps of all parts

Each step is a process with its own time limit, at most the rest of the part's; steps receive the time that others do
not use. A failed step does not stop the next one. Results are stored in OUTPUT/DEVICE/results.json while steps run,
their output in PART.log, and tables in report.md. Parts may run at the same time, if no time is measured. `lease`
stores each step in its own part, and leaves out those that passed with the present sources. The exit code is 1 if a
step failed or was cut off.
"""

import argparse
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common import OUTPUTS, RESULTS, ROOT, RunError, names, read, run_command, write
from scripts.gpu.machine import clocks, folder_of, patience, sources
from scripts.gpu.processes import END_SECONDS, POLL, end_group, python
from scripts.gpu.report import RESULTS_FILE, write_report

PART_SECONDS = 480.0  # at most; the limits of the steps together if these are lower
CLOCK_SECONDS = 10.0  # between two readings of the GPU's clocks


# By importance: the lowest time limit of each step in seconds, and its function and arguments for `scripts.gpu.step`.
# The limits may exceed the part's: the last steps then have less time, or are not started.
PARTS: dict[str, dict[str, tuple[float, str]]] = {
    "correctness": {
        "tests": (360, "scripts.gpu.correctness:tests"),
        "sanitizer": (110, "scripts.gpu.correctness:sanitizer memcheck"),
        "races": (90, "scripts.gpu.correctness:sanitizer racecheck,synccheck"),
    },
    "speed": {
        "passes-500m": (120, "scripts.gpu.passes:passes llama_500m"),
        "passes-1.8b": (150, "scripts.gpu.passes:passes llama_1_8b"),
        "methods": (90, "scripts.gpu.method_steps:method_steps llama_1_8b 1 adamw {rows}"),
        "methods-muon": (60, "scripts.gpu.method_steps:method_steps llama_500m 1 muon {rows}"),
        "methods-muon-shard": (60, "scripts.gpu.method_steps:method_steps llama_1_8b 8 muon {rows}"),
        "methods-shard": (100, "scripts.gpu.method_steps:method_steps llama_1_8b 8 adamw {rows}"),  # of an 8-GPU node
        "traffic": (95, "scripts.gpu.memory_traffic:count"),
        "codes": (60, "scripts.gpu.passes:codes"),
        "tiles": (40, "scripts.gpu.passes:tiles"),
    },
    "training": {
        "throughput-adamw": (70, "scripts.gpu.training:throughput adamw"),  # compiles for the others too
        "throughput-scape": (50, "scripts.gpu.training:throughput scape"),
        "throughput-muon": (50, "scripts.gpu.training:throughput muon"),
        "throughput-quantized_update": (50, "scripts.gpu.training:throughput quantized_update"),
        "throughput-adams": (50, "scripts.gpu.training:throughput adams"),
        "offload": (75, "scripts.gpu.training:throughput offload"),
    },
    "losses": {
        "ten-million": (320, "scripts.gpu.losses:losses dense-muon,quantized_update,muloco,sparta"),
        "ten-million-more": (
            240,
            "scripts.gpu.losses:losses dense-muon-0.032,quantized_update-0.032,muloco-0.008,scape",
        ),
        "sparta": (100, "scripts.gpu.losses:repeated 4"),
    },
    "ranks": {"stages": (40, "scripts.gpu.ranks:stages"), "lost-rank": (130, "scripts.gpu.ranks:lost")},
    "methods": {"methods": (440, "scripts.gpu.methods:run_all")},
}
# The order of `lease`, for a GPU that is at hand for minutes: parts, steps, and their lowest limits in seconds.
LEASE: tuple[tuple[str, str, float], ...] = (
    ("correctness", "tests", 80),
    ("losses", "ten-million", 320),
    ("speed", "methods", 80),
    ("speed", "methods-muon", 50),
    ("speed", "methods-muon-shard", 30),
    ("training", "throughput-muon", 45),
    ("training", "throughput-quantized_update", 45),
    ("training", "throughput-adamw", 45),
    ("training", "throughput-scape", 45),
    ("speed", "traffic", 25),
    ("losses", "sparta", 60),
    ("correctness", "races", 60),
    ("losses", "ten-million-more", 320),
)


class Step(NamedTuple):
    """A step of a part, with its lowest time limit in seconds and its function and arguments for `scripts.gpu.step`."""

    part: str
    name: str
    seconds: float
    call: str


def take(call: str, limit: float, smoke: bool, log: Path, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a step and return its record. `keep` receives it at the start, with each result, and at the end."""
    begin, begun = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    record: dict[str, Any] = {"status": "cut off", "limit_seconds": limit, "result": None}  # if this process is killed
    samples: list[dict[str, float]] = []
    keep(record)
    with tempfile.TemporaryDirectory() as scratch, open(log, "a") as output, open(log) as shown:
        print(f"== {call}", file=output, flush=True)
        shown.seek(0, os.SEEK_END)
        result, seen, status = Path(scratch, "result.json"), 0, ""
        command = [python(), "-m", "scripts.gpu.step", *call.split(), f"--result={result}"] + ["--smoke"] * smoke
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None and not status:
                if time.monotonic() - begin >= CLOCK_SECONDS * len(samples):
                    samples.append({"seconds": round(time.monotonic() - begin, 1), **clocks()})
                time.sleep(POLL)
                print(shown.read(), end="", flush=True)
                if result.exists() and (changed := result.stat().st_mtime_ns) != seen:
                    seen = changed
                    keep(record | {"result": read(result)})
                status = "cut off" if time.monotonic() - begin > limit else ""
        finally:
            end_group(process)
            print(shown.read(), end="", flush=True)
        record["status"] = status or ("passed" if process.returncode == 0 else "failed")
        record |= {"seconds": round(time.monotonic() - begin, 1), "begun": begun, "result": read(result)}
        record["clocks"] = [sample for sample in samples if len(sample) > 1]
        keep(record)
    return record


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other parts that store their results in the same file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def machine() -> dict[str, Any]:
    """Return device and software, read in another process, which then releases the device."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "facts.json")
        command = [python(), "-m", "scripts.gpu.step", "scripts.gpu.machine:facts", f"--result={result}"]
        if subprocess.run(command, cwd=ROOT, timeout=180).returncode:
            raise RunError("no facts about the device; the reason is above")
        return dict(read(result))


def chosen(part: str, only: str) -> list[Step]:
    """Return the steps of a part, or of the lease, all or those in `only`."""
    if part == "lease":
        known = [Step(of, name, seconds, PARTS[of][name][1]) for of, name, seconds in LEASE]
    else:
        known = [Step(part, name, *step) for name, step in PARTS[part].items()]
    for name in names(only):
        if name not in [step.name for step in known]:
            raise ValueError(f"--only {name}: {part} has no such step, only {', '.join(step.name for step in known)}")
    return [step for step in known if not only or step.name in names(only)]


class Results:
    """The stored results of a device, by part."""

    def __init__(self, folder: Path, common: dict[str, Any], commit: str) -> None:
        self.folder, self.common, self.commit = folder, common, commit

    def clear(self, part: str) -> None:
        """Remove the steps of a part when they begin anew."""
        with locked(self.folder):
            stored = read(self.folder / RESULTS_FILE) or {}
            write(self.folder / RESULTS_FILE, {name: one for name, one in stored.items() if name != part})

    def has(self, step: Step) -> bool:
        """Return whether the step has passed with the present sources."""
        stored = (read(self.folder / RESULTS_FILE) or {}).get(step.part, {})
        found = stored.get("steps", {}).get(step.name, {})
        return bool(found.get("status") == "passed" and found["commit"] == self.commit)

    def keep(self, step: Step, record: dict[str, Any]) -> None:
        """Store a step's record beside those of the part that are stored, and write the report."""
        with locked(self.folder):
            stored = read(self.folder / RESULTS_FILE) or {}
            steps = stored.get(step.part, {}).get("steps", {}) | {step.name: record | {"commit": self.commit}}
            part = {step.part: {"part": step.part, **self.common, "steps": steps}}
            write(self.folder / RESULTS_FILE, stored | part)
            try:
                write_report(self.folder)
            except Exception as error:  # it can be made later; the remaining steps cannot
                print(f"no report: {error!r}", flush=True)


def run(args: argparse.Namespace) -> int:
    begin, more, steps, device = time.monotonic(), patience(args.smoke), chosen(args.part, args.only), machine()
    on_cpu = device["device"] == "CPU"
    if on_cpu and not args.smoke:
        raise ValueError("torch sees no GPU; --smoke runs the same with tiny sizes on a CPU")
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    folder = (args.output or (OUTPUTS / "gpu_smoke" if args.smoke else RESULTS / "gpu")) / folder_of(device["device"])
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{args.part}.log"
    log.write_text("")
    command = " ".join(["scripts/gpu_check.sh", *sys.argv[1:]])
    command = re.sub(r" --output[= ]\S+", "", command)  # a path of this machine
    results = Results(folder, {"command": command, "smoke": args.smoke, "machine": device}, sources())
    if args.part == "lease":
        for step in (done := [step for step in steps if results.has(step)]):
            print(f"{step.part} {step.name}: passed with these sources", flush=True)
        steps = [step for step in steps if step not in done]
    elif not args.only:
        results.clear(args.part)
    together = args.seconds or min(PART_SECONDS, sum(step.seconds for step in steps) + 2 * END_SECONDS)
    passed, remaining = 0, sum(step.seconds for step in steps)
    for number, step in enumerate(steps, 1):
        left = more * together - (time.monotonic() - begin) - END_SECONDS
        if left < END_SECONDS:
            print(f"{step.name}: no time left", flush=True)
            if args.part != "lease":  # earlier results stay
                results.keep(step, {"status": "no time left", "result": None})
            continue
        limit = min(max(more * step.seconds, left * step.seconds / remaining), left)
        remaining -= step.seconds
        print(f"{args.part} {number}/{len(steps)}: {step.name}, at most {limit:.0f} s", flush=True)
        record = take(step.call.format(rows=args.rows), limit, args.smoke, log, partial(results.keep, step))
        passed += record["status"] == "passed"
        print(f"{step.name}: {record['status']} after {record['seconds']} s", flush=True)
    print(f"results: {folder / RESULTS_FILE}, {folder / 'report.md'}", flush=True)
    return 0 if passed == len(steps) else 1


def main() -> int:
    options = {
        "part": dict(choices=[*PARTS, "lease"]),
        "--smoke": dict(action="store_true", help="tiny sizes, on a CPU too"),
        "--output": dict(type=Path, help="results/gpu by default, outputs/gpu_smoke of a smoke test"),
        "--only": dict(default="", help="names of steps, with commas"),
        "--rows": dict(default="", help="rows of a step `methods`, with commas; all by default"),
        "--seconds": dict(type=float, default=0.0, help="of all steps together, by default those of their limits"),
    }
    return run_command(__doc__, run, options, "stopped; what was found is stored")


if __name__ == "__main__":
    sys.exit(main())

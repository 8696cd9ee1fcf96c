"""One part of the GPU check, step by step: `scripts/gpu_check.sh PART`.

    python -m scripts.gpu.check speed
    python -m scripts.gpu.check training --only throughput-adamw,throughput-scape --output DIR
    python -m scripts.gpu.check correctness --smoke    # tiny sizes, on a CPU too

Each step is a process with its own time limit, at most the rest of the part's; steps receive the time that others do
not use. A failed step does not stop the next one. Results are stored in OUTPUT/DEVICE/results.json while steps run,
their output in PART.log, and tables in report.md. Parts may run at the same time, if no time is measured. The exit code
is 1 if a step failed or was cut off.
"""

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

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
        "sanitizer": (110, "scripts.gpu.correctness:sanitizer"),
    },
    "speed": {
        "passes-500m": (120, "scripts.gpu.passes:passes llama_500m"),
        "passes-1.8b": (150, "scripts.gpu.passes:passes llama_1_8b"),
        "methods": (150, "scripts.gpu.method_steps:method_steps 1 adamw {rows}"),
        "methods-muon": (130, "scripts.gpu.method_steps:method_steps 1 muon {rows}"),
        "methods-shard": (100, "scripts.gpu.method_steps:method_steps 8 adamw {rows}"),  # of an 8-GPU node
        "traffic": (95, "scripts.gpu.memory_traffic:count"),
        "codes": (60, "scripts.gpu.passes:codes"),
        "tiles": (40, "scripts.gpu.passes:tiles"),
    },
    "training": {
        "throughput-adamw": (150, "scripts.gpu.training:throughput adamw"),  # compiles for the others too
        "throughput-scape": (100, "scripts.gpu.training:throughput scape"),
        "throughput-adams": (80, "scripts.gpu.training:throughput adams"),
        "offload": (75, "scripts.gpu.training:throughput offload"),
    },
    "losses": {"quality": (470, "scripts.gpu.training:quality {steps}")},
    "ranks": {"stages": (40, "scripts.gpu.ranks:stages"), "lost-rank": (130, "scripts.gpu.ranks:lost")},
    "methods": {"methods": (440, "scripts.gpu.methods:run_all")},
}


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


def chosen(part: str, only: str) -> dict[str, tuple[float, str]]:
    known = PARTS[part]
    if unknown := [name for name in names(only) if name not in known]:
        raise ValueError(f"--only {unknown[0]}: {part} has no such step, only {', '.join(known)}")
    return {name: step for name, step in known.items() if not only or name in names(only)}


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
    measured, command = sources(), " ".join(["scripts/gpu_check.sh", *sys.argv[1:]])
    found: dict[str, Any] = {"part": args.part, "command": command, "smoke": args.smoke, "machine": device, "steps": {}}

    def keep(name: str, record: dict[str, Any]) -> None:
        found["steps"][name] = record | {"commit": measured}
        with locked(folder):
            stored = read(folder / RESULTS_FILE) or {}
            if args.only:  # another process may have run other steps of the part meanwhile
                found["steps"] = stored.get(args.part, found)["steps"] | {name: found["steps"][name]}
            write(folder / RESULTS_FILE, stored | {args.part: found})
            try:
                write_report(folder)
            except Exception as error:  # it can be made later; the remaining steps cannot
                print(f"no report: {error!r}", flush=True)

    together = min(PART_SECONDS, sum(seconds for seconds, _ in PARTS[args.part].values()) + 2 * END_SECONDS)
    passed, remaining = 0, sum(seconds for seconds, _ in steps.values())
    for number, (name, (seconds, call)) in enumerate(steps.items(), 1):
        left = more * together - (time.monotonic() - begin) - END_SECONDS
        if left < END_SECONDS:
            keep(name, {"status": "no time left", "result": None})
            continue
        limit = min(max(more * seconds, left * seconds / remaining), left)
        remaining -= seconds
        print(f"{args.part} {number}/{len(steps)}: {name}, at most {limit:.0f} s", flush=True)
        record = take(call.format(steps=args.steps, rows=args.rows), limit, args.smoke, log, partial(keep, name))
        passed += record["status"] == "passed"
        print(f"{name}: {record['status']} after {record['seconds']} s", flush=True)
    print(f"results: {folder / RESULTS_FILE}, {folder / 'report.md'}", flush=True)
    return 0 if passed == len(steps) else 1


def main() -> int:
    options = {
        "part": dict(choices=[*PARTS]),
        "--smoke": dict(action="store_true", help="tiny sizes, on a CPU too"),
        "--output": dict(type=Path, help="results/gpu by default, outputs/gpu_smoke of a smoke test"),
        "--only": dict(default="", help="names of steps, with commas"),
        "--rows": dict(default="", help="rows of a step `methods`, with commas; all by default"),
        "--steps": dict(
            default="", help="training steps of `losses`: one number, or of Muon and of the others with a comma"
        ),
    }
    return run_command(__doc__, run, options, "stopped; what was found is stored")


if __name__ == "__main__":
    sys.exit(main())

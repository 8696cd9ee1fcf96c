"""A part of the check of a GPU, step by step: `scripts/gpu_check.sh PART`.

    python -m scripts.gpu.check speed
    python -m scripts.gpu.check training --only throughput-adamw,throughput-scape --output DIR
    python -m scripts.gpu.check correctness --smoke    # tiny sizes, on a CPU too

Every step is a process with a limit of its own, and what is left of the part's; more where others were quick or are
not asked for, which leaves it a larger share. The next one begins however it ends.
Results go to OUTPUT/DEVICE/PART.json as the steps find them, what they print to PART.log, both as tables to report.md.
Exits with 1 where a step failed or was cut off.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from scripts.common import OUTPUTS, RESULTS, ROOT, RunError, guarded, names, parser, read, write
from scripts.gpu.machine import commit, folder_of, patience
from scripts.gpu.report import write_report

PART_SECONDS = 480.0  # at most, and no more than its steps' limits together
END_SECONDS = 10.0  # that a step has to end what it has started, after its limit
POLL = 0.5


@dataclass(frozen=True)
class Step:
    """seconds: its limit, at least. arguments: of `python -m scripts.gpu....`, which gets --result
    and --smoke besides."""

    name: str
    seconds: float
    arguments: tuple[str, ...]


def _step(name: str, seconds: float, module: str, *arguments: str) -> Step:
    return Step(name, seconds, (f"scripts.gpu.{module}", *arguments))


# In the order of what matters most. Limits may be more than the part's together: a step that finds less time left has
# that, and one that finds none is not begun.
PARTS = {
    "correctness": (
        _step("tests", 360, "correctness", "tests"),
        _step("sanitizer", 110, "correctness", "sanitizer"),
    ),
    "speed": (
        _step("passes-500m", 120, "passes", "--model=llama_500m"),
        _step("passes-1.8b", 150, "passes", "--model=llama_1_8b"),
        _step("launches", 90, "launches"),
        _step("codes", 60, "codes"),
    ),
    "training": (
        _step("throughput-adamw", 150, "training", "throughput", "adamw"),  # compiles first, for the others as well
        _step("throughput-adams", 80, "training", "throughput", "adams"),
        _step("throughput-scape", 80, "training", "throughput", "scape"),
        _step("quality", 160, "training", "quality"),
        _step("offload", 75, "training", "throughput", "offload"),
    ),
    "ranks": (
        _step("ranks", 190, "ranks"),
        _step("lost-rank", 130, "lost_rank"),
    ),
}


def take(step: Step, limit: float, smoke: bool, log: Path, note: Callable[[Any], None]) -> dict[str, Any]:
    """Runs a step; what became of it. `note` gets what it has found, whenever that has changed."""
    python = os.environ.get("PYTHON", sys.executable)
    begin, begun = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as scratch:
        result, seen = Path(scratch, "result.json"), 0.0
        command = [python, "-m", *step.arguments, f"--result={result}", *(["--smoke"] if smoke else [])]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        teller = threading.Thread(target=_tell, args=(process, log, step.name), daemon=True)
        teller.start()
        status = ""
        try:
            while process.poll() is None:
                time.sleep(POLL)
                if result.exists() and (changed := result.stat().st_mtime_ns) != seen:
                    seen = changed
                    note(read(result))
                if time.monotonic() - begin > limit:
                    status = "cut off"
                    break
        finally:
            _end(process)
        teller.join(END_SECONDS)
        status = status or ("passed" if process.returncode == 0 else "failed")
        return {
            "status": status,
            "seconds": round(time.monotonic() - begin, 1),
            "limit_seconds": limit,
            "begun": begun,
            "result": read(result),
        }


def _tell(process: "subprocess.Popen[str]", log: Path, name: str) -> None:
    """What a step prints goes to the log, and to whoever watches."""
    assert process.stdout is not None
    with open(log, "a") as file:
        print(f"== {name}", file=file, flush=True)
        for line in process.stdout:
            print(line, end="", file=file, flush=True)
            print(f"  {line}", end="", flush=True)


def _end(process: "subprocess.Popen[str]") -> None:
    """Of the whole group, first by asking: a step may have started others in groups of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind


def machine() -> dict[str, Any]:
    """`scripts.gpu.machine.facts`, asked by a process that gives the device back."""
    python = os.environ.get("PYTHON", sys.executable)
    asked = subprocess.run([python, "-m", "scripts.gpu.machine"], cwd=ROOT, capture_output=True, text=True, timeout=180)
    if asked.returncode:
        raise RunError(f"the device cannot be asked:\n{asked.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def chosen(part: str, only: str) -> list[Step]:
    known = {step.name: step for step in PARTS[part]}
    if unknown := [name for name in names(only) if name not in known]:
        raise ValueError(f"--only {unknown[0]}: {part} has no such step, only {', '.join(known)}")
    return [step for step in PARTS[part] if not only or step.name in names(only)]


def run(args: argparse.Namespace) -> int:
    begin, more, steps, facts = time.monotonic(), patience(args.smoke), chosen(args.part, args.only), machine()
    on_cpu = facts["device"] == "CPU"
    if on_cpu and not args.smoke:
        raise ValueError("torch sees no GPU; --smoke runs the same with tiny sizes on a CPU")
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    folder = (args.output or (OUTPUTS / "gpu_smoke" if args.smoke else RESULTS / "gpu")) / folder_of(facts["device"])
    folder.mkdir(parents=True, exist_ok=True)
    stored, log = folder / f"{args.part}.json", folder / f"{args.part}.log"
    before = read(stored) if args.only else None  # what other steps have found stays
    log.write_text("")
    sources, command = commit(), " ".join(["scripts/gpu_check.sh", *sys.argv[1:]])
    found: dict[str, Any] = {"part": args.part, "command": command, "smoke": args.smoke, "machine": facts, "steps": {}}
    found["steps"] = (before or found)["steps"]

    def keep(name: str, record: dict[str, Any]) -> None:
        found["steps"][name] = record | {"commit": sources}
        write(stored, found)
        try:
            write_report(folder)
        except Exception as error:  # it can be made from what is stored, and the steps that are left cannot
            print(f"no report: {error!r}", flush=True)

    together = min(PART_SECONDS, sum(step.seconds for step in PARTS[args.part]) + 2 * END_SECONDS)
    for number, step in enumerate(steps, 1):
        left = more * together - (time.monotonic() - begin) - END_SECONDS
        if left < END_SECONDS:
            keep(step.name, {"status": "no time left", "result": None})
            continue
        share = left * step.seconds / sum(later.seconds for later in steps[number - 1 :])
        limit = min(max(more * step.seconds, share), left)
        print(f"{args.part} {number}/{len(steps)}: {step.name}, at most {limit:.0f} s", flush=True)
        running = {"status": "cut off", "limit_seconds": limit}  # what stands there if this process is killed
        keep(step.name, {**running, "result": None})
        record = take(step, limit, args.smoke, log, partial(_keep_running, keep, step.name, running))
        keep(step.name, record)
        print(f"{step.name}: {record['status']} after {record['seconds']} s", flush=True)
    print(f"results: {stored}, {folder / 'report.md'}", flush=True)
    return 1 if any(found["steps"][step.name]["status"] != "passed" for step in steps) else 0


def _keep_running(keep: Callable[..., None], name: str, running: dict[str, Any], result: Any) -> None:
    keep(name, {**running, "result": result})


def main() -> int:
    own = parser(__doc__)
    own.add_argument("part", choices=[*PARTS])
    own.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    own.add_argument("--output", type=Path, help="results/gpu by default, outputs/gpu_smoke of a smoke test")
    own.add_argument("--only", default="", help="names of steps, with commas")
    args = own.parse_args()
    return guarded(lambda: run(args), stopped="stopped; what was found is stored")


if __name__ == "__main__":
    sys.exit(main())

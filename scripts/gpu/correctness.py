"""Run tests/gpu in several processes, or two of its cases under compute-sanitizer.

    python -m scripts.gpu.correctness tests --result FILE
    python -m scripts.gpu.correctness sanitizer --result FILE
    TRITON_INTERPRET=1 python -m scripts.gpu.correctness tests --smoke --result FILE    # a case of every test, anywhere

Needs torch, triton, numpy and pytest. Each process runs a share of the cases, so that a kernel that breaks the device's
context fails the cases of one process only.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError, write
from scripts.gpu.machine import run_step

PROCESSES = 10
TESTS = "tests/gpu"
OUTCOME = re.compile(rf"^({TESTS}/.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.M)
# A whole step on unaligned tensors with its selection, and a code that packs bits.
SANITIZED = (
    f"{TESTS}/test_gpu.py::test_a_step_equals_the_pytorch_reference[gradients off-dtype1-target-0.1]",
    f"{TESTS}/test_gpu.py::test_block_codes_equal_the_reference[int4-128-scale0]",
)
SANITIZER_SECONDS = 120.0  # a case
HANG_SECONDS = 60
POLL = 0.5


def command(*more: str) -> list[str]:
    # A test that hangs prints where.
    hangs = f"faulthandler_timeout={HANG_SECONDS}"
    return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", hangs, *more]


def environment(smoke: bool, **more: str) -> dict[str, str]:
    return {**os.environ, "SCAPE_GPU_TESTS": "smoke" if smoke else "1", **more}


def outcomes(texts: list[str]) -> dict[str, Any]:
    """Return the outcomes that all pytest processes have printed so far."""
    found = [match for text in texts for match in OUTCOME.findall(text)]
    counts = Counter(outcome for _, outcome in found)
    return {
        "passed": counts["PASSED"],
        "skipped": counts["SKIPPED"],
        "failed": sorted(name for name, outcome in found if outcome in ("FAILED", "ERROR")),
    }


def tests(args: argparse.Namespace) -> None:
    """Run the tests. Raises RunError if a test or a process failed."""
    cores = os.cpu_count() or 1
    count = 1 if args.smoke else min(PROCESSES, cores)
    threads = str(max(1, cores // count))  # otherwise each process uses all cores for its work on the host
    begin, before, shown = time.monotonic(), -1, [False] * count
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch, f"{i}.log") for i in range(count)]
        running = []
        for i, log in enumerate(logs):
            with open(log, "wb") as file:
                env = environment(args.smoke, SCAPE_GPU_SHARE=f"{i}/{count}", OMP_NUM_THREADS=threads)
                running.append(subprocess.Popen(command(TESTS), cwd=ROOT, env=env, stdout=file, stderr=file))
        while True:
            codes = [process.poll() for process in running]
            texts = [log.read_text(errors="replace") for log in logs]
            found: dict[str, Any] = {"processes": count, "seconds": time.monotonic() - begin, "exit_codes": codes}
            found |= outcomes(texts)
            if found["passed"] + len(found["failed"]) != before or None not in codes:
                before = found["passed"] + len(found["failed"])
                write(args.result, found)
                print(f"{found['passed']} passed, {len(found['failed'])} failed", flush=True)
            for i, (code, text) in enumerate(zip(codes, texts, strict=True)):  # at once: others may not end in time
                if not shown[i] and (code or "Timeout (" in text):
                    shown[i] = True
                    print(text[-8000:], flush=True)
            if None not in codes:
                break
            time.sleep(POLL)
    wrong = sum(bool(code) for code in codes)
    if wrong or not found["passed"]:
        raise RunError(f"{len(found['failed'])} tests failed, {wrong} of {count} processes ended badly")


def ended(command: list[str], env: dict[str, str], seconds: float) -> tuple[str, int]:
    """Return a command's output and exit code; -1 if it was killed after the limit, with its process group."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        late, code = "", -1
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"\nnot done within {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        return file.read() + late, code


def sanitizer(args: argparse.Namespace) -> None:
    """Run cases under compute-sanitizer. Raises RunError if it reports errors or does not end."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        write(args.result, {"note": "compute-sanitizer is not installed"})
        print("compute-sanitizer is not installed", flush=True)
        return
    found: dict[str, Any] = {"program": program, "cases": []}
    # Without the cache each tensor is its own allocation, so that accesses beyond its end are detected.
    env = environment(False, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    for case in SANITIZED:
        begin = time.monotonic()
        # Failed API calls are no error: torch and Triton probe the device.
        check = [program, "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9", *command(case)]
        output, code = ended(check, env, SANITIZER_SECONDS)
        summary = re.findall(r"ERROR SUMMARY: .*", output)
        row = {"test": case, "exit_code": code, "said": (summary or [output[-300:]])[-1]}
        found["cases"].append(row | {"seconds": time.monotonic() - begin})
        write(args.result, found)
        print(f"{case}: {found['cases'][-1]['said']}", flush=True)
        if code:
            print(output[-4000:], flush=True)
    if bad := [row["test"] for row in found["cases"] if row["exit_code"]]:
        raise RunError(f"compute-sanitizer: {', '.join(bad)}")


WORK = {"tests": tests, "sanitizer": sanitizer}

if __name__ == "__main__":
    sys.exit(run_step(__doc__, lambda args: WORK[args.what](args), {"what": dict(choices=[*WORK])}))

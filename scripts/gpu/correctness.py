"""Run tests/gpu in several processes, or two of its cases under compute-sanitizer.

Needs torch, triton, numpy and pytest. Each process runs a share of the cases, so that a kernel that breaks the device's
context fails the cases of one process only.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError, write
from scripts.gpu.machine import end_group

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


def tests(result: Path, smoke: bool) -> None:
    """Run the tests. Raises RunError if a test or a process failed."""
    cores = os.cpu_count() or 1
    count = 1 if smoke else min(PROCESSES, cores)
    threads = str(max(1, cores // count))  # otherwise each process uses all cores for its work on the host
    begin, running, shown, before = time.monotonic(), [], set[int](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch, f"{i}.log") for i in range(count)]
        for i, log in enumerate(logs):
            with open(log, "wb") as file:
                env = environment(smoke, SCAPE_GPU_SHARE=f"{i}/{count}", OMP_NUM_THREADS=threads)
                running.append(subprocess.Popen(command(TESTS), cwd=ROOT, env=env, stdout=file, stderr=file))
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(POLL)
            codes = [process.poll() for process in running]
            texts = [log.read_text(errors="replace") for log in logs]
            found = outcomes(texts)
            if found != before or None not in codes:
                before = found
                times = {"processes": count, "seconds": time.monotonic() - begin, "exit_codes": codes}
                write(result, times | found)
                print(f"{found['passed']} passed, {len(found['failed'])} failed", flush=True)
            for i, (code, text) in enumerate(zip(codes, texts, strict=True)):  # at once: others may not end in time
                if i not in shown and (code or "Timeout (" in text):
                    shown.add(i)
                    print(text[-8000:], flush=True)
    wrong = sum(map(bool, codes))
    if wrong or not found["passed"]:
        raise RunError(f"{len(found['failed'])} tests failed, {wrong} of {count} processes ended badly")


def ended(command: list[str], env: dict[str, str], seconds: float) -> tuple[str, int]:
    """Return a command's output and exit code; -1 if it was ended after the limit, with its process group."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        late, code = "", -1
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"\nnot done within {seconds:g} s"
        finally:
            end_group(process)
        file.seek(0)
        return file.read() + late, code


def program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, which need not be in PATH."""
    return shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")


def sanitizer(result: Path, smoke: bool) -> None:
    """Run cases under compute-sanitizer. Raises RunError if it reports errors or does not end."""
    checker = program("compute-sanitizer")
    if checker is None:
        write(result, {"note": "compute-sanitizer is not installed"})
        return
    cases: list[dict[str, Any]] = []
    # Without the cache each tensor is its own allocation, so that accesses beyond its end are detected.
    env = environment(False, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    for case in SANITIZED:
        begin = time.monotonic()
        # Failed API calls are no error: torch and Triton probe the device.
        check = [checker, "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9", *command(case)]
        output, code = ended(check, env, SANITIZER_SECONDS)
        said = (re.findall(r"ERROR SUMMARY: .*", output) or [output[-300:]])[-1]
        cases.append({"test": case, "exit_code": code, "said": said, "seconds": time.monotonic() - begin})
        write(result, {"program": checker, "cases": cases})
        print(f"{case}: {said}", flush=True)
        if code:
            print(output[-4000:], flush=True)
    if bad := [row["test"] for row in cases if row["exit_code"]]:
        raise RunError(f"compute-sanitizer: {', '.join(bad)}")

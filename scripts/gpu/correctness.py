"""Run tests/gpu in several processes, or some of its cases under compute-sanitizer.

Needs torch, triton, numpy and pytest. Each process runs a share of the cases, so that a kernel that breaks the device's
context fails the cases of one process only.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common import RunError, names, write
from scripts.gpu.processes import program, run_limited, run_together

PROCESSES = 10
TESTS = "tests/gpu"
OUTCOME = re.compile(rf"^({TESTS}/.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.M)
# A whole step on unaligned tensors with its selection, several steps of replicas with lists of entries, exchanges by
# addresses in tables, and a code that packs bits.
MEMCHECKED = (
    f"{TESTS}/test_gpu.py::test_a_step_equals_the_pytorch_reference[gradients off-dtype1-target-0.1]",
    f"{TESTS}/test_gpu.py::test_replicas_are_equal_and_follow_the_reference[options0]",
    f"{TESTS}/test_gpu.py::test_exchanges_by_kernels_equal_those_of_pytorch[sparta]",
    f"{TESTS}/test_gpu.py::test_exchanges_by_kernels_equal_those_of_pytorch[quantized_update, Muon]",
    f"{TESTS}/test_gpu.py::test_exchanges_by_kernels_equal_those_of_pytorch[radius]",
    f"{TESTS}/test_gpu.py::test_block_codes_equal_the_reference[int4-128-scale0]",
)
MANY_STEPS = (f"{TESTS}/test_gpu.py::test_exchanges_by_kernels_equal_those_of_pytorch[sparta, many steps]",)
SANITIZED = {"memcheck": MEMCHECKED, "racecheck": MANY_STEPS, "synccheck": MANY_STEPS}  # cases by tool
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
SANITIZER_SECONDS = 120.0  # a case
HANG_SECONDS = 60


def command(*more: str) -> list[str]:
    # A test that hangs prints where.
    hangs = f"faulthandler_timeout={HANG_SECONDS}"
    return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", hangs, *more]


def outcomes(found: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the figures of tests and their outcomes, as pytest prints them."""
    counts = Counter(outcome for _, outcome in found)
    return {
        "passed": counts["PASSED"],
        "skipped": counts["SKIPPED"],
        "failed": sorted(name for name, outcome in found if outcome in ("FAILED", "ERROR")),
    }


def tests(result: Path, smoke: bool) -> None:
    """Run the tests. Raises RunError if a test or a process failed."""
    cores = os.cpu_count() or 1
    count, begin = 1 if smoke else min(PROCESSES, cores), time.monotonic()
    common = {"SCAPE_GPU_TESTS": "smoke" if smoke else "1"}
    common["OMP_NUM_THREADS"] = str(max(1, cores // count))  # otherwise each process uses all cores on the host
    commands = {f"process {i}": (command(TESTS), common | {"SCAPE_GPU_SHARE": f"{i}/{count}"}) for i in range(count)}

    def note(found: dict[str, list[tuple[str, str]]], codes: list[int | None]) -> None:
        whole = outcomes([one for of_process in found.values() for one in of_process])
        times = {"processes": count, "seconds": time.monotonic() - begin, "exit_codes": codes}
        write(result, times | whole)
        print(f"{whole['passed']} passed, {len(whole['failed'])} failed", flush=True)

    texts = run_together(commands, OUTCOME.findall, note)
    if not outcomes(OUTCOME.findall("".join(texts.values())))["passed"]:
        raise RunError("no test has passed")


def sanitizer(result: Path, smoke: bool, tools: str) -> None:
    """Run cases under tools of compute-sanitizer. Raises RunError if it reports errors or does not end."""
    checker = program("compute-sanitizer")
    if checker is None:
        write(result, {"note": "compute-sanitizer is not installed"})
        return
    cases: list[dict[str, Any]] = []
    # Without the cache each tensor is its own allocation, so that accesses beyond its end are detected.
    environment = {"SCAPE_GPU_TESTS": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool, case in ((one, case) for one in names(tools) for case in SANITIZED[one]):
        begin = time.monotonic()
        # Failed API calls are no error: torch and Triton probe the device.
        check = [checker, f"--tool={tool}", "--report-api-errors=no", "--error-exitcode=9", *command(case)]
        output, code = run_limited(check, SANITIZER_SECONDS, **environment)
        said = (SUMMARY.findall(output) or [output[-300:]])[-1]
        cases.append({"tool": tool, "test": case, "exit_code": code, "said": said, "seconds": time.monotonic() - begin})
        write(result, {"program": checker, "cases": cases})
        print(f"{tool}: {case}: {said}", flush=True)
        if code:
            print(output[-4000:], flush=True)
    if bad := [f"{row['tool']} of {row['test']}" for row in cases if row["exit_code"]]:
        raise RunError(f"compute-sanitizer: {', '.join(bad)}")

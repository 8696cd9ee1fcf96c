"""Processes of the GPU check and its steps."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError

END_SECONDS = 10.0  # for a process to end after SIGTERM
POLL = 0.5


def python() -> str:
    """Return the interpreter for other processes."""
    return os.environ.get("PYTHON", sys.executable)


def program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, which need not be in PATH; None if it is not installed."""
    return shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")


def end_group(process: "subprocess.Popen[Any]") -> None:
    """End a process that leads a group, and the group: first by SIGTERM, so that it can end other groups."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(END_SECONDS)


def run_limited(command: list[str], seconds: float, **environment: str) -> tuple[str, int]:
    """Return a command's output and exit code; -1 if it was ended after the limit, with its process group."""
    with tempfile.TemporaryFile("w+") as file:
        env = os.environ | environment
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


def run_together(
    commands: Mapping[str, tuple[list[str], Mapping[str, str]]],
    parse: Callable[[str], Any],
    note: Callable[[dict[str, Any], list[int | None]], None],
) -> dict[str, str]:
    """Run commands at the same time, each with its environment; return the output of each.

    `note` receives the parsed outputs and the exit codes each time one has changed. The end of an
    output is printed if its command fails, hangs in a test, or is cut off. Raises RunError if one failed.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    shown, before, codes = set[str](), "", list[int | None]([None])
    with tempfile.TemporaryDirectory() as scratch:
        logs = {name: Path(scratch, f"{number}.log") for number, name in enumerate(commands)}
        try:
            for name, (command, environment) in commands.items():
                with open(logs[name], "wb") as file:
                    env = {**os.environ, **environment}
                    running[name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
            while None in codes:
                time.sleep(POLL)
                codes = [process.poll() for process in running.values()]
                texts = {name: log.read_text(errors="replace") for name, log in logs.items()}
                found = {name: parse(text) for name, text in texts.items()}
                if repr(found) != before or None not in codes:  # as text, in which NaN equals NaN
                    before = repr(found)
                    note(found, codes)
                for (name, text), code in zip(texts.items(), codes, strict=True):
                    if name not in shown and (code or "Timeout (" in text):  # at once: others may not end in time
                        shown.add(name)
                        print(f"{name}, exit code {code}:\n{text[-8000:]}", flush=True)
        finally:
            for name, process in running.items():
                if process.poll() is None:
                    print(f"{name}, cut off:\n{logs[name].read_text(errors='replace')[-2000:]}", flush=True)
                process.kill()
                process.wait()
    for name, process in running.items():
        if process.returncode:
            raise RunError(f"{name} ended with exit code {process.returncode}; the end of its output is above")
    return texts

"""The launcher when its terminal closes."""

import io
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_launch import ROOT
from torchtitan_scape.runtime.launcher import Output

RANK = """
import signal, sys, time
def stop(*_):
    print("a last line", flush=True)
    time.sleep(1)
    open(sys.argv[1], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_run_outlives_its_terminal_and_ends_with_the_code_of_a_stop(nohup: bool, tmp_path: Path) -> None:
    """Its output has no reader any more, which is no error. SIGHUP stops the run, unless it was started with nohup.

    The tests themselves may run under nohup, whose setting the launcher would inherit. Without OMP_NUM_THREADS the
    libraries that torch loads start threads, one of which received the signal: the run ended with code 1, unsaved.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    (tmp_path / "rank.py").write_text(RANK)
    saved = tmp_path / "saved"
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        launcher = [sys.executable, "-m", "torchtitan_scape.runtime.launch", "--nproc_per_node=1", "--tee=3"]
        os.execve(
            sys.executable,
            [*launcher, str(tmp_path / "rank.py"), str(saved)],
            environment,
        )
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    if nohup:
        time.sleep(2.0)  # The rank would have saved one second after SIGHUP.
        assert os.waitpid(process, os.WNOHANG) == (0, 0) and not saved.exists()
        os.kill(process, signal.SIGTERM)
    assert exit_code(process, seconds=60.0) == 75 and saved.exists()


def exit_code(process: int, seconds: float) -> int:
    """Return the exit code of a child process. Kills it after `seconds`, so that the test fails and does not hang."""
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            deadline = math.inf
        time.sleep(0.1)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_signal_during_the_start_of_the_ranks_stops_them(tmp_path: Path) -> None:
    """It arrived after the ranks were started and before their pids were known: they stayed behind."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(
        "import os, signal, time\n"
        "from torchtitan_scape.runtime.launch import SIGNALS, main\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n"
        "from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent\n"
        "start = LocalElasticAgent._start_workers\n"
        "def slow(self, group):\n    found = start(self, group)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(3)\n    return found\n"
        "LocalElasticAgent._start_workers = slow\n"
        "main()\n"
    )
    command = [sys.executable, str(tmp_path / "launcher.py"), "--nproc_per_node=1", str(tmp_path / "rank.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, str(tmp_path / "saved")], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 75 and (tmp_path / "saved").exists(), result.stderr


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_output_without_a_reader_is_discarded() -> None:
    for stream, expected in ((io.StringIO(), "one\ntwo\n"), (Gone(), "")):
        output = Output(stream)
        for text in ("one", "two"):
            print(text, file=output, flush=True)
        assert stream.getvalue() == expected

"""The launcher when its terminal closes."""

import io
import math
import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.test_launch import ROOT
from torchtitan_scape.runtime.launch import Output

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

    The tests themselves may run under nohup, whose setting the launcher would inherit.
    """
    (tmp_path / "rank.py").write_text(RANK)
    saved = tmp_path / "saved"
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        launcher = [sys.executable, "-m", "torchtitan_scape.runtime.launch", "--nproc_per_node=1", "--tee=3"]
        os.execve(
            sys.executable,
            [*launcher, str(tmp_path / "rank.py"), str(saved)],
            {**os.environ, "PYTHONPATH": str(ROOT)},
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


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_output_without_a_reader_is_discarded() -> None:
    for stream, expected in ((io.StringIO(), "one\ntwo\n"), (Gone(), "")):
        output = Output(stream)
        for text in ("one", "two"):
            print(text, file=output, flush=True)
        assert stream.getvalue() == expected

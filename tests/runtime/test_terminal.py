"""The launcher when its terminal closes."""

import io
import os
import pty
import sys
from pathlib import Path

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


def test_a_run_outlives_its_terminal_and_ends_with_the_code_of_a_stop(tmp_path: Path) -> None:
    """Its output has no reader any more, which is no error."""
    (tmp_path / "rank.py").write_text(RANK)
    process, terminal = pty.fork()
    if process == 0:
        launcher = [sys.executable, "-m", "torchtitan_scape.runtime.launch", "--nproc_per_node=1", "--tee=3"]
        rank = [str(tmp_path / "rank.py"), str(tmp_path / "saved")]
        os.execve(sys.executable, [*launcher, *rank], {**os.environ, "PYTHONPATH": str(ROOT)})
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 75 and (tmp_path / "saved").exists()


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_output_without_a_reader_is_discarded() -> None:
    for stream, expected in ((io.StringIO(), "one\ntwo\n"), (Gone(), "")):
        output = Output(stream)
        for text in ("one", "two"):
            print(text, file=output, flush=True)
        assert stream.getvalue() == expected

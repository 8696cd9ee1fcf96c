"""Threads of exchanges."""

import gc
import subprocess
import sys
import threading

import torch

from torchtitan_scape.topology.stages import CommStream

EXIT = """
import time, torch
from torchtitan_scape.topology.stages import CommStream

def exchange():
    time.sleep(0.3)
    print("finished", flush=True)

stream = CommStream()
stream.start(exchange, torch.device("cpu"))
"""


def test_the_exit_of_a_process_waits_for_its_exchanges() -> None:
    """The interpreter would end the thread inside an operator of PyTorch, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


def test_a_stream_that_is_not_used_any_more_has_no_thread() -> None:
    before = threading.active_count()
    stream = CommStream()
    stream.start(lambda: None, torch.device("cpu")).wait()
    assert threading.active_count() == before + 1
    del stream
    gc.collect()
    assert threading.active_count() == before

"""The examples of training loops, started as a user would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def torchrun(ranks: int, name: str, *arguments: str) -> str:
    """The output of an example."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", f"scripts.examples.{name}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("method", ["scape"])
def test_a_resumed_loop_is_the_loop_that_was_not_interrupted(method: str, tmp_path: Path) -> None:
    options = ["--method", method, "--steps=16", "--interval=4"]
    whole = torchrun(2, "nanogpt_loop", *options)
    torchrun(2, "nanogpt_loop", *options, "--checkpoint", str(tmp_path), "--stop=10")
    resumed = torchrun(2, "nanogpt_loop", *options, "--checkpoint", str(tmp_path))
    last = re.findall(r"validation loss (.*)", whole)
    assert len(last) == 1 and re.findall(r"validation loss (.*)", resumed) == last


def test_fsdp2_within_a_node() -> None:
    sent = re.search(r"loss \d\.\d+, sent (\d+\.\d) kB/step between nodes", torchrun(4, "fsdp_loop", "--steps=3"))
    assert sent and float(sent[1]) > 0


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    assert re.search(r"loss \d\.\d+, sent \d+\.\d kB/step", torchrun(2, "accelerate_loop", "--steps=3"))

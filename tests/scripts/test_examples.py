"""scripts/examples: the loops run as a user starts them, and a resumed run is equal to an uninterrupted one."""

import io
import os
import runpy
import shutil
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import server
from tests.marks import slow
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*_loop.py"))


def run(name: str, *arguments: str) -> str:
    """Run an example as a rank of the pool, whose process group it gets, and return its output."""
    output = io.StringIO()
    with (
        patch.object(sys, "argv", [name, *arguments]),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        redirect_stdout(output),
    ):
        runpy.run_module(f"scripts.examples.{name}", run_name="__main__")
    return output.getvalue()


def losses(output: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if "loss " in line]


def test_torchrun_starts_it_and_a_resumed_run_is_equal(pool2: Pool, tmp_path: Path) -> None:
    """The whole run under torchrun; the resumed one starts from its state in the middle."""
    options = ["--method=sparta", "--steps=4", "--accumulate=2", "--bf16", "--save_every=2"]
    command = ["--standalone", "--nproc_per_node=2", "-m", "scripts.examples.nanogpt_loop", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = server.run("torch.distributed.run", *command, f"--folder={tmp_path}/whole", environment=environment)
    assert whole.returncode == 0, whole.stderr
    assert "step 4 | loss" in whole.stdout and "sent_bytes" in whole.stdout
    shutil.copytree(tmp_path / "whole" / "step-2", tmp_path / "resumed" / "step-2")
    resumed = pool2(run, "nanogpt_loop", *options, f"--folder={tmp_path}/resumed")[0]
    assert resumed.startswith("step 4 | loss") and resumed.strip() == whole.stdout.strip().splitlines()[-1]
    for rank in range(2):
        first, second = (torch.load(tmp_path / name / f"step-4/rank-{rank}.pt") for name in ("whole", "resumed"))
        assert all(torch.equal(value, second["model"][key]) for key, value in first["model"].items())


@pytest.mark.parametrize("method", ["scape", "streaming_diloco"])
def test_a_small_gpt_trains(method: str, pool2: Pool) -> None:
    found = losses(pool2(run, "nanogpt_loop", f"--method={method}", "--steps=30")[0])
    assert found[-1] < found[0] < 5.5


@pytest.mark.parametrize("overlap", [slow([]), ["--overlap"]])
def test_shards_and_quantized_gradients(overlap: list[str], pool4: Pool) -> None:
    output = pool4(run, "fsdp_loop", "--steps=20", *overlap)[0]
    first, last = losses(output)
    assert last < first and "(13.0 % of dense FP32)" in output


def test_scape(pool2: Pool) -> None:
    output = pool2(run, "scape_loop", "--steps=40")[0]
    first, last = losses(output)
    assert last < first and "mask_overlap" in output


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.parametrize("method", ["dense", "sparta"])
def test_accelerate(method: str, pool2: Pool) -> None:
    found = losses(pool2(run, "accelerate_loop", f"--method={method}", "--epochs=2", "--mixed_precision=bf16")[0])
    assert len(found) == 2 and found[1] < found[0]


def test_examples_are_short_and_do_not_need_torchtitan() -> None:
    assert len(EXAMPLES) == 4
    for path in EXAMPLES:
        text = path.read_text()
        assert len(text.splitlines()) <= 120 and "import torchtitan\n" not in text and "from torchtitan " not in text

"""The trainer under PyTorch's own torchrun, without this project's launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.test_launch import ROOT, SHORT, SMALL

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAIN = ["-m", "torchtitan_scape.train", "--job.config_file=train_configs/embedded.toml"]


def torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start real processes: neither run_train.sh nor the fork server is involved."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    # The suite hides GPUs by empty values, of which one is enough to select the CPU.
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    return subprocess.run(
        [*TORCHRUN, *TRAIN, *arguments], cwd=ROOT, env=kept | own, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_two_ranks_train_to_the_summary(tmp_path: Path) -> None:
    result = torchrun(*SHORT, *SMALL, f"--job.dump_folder={tmp_path}", CUDA_VISIBLE_DEVICES="")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    assert "step:  3  loss: " in output and "Summary of 3 steps" in output and "Traceback" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3 and "2 ranks on 1 node(s) of 2" in summary["layout"]
    assert sum(summary["bytes_sent_per_step_and_rank"].values()) > 0

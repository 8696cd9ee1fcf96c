"""What needs a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import choose, triton_dense, triton_masks, triton_scape, triton_select
from torchtitan_scape import AdamS, Scape

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_in_the_interpreter() -> None:
    """Hypothesis drives every kernel against the twin; the output of a failure is shown."""
    folder = "tests/kernels/interpreted"
    assert "skipped" not in run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder, TRITON_INTERPRET="1")


def test_every_kernel_compiles_for_both_vendors(tmp_path: Path) -> None:
    """Ahead of time, without a GPU, in every configuration that is launched. At the default block size on NVIDIA no
    kernel keeps values in memory for want of registers."""
    run("scripts/compile_kernels.py", "--output", str(tmp_path))
    rows = json.loads((tmp_path / "compiled.json").read_text())["kernels"]
    device_code = [triton_dense, triton_masks, triton_scape, triton_select]
    written = {name for module in device_code for name in vars(module) if name.endswith("_kernel")}
    for target in ("cuda:90", "hip:gfx90a"):
        assert {row["kernel"] for row in rows if row["target"] == target} == written
    assert all(row["registers"] > 0 and "spilled_bytes" in row for row in rows)
    for row in rows:
        if row["target"] == "cuda:90" and row["constants"].get("BLOCK", 1024) == 1024:
            assert row["spilled_bytes"] == 0, row


def test_the_benchmark_runs() -> None:
    assert "pack + update / AdamW" in run("scripts/bench_kernels.py", "--smoke", "--density=0.1", TRITON_INTERPRET="1")


def test_a_backend_can_be_forced_or_is_refused() -> None:
    cpu = torch.device("cpu")
    assert choose("auto", cpu) == choose("torch", cpu) == "torch"
    assert choose("auto", torch.device("cuda")) == choose("triton", torch.device("cuda")) == "triton"
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    for kind in (Scape, AdamS):
        with pytest.raises(
            ValueError, match=r"kernels is 'triton', and the parameters are on 'cpu'.*choose 'auto' or 'torch'"
        ):
            kind([("p", parameter)], lr=1e-3, kernels="triton")
        with pytest.raises(ValueError, match="kernels is 'cuda'; it must be one of 'auto', 'triton', 'torch'"):
            kind([("p", parameter)], lr=1e-3, kernels="cuda")

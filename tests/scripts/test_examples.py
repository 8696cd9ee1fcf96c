"""scripts/examples: the loops run as a user starts them, and a resumed run is equal to an uninterrupted one."""

import ast
import hashlib
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import server
from tests.marks import slow
from tests.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "scripts" / "examples").glob("*.py") if path.name != "__init__.py")


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


def run_and_digest(name: str, *arguments: str) -> tuple[str, str]:
    """Run an example, and return its output and a digest of the weights that all replicas share."""
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer

    made, build = [], ReplicaOptimizer.__init__

    def record(self: ReplicaOptimizer, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.append(self)

    world = os.environ["WORLD_SIZE"]
    torchrun = {"LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "examples"}  # Fabric asks whether torchrun runs it
    with patch.object(ReplicaOptimizer, "__init__", record), patch.dict(os.environ, torchrun):
        output = run(name, *arguments)
    (optimizer,) = made
    with optimizer.shared_weights():
        values = torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
    return output, hashlib.sha256(values.numpy().tobytes()).hexdigest()


@pytest.mark.skipif(find_spec("lightning_fabric") is None, reason="needs lightning-fabric")
@pytest.mark.parametrize("method", ["quantized", "sparta"])
def test_fabric(method: str, pool2: Pool) -> None:
    arguments = [f"--method={method}", "--epochs=2", "--precision=bf16-mixed"]
    (output, first), (_, second) = pool2(run_and_digest, "fabric_loop", *arguments)
    found = losses(output)
    assert len(found) == 2 and found[1] < found[0] and first == second
    sent, dense = (float(output.split("| sent ")[1].split()[i]) for i in (0, 2))
    assert 0 < sent < 0.15 * dense


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("method", ["quantized", slow("sparta")])
def test_trainer_of_transformers(method: str, pool2: Pool, tmp_path: Path) -> None:
    arguments = [f"--method={method}", "--steps=20", f"--folder={tmp_path}"]
    (output, first), (_, second) = pool2(run_and_digest, "hf_trainer", *arguments)
    logs = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{")]
    found = [float(log["loss"]) for log in logs if "loss" in log]
    assert len(found) == 2 and found[1] < found[0] and first == second
    assert 0 < float(logs[0]["sent_bytes"]) < 0.15 * float(logs[0]["dense_bytes"])
    (path,) = tmp_path.glob("checkpoint-20/model.safetensors")
    assert not list(tmp_path.rglob("optimizer.pt")) and path.stat().st_size > 0


def titan(python: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run TorchTitan 0.3.0 on two replicas of two shards, and return the result of tests.scripts.titan_0_3."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    command += ["--local-ranks-filter=0", "-m", "tests.scripts.titan_0_3", *arguments, f"--dump_folder={folder}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", server.ADDRESS)}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(result)
    return found


@pytest.mark.slow
def test_trainer_of_torchtitan_0_3(tmp_path: Path) -> None:
    """Its environment takes 6 GB and some minutes. The trainer of this project needs TorchTitan 0.2.2."""
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    needed = ["torch==2.14.1", "torchtitan==0.3.0", "datasets<4.8", "numpy"]
    for packages in (needed, ["--editable", str(ROOT)]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, timeout=1800)
    native, dense = (titan(python, tmp_path / name, name) for name in ("native", "replicas"))
    quantized = titan(python, tmp_path / "quantized", "replicas", "--optimizer.method=quantized_update")
    gradients = native["bytes_per_step"].pop("allreduce_.default")
    assert not native["bytes_per_step"]
    for found in (native, dense, quantized):
        assert found["versions"]["torchtitan"] == "0.3.0" and len(found["losses"]) == 20
        assert all(map(math.isfinite, found["losses"])) and found["losses"][-1] < 0.6 * found["losses"][0]
        assert found["weights"][:2] == found["weights"][2:] and found["weights"][0] != found["weights"][1]
    assert dense["losses"] == pytest.approx(native["losses"], rel=1e-3)
    # Besides the gradients some numbers: the flag and the rates of each step, and checks of the first one.
    assert 0 < sum(dense["bytes_per_step"].values()) - gradients < 64
    # Input and output of the exchanges: more than the bytes sent, and no all-reduce but that of the numbers.
    assert quantized["bytes_per_step"]["allreduce_.default"] < 64
    assert quantized["stats"]["sent_bytes"] < 0.06 * gradients

    options = ["replicas", "--optimizer.method=sparta", "--training.steps=6", "--checkpoint.enable"]
    options += ["--checkpoint.interval=3", "--checkpoint.no-last_save_model_only"]
    whole = titan(python, tmp_path / "sparta", *options)
    shutil.rmtree(tmp_path / "sparta" / "checkpoint" / "step-6")
    resumed = titan(python, tmp_path / "sparta", *options)
    assert resumed["losses"] == whole["losses"][3:] and resumed["weights"] == whole["weights"]
    assert whole["weights"][0] != whole["weights"][2] and whole["shared_weights"][0] == whole["shared_weights"][2]


def test_examples_are_short_and_do_not_need_this_projects_torchtitan() -> None:
    assert len(EXAMPLES) == 9
    for path in EXAMPLES:
        text = path.read_text()
        assert len(text.splitlines()) <= 120
        assert path.name.startswith("titan_") or not re.search(r"^(import|from) torchtitan\b", text, re.MULTILINE)

"""A run does not train on the CPU where the recipe, the environment or a device node says that there is a GPU."""

import os
import re
from pathlib import Path

import pytest

from tests import server
from tests.runtime.test_launch import SHORT
from torchtitan_scape.core.device_check import TorchBuild, check_device

CPU = TorchBuild("2.13.0+cpu")
CUDA = TorchBuild("2.14.1+cu130", cuda="13.0", error="Found no NVIDIA driver on your system.")
ROCM = TorchBuild("2.10.0+rocm7.1", rocm="7.1.25424", error="No HIP GPUs are available")

SHOWN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "0")


def files(root: Path, *names: str, **texts: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(path.name, ""))
    return root


def line(machine: str, environment: dict[str, str], root: Path, build: TorchBuild) -> str:
    with pytest.raises(ValueError) as info:
        check_device(machine, environment, root, build)
    text = str(info.value)
    assert "\n" not in text and text.endswith("; to use the CPU, set CUDA_VISIBLE_DEVICES to an empty value")
    return text


@pytest.mark.parametrize(
    "machine, environment",
    [
        ("local", {}),
        ("auto", {"SLURM_GPUS": "0", "SLURM_JOB_ID": "7", "SLURM_GPU_BIND": "closest"}),
        ("unknown", {"SLURM_GPUS_ON_NODE": ""}),
        ("vista", {"CUDA_VISIBLE_DEVICES": ""}),
        ("frontier", {"HIP_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "8"}),
        ("local", {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "0"}),
    ],
)
def test_a_cpu_is_accepted_where_nothing_asks_for_a_gpu(
    machine: str, environment: dict[str, str], tmp_path: Path
) -> None:
    check_device(machine, environment, tmp_path, CPU)


def test_hidden_gpus_are_accepted_although_the_nodes_exist(tmp_path: Path) -> None:
    root = files(tmp_path, "dev/nvidia0", "dev/kfd")
    check_device("vista", {"CUDA_VISIBLE_DEVICES": ""}, root, CPU)


@pytest.mark.parametrize("machine, runtime", [("vista", "CUDA"), ("frontier", "ROCm"), ("dgx-a100", "CUDA")])
def test_a_machine_with_gpus_names_the_build_to_install(machine: str, runtime: str, tmp_path: Path) -> None:
    text = line(machine, {}, tmp_path, CPU)
    assert (
        f"although [topology] machine = '{machine}' has GPUs; installed is torch 2.13.0+cpu, a build for CPUs" in text
    )
    assert f"the driver: none is loaded; install torch for {runtime}, see docs/getting_started/install.md" in text


@pytest.mark.parametrize(
    "name, value, runtime",
    [
        ("CUDA_VISIBLE_DEVICES", "0", "CUDA or ROCm"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", "CUDA or ROCm"),
        ("ROCR_VISIBLE_DEVICES", "0,1", "ROCm"),
        ("HIP_VISIBLE_DEVICES", "3", "ROCm"),
        ("SLURM_GPUS", "a100:2", "CUDA or ROCm"),
        ("SLURM_GPUS_PER_TASK", "1", "CUDA or ROCm"),
        ("SLURM_JOB_GPUS", "0", "CUDA or ROCm"),
    ],
)
def test_a_variable_of_the_launcher_is_a_sign(name: str, value: str, runtime: str, tmp_path: Path) -> None:
    text = line("local", {name: value}, tmp_path, CPU)
    assert f"although {name} = {value!r}; " in text and f"install torch for {runtime}, " in text


def test_a_device_node_is_a_sign_and_its_vendor_decides(tmp_path: Path) -> None:
    root = files(tmp_path, "dev/kfd", "dev/nvidiactl", "sys/module/amdgpu/version", version="6.16.6")
    text = line("local", {"CUDA_VISIBLE_DEVICES": "0"}, root, CUDA)
    assert (
        "although CUDA_VISIBLE_DEVICES = '0' and /dev/kfd exists; installed is torch 2.14.1+cu130, a build for CUDA"
        in text
    )
    assert (
        "the driver: amdgpu 6.16.6 is loaded, 'Found no NVIDIA driver on your system.'; install torch for ROCm" in text
    )


def test_a_build_of_the_right_vendor_needs_another_node_or_driver(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  550.54.15  Release Build\nGCC version: 11"
    root = files(tmp_path, "dev/nvidia0", "proc/driver/nvidia/version", version=version)
    text = line("vista", {}, root, CUDA)
    assert "the driver: NVIDIA 550.54.15 is loaded, 'Found no NVIDIA driver" in text
    assert "start it on a node with a free GPU, or install a build of torch for its driver" in text
    text = line("frontier", {}, tmp_path / "other", ROCM)
    assert "a build for ROCm 7.1.25424" in text and "start it on a node with a free GPU" in text


def test_the_installed_build_is_read() -> None:
    """In the tests GPUs are hidden, so that a build with GPU support has a message of its runtime."""
    build = TorchBuild.installed()
    assert re.match(r"\d+\.\d+", build.version) and bool(build.runtime) == bool(build.error)


def test_training_ends_with_one_line_and_writes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, **SHOWN, "LOCAL_RANK": "0"}
    arguments = ["--job.config_file=train_configs/embedded.toml", f"--job.dump_folder={tmp_path}/out"]
    result = server.run("torchtitan_scape.train", *arguments, environment=environment)
    text = result.stdout + result.stderr
    assert result.returncode == 2 and text.count("error: the run would use the CPU, although CUDA_VISIBLE") == 1, text
    assert "Traceback" not in text and not (tmp_path / "out").exists()


def test_dry_runs_and_simulated_replicas_do_not_need_the_gpu(tmp_path: Path) -> None:
    """A dry run trains nothing; simulated replicas of a machine run on any CPU."""
    one = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    visible = {name: value for name, value in os.environ.items() if name not in SHOWN}
    embedded = ["--job.config_file=train_configs/embedded.toml", "--topology.machine=vista", *SHORT]
    for arguments, environment, expected in (
        (["--comm.mode=fake_backend", "--training.steps=0"], {**os.environ, **SHOWN}, "Dry run: everything was built"),
        (["--topology.simulate_replicas=2", "--training.steps=1"], visible, "Summary of 1 steps"),
    ):
        full = {**environment, **one, "NGPU": "2"}
        arguments = [*embedded, *arguments, f"--job.dump_folder={tmp_path}/out"]
        result = server.run("torchtitan_scape.train", *arguments, environment=full)
        assert result.returncode == 0 and expected in result.stdout + result.stderr, result.stderr

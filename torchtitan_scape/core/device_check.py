"""The check that a run does not train on the CPU of a machine with GPUs."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_scape.core.command import one_line
from torchtitan_scape.topology.machines import MACHINES

_VISIBLE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "ROCm", "ROCR_VISIBLE_DEVICES": "ROCm"}
_NODES = {"kfd": "ROCm", "nvidia[0-9]*": "CUDA"}  # below /dev; integrated GPUs of AMD have a kfd too
_PAGE = "docs/getting_started/install.md"


@dataclass(frozen=True)
class TorchBuild:
    """The installed build of torch: its version with the local part, the CUDA or ROCm release that it was built for,
    and the message with which the runtime refuses the GPU; "" for none.
    """

    version: str
    cuda: str = ""
    rocm: str = ""
    error: str = ""

    @classmethod
    def installed(cls) -> "TorchBuild":
        error = ""
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as refusal:
                error = one_line(refusal)[:160]
        return cls(torch.__version__, torch.version.cuda or "", torch.version.hip or "", error)

    @property
    def runtime(self) -> str:
        """ "CUDA", "ROCm", or "" for a build without GPU support."""
        return "ROCm" if self.rocm else "CUDA" if self.cuda else ""

    def __str__(self) -> str:
        kind = f"a build for {self.runtime} {self.rocm or self.cuda}" if self.runtime else "a build for CPUs"
        return f"torch {self.version}, {kind}"


def check_device(
    machine: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    build: TorchBuild | None = None,
) -> None:
    """Check that nothing asks for a GPU. Call it only where torch finds none, on every rank.

    A variable such as CUDA_VISIBLE_DEVICES that is empty or -1 hides the GPUs, and turns the check off. Raises
    ValueError if the recipe, the environment or a device node says that there is a GPU.
    """
    if any(environment.get(name, "0").split(",")[0].strip() in ("", "-1") for name in _VISIBLE):
        return
    signs = dict(_signs(machine, environment, root))
    if not signs:
        return
    build = build or TorchBuild.installed()
    wanted = next((runtime for runtime in reversed(signs.values()) if runtime), "")
    if build.runtime and wanted in ("", build.runtime):
        fix = f"start it on a node with a free GPU, or install a build of torch for its driver, see {_PAGE}"
    else:
        fix = f"install torch for {wanted or 'CUDA or ROCm'}, see {_PAGE}"
    raise ValueError(
        f"the run would use the CPU, although {' and '.join(signs)}; installed is {build}; the driver: "
        f"{_driver(root, build)}; {fix}; to use the CPU, set CUDA_VISIBLE_DEVICES to an empty value"
    )


def _signs(machine: str, environment: Mapping[str, str], root: Path) -> Iterator[tuple[str, str]]:
    """Return the signs of a GPU, and for each its runtime, "" if unknown. The most reliable ones are last."""
    preset = MACHINES.get(machine)
    if preset is not None and preset.device.runtime:
        yield f"[topology] machine = {machine!r} has GPUs", preset.device.runtime
    for name, value in sorted(environment.items()):
        counted = name.startswith("SLURM_GPUS") and value.strip() not in ("", "0")
        listed = name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS") and value.strip()
        if name in _VISIBLE or counted or listed:
            yield f"{name} = {value!r}", _VISIBLE.get(name, "")
    for pattern, runtime in _NODES.items():
        nodes = sorted(root.glob(f"dev/{pattern}"))
        if nodes:
            yield f"/dev/{nodes[0].name} exists", runtime


def _driver(root: Path, build: TorchBuild) -> str:
    """Return the loaded drivers and the answer of the runtime."""
    answers = []
    nvidia = _text(root / "proc/driver/nvidia/version")
    if nvidia:
        release = re.search(r"\d+\.\d+(\.\d+)?", nvidia)
        answers.append(f"NVIDIA {release.group() if release else '(unknown version)'} is loaded")
    if (root / "sys/module/amdgpu").is_dir():
        answers.append(" ".join(["amdgpu", _text(root / "sys/module/amdgpu/version"), "is loaded"]).replace("  ", " "))
    return ", ".join([*(answers or ["none is loaded"]), *([repr(build.error)] if build.error else [])])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

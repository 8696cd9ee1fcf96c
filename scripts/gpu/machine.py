"""Shared by the steps of the GPU check: their arguments, and the device and software of a result.

python -m scripts.gpu.machine    # prints the latter as JSON
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common import ROOT, commit, package_version, run_command

PACKAGES = ("torch", "triton", "numpy", "pytest", "torchtitan")
SOURCES = ("kernels", "topology", "torchtitan_scape", "scripts", "tests", "train_configs")


def run_step(doc: str | None, work: Callable[[argparse.Namespace], Any], arguments: dict[str, Any]) -> int:
    """Do the work of a step with its arguments, as in `run_command`; return the exit code."""
    common = {
        "--result": dict(type=Path, required=True, help="file for what is measured, JSON"),
        "--smoke": dict(action="store_true", help="tiny sizes, on a CPU too"),
    }
    return run_command(doc, work, common | arguments)


def python() -> str:
    """Return the interpreter for other processes."""
    return os.environ.get("PYTHON", sys.executable)


def facts() -> dict[str, Any]:
    """Return device and software: the first GPU, or the CPU if there is none.

    nominal_bandwidth is in bytes/s, 0 if unknown.
    """
    import torch

    found: dict[str, Any] = {"device": "CPU", "memory": 0, "nominal_bandwidth": 0.0, "driver": "none"}
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        # Two transfers per clock cycle; kHz and bits.
        clock, width = getattr(seen, "memory_clock_rate", 0), getattr(seen, "memory_bus_width", 0)
        found = {
            "device": torch.cuda.get_device_name(0),
            "memory": seen.total_memory,
            "nominal_bandwidth": 2e3 * clock * width / 8,
            "multiprocessors": seen.multi_processor_count,
            "driver": _driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {
        **found,
        "runtime": runtime,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES},
    }


def patience(smoke: bool) -> float:
    """Return the factor on time limits: a smoke test may run on a busy CPU."""
    return 10.0 if smoke else 1.0


def folder_of(device: str) -> str:
    """Return the folder name of a device's results."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def sources() -> str:
    """Return the commit of the sources, or a hash of them outside a git repository."""
    if name := commit(*SOURCES, untracked="normal"):
        return name
    whole = hashlib.sha256()
    paths = (path for root in SOURCES for path in (ROOT / root).rglob("*") if path.suffix in (".py", ".toml", ".sh"))
    for path in sorted(paths):
        whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"no git here; the sources' SHA-256 is {whole.hexdigest()[:16]}"


def _driver() -> str:
    if text := _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]):
        return text.split()[0]
    for path in (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text().strip()
    return "unknown"


# Readings of nvidia-smi, by the name under which they are stored, and the keys of rocm-smi's JSON.
NVIDIA = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
}
AMD = {
    "sm_mhz": ("sclk clock speed:",),
    "memory_mhz": ("mclk clock speed:",),
    "celsius": ("Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
    "watts": ("Average Graphics Package Power (W)", "Current Socket Graphics Package Power (W)"),
}


def clocks() -> dict[str, float]:
    """Return clocks, temperature and power of the first GPU as nvidia-smi or rocm-smi report them; {} without both."""
    asked = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA.values())}", "--format=csv,noheader,nounits", "--id=0"]
    if (text := _output(asked)) is not None:
        return nvidia_clocks(text)
    asked = ["rocm-smi", "--device", "0", "--showclocks", "--showtemp", "--showpower", "--json"]
    return amd_clocks(text) if (text := _output(asked)) is not None else {}


def nvidia_clocks(text: str) -> dict[str, float]:
    """Return the readings of a line of nvidia-smi; those that are not available are absent."""
    values = (text.splitlines() or [""])[0].split(",")
    return {name: float(value) for name, value in zip(NVIDIA, values, strict=False) if _NUMBER.fullmatch(value.strip())}


def amd_clocks(text: str) -> dict[str, float]:
    """Return the readings of the first card in rocm-smi's JSON."""
    try:
        card = next(values for name, values in sorted(json.loads(text).items()) if name.startswith("card"))
    except (ValueError, StopIteration):
        return {}
    found = {}
    for name, keys in AMD.items():
        value = next((card[key] for key in keys if key in card), "").strip("()").lower().removesuffix("mhz")
        if _NUMBER.fullmatch(value):
            found[name] = float(value)
    return found


_NUMBER = re.compile(r"\d+(\.\d+)?")


def _output(asked: list[str]) -> str | None:
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    print(json.dumps(facts()))

"""Which device a result is of, and with which software it was made; as JSON.

python -m scripts.gpu.machine
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from scripts.common import ROOT

PACKAGES = ("torch", "triton", "numpy", "pytest", "torchtitan")
SOURCES = ("kernels", "topology", "torchtitan_scape", "scripts", "tests", "train_configs")


def facts() -> dict[str, Any]:
    """Of the first GPU, or of the CPU where there is none. nominal_bandwidth: bytes/s; 0 where the driver is silent."""
    import torch

    found: dict[str, Any] = {"device": "CPU", "memory": 0, "nominal_bandwidth": 0.0, "driver": "none"}
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        # Two transfers a clock; kHz and bits.
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
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def patience(smoke: bool) -> float:
    """What limits are multiplied by: a smoke test may run on a busy CPU."""
    return 10.0 if smoke else 1.0


def folder_of(device: str) -> str:
    """The folder of a device's results."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def commit() -> str:
    """Of these sources; where there is no git repository, a hash of them."""
    try:
        name, changed = (_git(*asked) for asked in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *SOURCES)))
        return name + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        whole = hashlib.sha256()
        for path in sorted(path for root in SOURCES for path in (ROOT / root).rglob("*") if _is_source(path)):
            whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
        return f"no git here; the sources' SHA-256 is {whole.hexdigest()[:16]}"


def _git(*asked: str) -> str:
    told = subprocess.run(["git", "-C", str(ROOT), *asked], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def _is_source(path: Path) -> bool:
    return path.suffix in (".py", ".toml", ".sh")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()
        return told[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    for path in (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text().strip()
    return "unknown"


if __name__ == "__main__":
    print(json.dumps(facts()))

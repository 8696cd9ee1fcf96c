"""Device, software and clocks of a result."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.common import ROOT, commit, package_version, versions, write

SOURCES = ("kernels", "topology", "torchtitan_scape", "scripts", "tests", "train_configs")


def facts(result: Path, smoke: bool) -> None:
    """Store device and software: the first GPU, or the CPU if there is none.

    nominal_bandwidth is in bytes/s, 0 if unknown.
    """
    import torch

    found: dict[str, Any] = {"device": "CPU", "memory": 0, "nominal_bandwidth": 0.0, "driver": "none"}
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        # Two transfers per clock cycle; kHz and bits.
        clock, width = getattr(seen, "memory_clock_rate", 0), getattr(seen, "memory_bus_width", 0)
        found = {
            "device": seen.name,
            "memory": seen.total_memory,
            "nominal_bandwidth": 2e3 * clock * width / 8,
            "multiprocessors": seen.multi_processor_count,
            "driver": _driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    found |= {
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions() | {name: package_version(name) for name in ("triton", "numpy", "pytest")},
    }
    write(result, found)


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
    files = [path for folder in SOURCES for kind in ("py", "toml", "sh") for path in (ROOT / folder).rglob(f"*.{kind}")]
    whole = b"".join(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0" for path in sorted(files))
    return f"no git here; the sources' SHA-256 is {hashlib.sha256(whole).hexdigest()[:16]}"


def _driver() -> str:
    text = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    files = [path for name in ("nvidia", "amdgpu") if (path := Path(f"/sys/module/{name}/version")).exists()]
    return (text or (files[0].read_text() if files else "unknown")).split()[0]


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
    if (text := output_of(asked)) is not None:
        return nvidia_clocks(text)
    asked = ["rocm-smi", "--device", "0", "--showclocks", "--showtemp", "--showpower", "--json"]
    return amd_clocks(text) if (text := output_of(asked)) is not None else {}


def nvidia_clocks(text: str) -> dict[str, float]:
    """Return the readings of a line of nvidia-smi; those that are not available are absent."""
    return _numbers(dict(zip(NVIDIA, text.partition("\n")[0].split(","), strict=False)))


def amd_clocks(text: str) -> dict[str, float]:
    """Return the readings of the first card in rocm-smi's JSON."""
    try:
        cards = [values for name, values in sorted(json.loads(text).items()) if name.startswith("card")]
    except ValueError:
        return {}
    card = cards[0] if cards else {}
    return _numbers({name: next((card[key] for key in keys if key in card), "") for name, keys in AMD.items()})


def _numbers(texts: Mapping[str, str]) -> dict[str, float]:
    """Return the number in each text, such as "(800Mhz)"; texts without one are absent."""
    found = {name: re.search(r"\d+(\.\d+)?", text) for name, text in texts.items()}
    return {name: float(match[0]) for name, match in found.items() if match}


def output_of(asked: list[str]) -> str | None:
    """Return what a program prints; None if it is missing or fails."""
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None

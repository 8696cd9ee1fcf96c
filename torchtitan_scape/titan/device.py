"""What a CPU with gloo needs so that TorchTitan runs without a GPU. Nothing else in the project asks."""

import logging
import os
import resource
import warnings
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch

from kernels.common.offload import free_host_memory
from torchtitan_scape.titan.patches import device_lookup


class _CpuDevice:
    """`torch.cpu` with the answers that TorchTitan expects of a device module.

    Its memory figures are those of the process: resident set, and its peak.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=total)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": resident, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def free_memory(device_type: str, rank: int, ranks: int) -> int:
    """Bytes that a process can still take: of its GPU, or this rank's share of what the host has left."""
    if device_type != "cpu":
        return int(torch.get_device_module(device_type).mem_get_info(rank)[0])
    return free_host_memory() // ranks


# What TorchTitan and PyTorch say about a missing GPU: on a CPU it is expected, and hides what matters.
_EXPECTED = ("Error running lspci", "Peak flops undefined", "Peak FLOPS used")


def quieten_cpu() -> None:
    """Drops messages and warnings that every run on a CPU would show. Call it after TorchTitan's `init_logger`."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda entry: not entry.getMessage().startswith(_EXPECTED))
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def _check_version() -> None:
    """A container may bring another TorchTitan, whose names differ."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        return  # a source checkout without metadata
    if not found.startswith("0.2.2"):
        raise ImportError(
            f"torchtitan {found} is installed, and this project needs 0.2.2: pip install torchtitan==0.2.2"
        )


def prepare() -> str:
    """Decides the device before the first `import torchtitan`, which binds it by name; returns its type.

    Raises ImportError for another release of TorchTitan.
    """
    _check_version()
    available = torch._utils._get_available_device_type()
    if available:
        return available
    with device_lookup("cpu", _CpuDevice()):
        import torchtitan.tools.utils
    if torchtitan.tools.utils.device_type != "cpu":
        raise RuntimeError("torchtitan was imported before torchtitan_scape.titan; import it later")
    return "cpu"

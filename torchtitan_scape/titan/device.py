"""Support for running TorchTitan on a CPU with gloo. Only this module changes TorchTitan's device."""

import logging
import os
import resource
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from torchtitan_scape.core.command import install_command
from torchtitan_scape.kernels.common.offload import free_host_memory
from torchtitan_scape.titan.patches import device_lookup


class _CpuDevice:
    """`torch.cpu` with the additional functions that TorchTitan expects of a device module.

    Its memory statistics are the resident set size of the process and its peak, in bytes.
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
    """Return the available memory in bytes: of this rank's GPU, or this rank's share of the free host memory."""
    if device_type != "cpu":
        return int(torch.get_device_module(device_type).mem_get_info(rank)[0])
    return free_host_memory() // ranks


# Messages of TorchTitan and PyTorch about a missing GPU.
_EXPECTED = ("Error running lspci", "Peak flops undefined", "Peak FLOPS used")


def quieten_cpu() -> None:
    """Drop messages and warnings that every run on a CPU would log. Call it after TorchTitan's `init_logger`."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda entry: not entry.getMessage().startswith(_EXPECTED))
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def _check_version() -> None:
    """Raise ImportError for another release of TorchTitan, for example in a container: its names differ."""
    try:
        release = version("torchtitan")
    except PackageNotFoundError:
        return  # a source checkout without metadata
    if not release.startswith("0.2.2"):
        raise ImportError(
            f"torchtitan {release} is installed, but the trainer needs 0.2.2: {install_command('trainer')}"
        )


def _end_without_cache(error: OSError) -> NoReturn:
    """End a command of this package in one line, because PyTorch creates its cache folder while it is imported.

    Raises the error if the package is imported by another program.
    """
    command = getattr(sys.modules["__main__"], "__spec__", None)
    if command is None or not command.name.startswith("torchtitan_scape."):
        raise error
    print(f"error: {error}; set TORCHINDUCTOR_CACHE_DIR or TMPDIR to a folder that can be written", file=sys.stderr)
    raise SystemExit(2)


def prepare() -> str:
    """Select the device before the first `import torchtitan`, which binds it by name, and return its type."""
    _check_version()
    available = torch._utils._get_available_device_type()
    try:
        if available:
            import torchtitan

            return available
        with device_lookup("cpu", _CpuDevice()):
            import torchtitan.tools.utils
    except OSError as error:
        _end_without_cache(error)
    if torchtitan.tools.utils.device_type != "cpu":
        raise RuntimeError("torchtitan was imported before torchtitan_scape.titan; import it later")
    return "cpu"

"""Host memory for offloaded state: how much is free, and its registration with the CUDA driver.

Copies between registered memory and a GPU are asynchronous and run at the full rate of the link. PyTorch's own pinned
tensors are rounded up to a power of two, which would waste up to half of the memory of large state.
"""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.dry_run import in_dry_run

PORTABLE = 1  # for all devices: the current device may differ from the tensors' device
TENSOR_ENTRIES = 16  # FP32 entries, so that every tensor begins at a multiple of 64 bytes


def host_tensors(shapes: Sequence[Sequence[int]], device: torch.device, owner: Any) -> list[Tensor]:
    """Return FP32 tensors of zeros in one block of host memory, registered if `device` is a GPU.

    Args:
        shapes: Shape of every tensor.
        device: Device with which values are exchanged.
        owner: Object that uses the tensors; see `register`.
    """
    sizes = [math.prod(shape) for shape in shapes]
    padded = [-(-size // TENSOR_ENTRIES) * TENSOR_ENTRIES for size in sizes]
    # One block, because a page of memory can be registered only once.
    values = torch.zeros(sum(padded), dtype=torch.float32, device="cpu")
    if device.type == "cuda":
        register(values, owner)
    pieces = values.split(padded)
    return [piece[:size].view(tuple(shape)) for piece, size, shape in zip(pieces, sizes, shapes, strict=True)]


def register(values: Tensor, owner: Any, before_end: Callable[[], None] | None = None) -> bool:
    """Register the memory of a host tensor with the CUDA driver until `owner` is collected.

    Args:
        values: Contiguous host tensor. It is kept alive as long as the memory is registered.
        owner: Object that uses the tensor.
        before_end: Called before the memory is unregistered.

    Returns:
        Whether the memory is registered. If the driver refuses it, it stays pageable: copies then have the same result,
        but are slower and wait on the host.
    """
    if in_dry_run() or not values.nbytes:
        return False
    error = int(torch.cuda.cudart().cudaHostRegister(values.data_ptr(), values.nbytes, PORTABLE))
    if error:
        warnings.warn(
            f"{values.nbytes / 1e9:.2f} GB of host memory cannot be pinned (CUDA error {error}), so that copies are "
            "slower; raise the limit on locked memory (ulimit -l)",
            stacklevel=2,
        )
        with suppress(RuntimeError):  # The next launch reports the error once more, and clears it.
            torch.ones(1, dtype=torch.float32, device="cuda")
        return False
    # Not at exit of the process, when CUDA may have been shut down.
    weakref.finalize(owner, _unregister, values, before_end).atexit = False
    return True


def _unregister(values: Tensor, before_end: Callable[[], None] | None) -> None:
    if before_end is not None:
        before_end()
    torch.cuda.cudart().cudaHostUnregister(values.data_ptr())


def free_host_memory() -> int:
    """Return the bytes that this process can still allocate on the host, within the limits of its control groups."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_free_in_cgroups()])


def _free_in_cgroups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the bytes left in each control group (version 2) with a limit. Cached files count as free."""
    try:
        (own,) = (line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):
        return
    folder = root / own.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            return
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # the root group has no limit
        if limit != "max":
            yield max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))


def check_host_memory(needed: int) -> None:
    """Raise ValueError if the host has fewer than `needed` bytes left. A dry run needs none."""
    free = free_host_memory()
    if needed > free and not in_dry_run():
        raise ValueError(
            f"offload needs {needed / 1e9:.2f} GB of host memory for this rank, and {free / 1e9:.2f} GB are free; free "
            "some, offload less, or shard the model over more ranks"
        )

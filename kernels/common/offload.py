"""Optimizer state in host memory, with two groups of tensors at a time on the device.

While a pass processes one group of tensors, the next group is copied to the device on a separate CUDA stream; changed
groups are copied back afterwards. Host memory is pinned, so that copies are asynchronous. On a CPU the same copies are
blocking.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# [first, end) of tensor indices
TensorRange = tuple[int, int]


class BlockingCopies:
    """Blocking copies, for devices without streams."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start target = source."""
        target.copy_(source)

    def record(self) -> Any:
        """Return an event after all copies so far, for `main_waits`."""

    def main_waits(self, event: Any) -> None:
        """Make the current stream wait for an event of `record`."""

    def wait_for_main(self) -> None:
        """Make later copies wait for all work that is queued on the current stream."""

    def finish(self) -> None:
        """Wait until all copies are done."""


class CopyStream(BlockingCopies):
    """Asynchronous copies on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        return self._stream.record_event()

    def main_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_for_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        self._stream.synchronize()


class DoubleBuffer:
    """A flat FP32 buffer on the host, and two buffers on the device, each as long as the largest tensor.

    Consecutive tensors form groups that fit into one buffer; groups alternate between the two buffers.

    Args:
        spans: (start, end) of every tensor in the flat buffer, ascending.
        entries: Size of the flat buffer.
        device: Device of the two buffers.

    Attributes:
        host: FP32 (entries,). Call `finish` before reading or writing it.
        views: Each tensor on the device, FP32; valid inside `walk` for the tensors that it yields.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], entries: int, device: torch.device) -> None:
        self.spans = list(spans)
        self.host = torch.zeros(entries, dtype=torch.float32)
        self._side = BlockingCopies()
        if device.type != "cpu" and not in_dry_run():
            self._side = CopyStream(device)
            _pin(self.host)
            # Not at exit of the process, when CUDA may have been shut down.
            weakref.finalize(self, _unpin, self.host, self._side).atexit = False
        self.capacity = _largest(self.spans)
        self._group: list[int] = []
        begins: list[int] = []  # start of every group in the flat buffer
        for start, end in self.spans:
            if not begins or end - begins[-1] > self.capacity:
                begins.append(start)
            self._group.append(len(begins) - 1)
        sizes = [self.capacity] * min(2, len(begins))
        self.buffers = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
        self._side.wait_for_main()  # the memory may have been freed with work on it still queued
        self._shift = [(number % 2, begin) for number, begin in enumerate(begins)]
        self.views = [self._on_device(start, end, i) for i, (start, end) in enumerate(self.spans)]
        self._sequences: dict[tuple[TensorRange, ...], list[TensorRange]] = {}
        self._fetched: dict[TensorRange, Any] = {}

    @staticmethod
    def saves_memory(spans: Sequence[tuple[int, int]], entries: int) -> bool:
        """Return True if the flat buffer is larger than the two buffers on the device."""
        return entries > 2 * _largest(spans)

    def sequence(self, parts: Sequence[TensorRange]) -> list[TensorRange]:
        """Split ranges of tensors where a group ends."""
        key = tuple(parts)
        if key not in self._sequences:
            found: list[TensorRange] = []
            for first, end in key:
                start = first
                for tensor in range(first + 1, end + 1):
                    if tensor == end or self._group[tensor] != self._group[start]:
                        found.append((start, tensor))
                        start = tensor
            self._sequences[key] = found
        return self._sequences[key]

    def acquire(self, tensors: TensorRange, following: TensorRange | None) -> None:
        """Make the current stream wait for these tensors, and start copying the following ones to the device."""
        self._fetch(tensors)
        self._side.main_waits(self._fetched.pop(tensors))
        if following is not None:
            self._fetch(following)

    def release(self, tensors: TensorRange, changed: bool) -> None:
        """Copy the tensors back to the host if they were changed, after the work that is queued on them."""
        self._side.wait_for_main()  # also without changes, because the buffer is reused for another group
        if changed:
            on_host, on_device = self._both(tensors)
            self._side.copy(on_host, on_device)

    def discard_fetched(self) -> None:
        """Discard tensors that were copied to the device for a pass that did not complete."""
        self._fetched.clear()

    def finish(self) -> None:
        """Wait for all copies. `host` is up to date afterwards, and may be read and written."""
        self._side.finish()
        self.discard_fetched()

    def _fetch(self, tensors: TensorRange) -> None:
        if tensors not in self._fetched:
            on_host, on_device = self._both(tensors)
            # The buffer is free: `release` of its previous group made later copies wait.
            self._side.copy(on_device, on_host)
            self._fetched[tensors] = self._side.record()

    def _both(self, tensors: TensorRange) -> tuple[Tensor, Tensor]:
        """Return (tensors on the host, tensors on the device), flat."""
        start, end = self.spans[tensors[0]][0], self.spans[tensors[1] - 1][1]
        return self.host[start:end], self._on_device(start, end, tensors[0])

    def _on_device(self, start: int, end: int, tensor: int) -> Tensor:
        buffer, begin = self._shift[self._group[tensor]]
        return self.buffers[buffer][start - begin : end - begin]


def walk(
    windows: Sequence[DoubleBuffer], part: TensorRange, parts: Sequence[TensorRange], changed: bool
) -> Iterator[TensorRange]:
    """Yield ranges of tensors that are on the device until the next iteration.

    Args:
        windows: Buffers of the same tensors with the same groups.
        part: Range of tensors to iterate over.
        parts: All ranges that the pass will process, in order; `part` is one of them.
        changed: True if the caller writes to the tensors.
    """
    sequence = windows[0].sequence(parts)
    following = dict(zip(sequence, [*sequence[1:], None], strict=True))
    for tensors in windows[0].sequence((part,)):
        for window in windows:
            if tensors == sequence[0]:
                window.discard_fetched()
            window.acquire(tensors, following[tensors])
        yield tensors
        for window in windows:
            window.release(tensors, changed)


def _largest(spans: Sequence[tuple[int, int]]) -> int:
    return max((end - start for start, end in spans), default=0)


# --------------------------------------------------------------------------------------------- host memory


def in_dry_run() -> bool:
    """Return True if tensors are fake, that is, have sizes but no memory."""
    return torch._guards.detect_fake_mode() is not None


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


def _pin(tensor: Tensor) -> None:
    """Pin the tensor's memory in place. PyTorch's own pinned tensors are rounded up to a power of two."""
    portable = 1  # for all devices: the current device may differ from the tensors' device
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, portable))
    if error != 0:
        raise ValueError(
            f"{tensor.nbytes / 1e9:.2f} GB of host memory for offload cannot be pinned (CUDA error {error}); free "
            "some, raise the limit on locked memory (ulimit -l), or leave offload empty"
        )


def _unpin(tensor: Tensor, side: BlockingCopies) -> None:
    side.finish()
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

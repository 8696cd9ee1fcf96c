"""Optimizer state in host memory, of which two groups of tensors at a time are on the device.

A pass walks over its tensors: while it works on a group, the next one is fetched on a side stream, and what it has
written goes back after it. Host memory is locked ("pinned"), so that copies need no host. On a CPU the same copies are
made in turn.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# [first, end) among the tensors
Stretch = tuple[int, int]


class BlockingCopies:
    """Copies where there are no streams: at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self) -> Any:
        """A mark after the copies so far, for `main_waits`."""

    def main_waits(self, event: Any) -> None:
        """Work queued from here on runs after the mark."""

    def wait_for_main(self) -> None:
        """Copies from here on run after all work queued so far."""

    def finish(self) -> None:
        """Returns when all copies are done."""


class CopyStream(BlockingCopies):
    """Copies on a CUDA stream of their own."""

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

    Consecutive tensors make groups that fit a buffer; groups take the two buffers in turn.

    Args:
        spans: where every tensor's entries lie in the flat buffer, (start, end), ascending.
        entries: of the flat buffer.

    Attributes:
        host: FP32 (entries,). Call `finish` before it is read or written.
        views: FP32, each tensor on the device; valid inside `walk` for the tensors of the stretch.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], entries: int, device: torch.device) -> None:
        self.spans = list(spans)
        self.host = torch.zeros(entries, dtype=torch.float32)
        self._side = BlockingCopies()
        if device.type != "cpu" and not in_dry_run():
            self._side = CopyStream(device)
            _pin(self.host)
            # Not when the process ends: CUDA may be gone by then.
            weakref.finalize(self, _unpin, self.host, self._side).atexit = False
        self.capacity = _largest(self.spans)
        self._group: list[int] = []
        begins: list[int] = []  # of every group in the flat buffer
        for start, end in self.spans:
            if not begins or end - begins[-1] > self.capacity:
                begins.append(start)
            self._group.append(len(begins) - 1)
        sizes = [self.capacity] * min(2, len(begins))
        self.buffers = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
        self._side.wait_for_main()  # whose work on this memory, freed before, may still be queued
        self._shift = [(number % 2, begin) for number, begin in enumerate(begins)]
        self.views = [self._on_device(start, end, i) for i, (start, end) in enumerate(self.spans)]
        self._sequences: dict[tuple[Stretch, ...], list[Stretch]] = {}
        self._coming: dict[Stretch, Any] = {}

    @staticmethod
    def pays(spans: Sequence[tuple[int, int]], entries: int) -> bool:
        """Whether the host takes more than the two buffers would hold."""
        return entries > 2 * _largest(spans)

    def sequence(self, parts: Sequence[Stretch]) -> list[Stretch]:
        """The parts, cut where a group ends."""
        key = tuple(parts)
        if key not in self._sequences:
            found: list[Stretch] = []
            for first, end in key:
                start = first
                for tensor in range(first + 1, end + 1):
                    if tensor == end or self._group[tensor] != self._group[start]:
                        found.append((start, tensor))
                        start = tensor
            self._sequences[key] = found
        return self._sequences[key]

    def arrive(self, stretch: Stretch, following: Stretch | None) -> None:
        """Waits for a stretch, on the device, and starts fetching the one after it."""
        self._fetch(stretch)
        self._side.main_waits(self._coming.pop(stretch))
        if following is not None:
            self._fetch(following)

    def leave(self, stretch: Stretch, changed: bool) -> None:
        """Writes a stretch back after the work that is queued on it."""
        self._side.wait_for_main()  # also where nothing is written: the buffer is another group's next
        if changed:
            there, here = self._both(stretch)
            self._side.copy(there, here)

    def forget(self) -> None:
        """Drops what was fetched for a pass that did not come to its end."""
        self._coming.clear()

    def finish(self) -> None:
        """Waits until all that was written lies in `host`, which may be read and written then."""
        self._side.finish()
        self.forget()

    def _fetch(self, stretch: Stretch) -> None:
        if stretch not in self._coming:
            there, here = self._both(stretch)
            # What the buffer held before has been left: the copies wait for that.
            self._side.copy(here, there)
            self._coming[stretch] = self._side.record()

    def _both(self, stretch: Stretch) -> tuple[Tensor, Tensor]:
        """A stretch on the host and on the device."""
        start, end = self.spans[stretch[0]][0], self.spans[stretch[1] - 1][1]
        return self.host[start:end], self._on_device(start, end, stretch[0])

    def _on_device(self, start: int, end: int, tensor: int) -> Tensor:
        buffer, begin = self._shift[self._group[tensor]]
        return self.buffers[buffer][start - begin : end - begin]


def walk(windows: Sequence[DoubleBuffer], part: Stretch, parts: Sequence[Stretch], changed: bool) -> Iterator[Stretch]:
    """The part's tensors, stretch by stretch, each on the device while it is the caller's turn.

    windows: of the same tensors, cut alike. parts: all that the pass will go through, in order, `part` among them.
    changed: whether the caller writes.
    """
    sequence = windows[0].sequence(parts)
    following = dict(zip(sequence, [*sequence[1:], None], strict=True))
    for stretch in windows[0].sequence((part,)):
        for window in windows:
            if stretch == sequence[0]:
                window.forget()
            window.arrive(stretch, following[stretch])
        yield stretch
        for window in windows:
            window.leave(stretch, changed)


def _largest(spans: Sequence[tuple[int, int]]) -> int:
    return max((end - start for start, end in spans), default=0)


# --------------------------------------------------------------------------------------------- host memory


def in_dry_run() -> bool:
    """Whether tensors are fake: they have sizes and no memory."""
    return torch._guards.detect_fake_mode() is not None


def free_host_memory() -> int:
    """Bytes that this process can still take: what the host has left, or its control group (Slurm's, a container's)."""
    try:
        figures = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(figures["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_left_in_groups()])


def _left_in_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes left in each limited control group (version 2) that the process is in; cached files can be dropped."""
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
            continue  # the root has no limit
        if limit != "max":
            yield max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))


def check_host_memory(needed: int) -> None:
    """Raises ValueError where the host has less than so many bytes left; a dry run needs none."""
    free = free_host_memory()
    if needed > free and not in_dry_run():
        raise ValueError(
            f"offload needs {needed / 1e9:.2f} GB of host memory for this rank, and {free / 1e9:.2f} GB are free; free "
            "some, offload less, or shard the model over more ranks"
        )


def _pin(tensor: Tensor) -> None:
    """Locks the tensor's memory where it is: PyTorch's own pinned tensors take the next power of two."""
    portable = 1  # for all devices: the current one may be another than the tensors'
    error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, portable))
    if error != 0:
        raise ValueError(
            f"{tensor.nbytes / 1e9:.2f} GB of host memory for offload cannot be locked (CUDA error {error}); free "
            "some, raise the limit on locked memory (ulimit -l), or leave offload empty"
        )


def _unpin(tensor: Tensor, side: BlockingCopies) -> None:
    side.finish()
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

"""Optimizer state in host memory, of which two groups of tensors at a time are on the device.

A pass walks over its tensors: while it works on a group, the next one is fetched on a side stream, and what it has
written goes back behind it. Host memory is locked ("pinned"), so that copies need no host. On a CPU the same copies are
made in turn.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

# [first, end) among the tensors
Stretch = tuple[int, int]


class Window:
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
        self.spans, self.device = list(spans), device
        on_gpu = device.type != "cpu"
        self.host = torch.zeros(entries, dtype=torch.float32)
        if on_gpu and entries:
            _pin(self.host)
            weakref.finalize(self, _unpin, self.host)
        self._side: Any = torch.cuda.Stream(device) if on_gpu else None
        self.capacity = max((end - start for start, end in self.spans), default=0)
        self._group: list[int] = []
        begins: list[int] = []  # of every group in the flat buffer
        for start, end in self.spans:
            if not begins or end - begins[-1] > self.capacity:
                begins.append(start)
            self._group.append(len(begins) - 1)
        sizes = [self.capacity] * min(2, len(begins))
        self.buffers = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
        self._shift = [(number % 2, begin) for number, begin in enumerate(begins)]
        self.views = [self._on_device(start, end, i) for i, (start, end) in enumerate(self.spans)]
        self._sequences: dict[tuple[Stretch, ...], list[Stretch]] = {}
        self._coming: dict[Stretch, Any] = {}

    @staticmethod
    def bytes_on_device(spans: Sequence[tuple[int, int]]) -> int:
        """Of the two buffers."""
        return 8 * max((end - start for start, end in spans), default=0)

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
        """Waits for a stretch, on the device, and starts fetching the one behind it."""
        self._fetch(stretch)
        event = self._coming.pop(stretch)
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        if following is not None:
            self._fetch(following)

    def leave(self, stretch: Stretch, changed: bool) -> None:
        """Writes a stretch back behind the work that is queued on it."""
        if self._side is not None:  # also where nothing is written: the buffer is another group's next
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        if changed:
            self._copy(stretch, to_host=True)

    def finish(self) -> None:
        """Waits until all that was written lies in `host`."""
        if self._side is not None:
            self._side.synchronize()

    def _fetch(self, stretch: Stretch) -> None:
        if stretch not in self._coming:
            self._copy(stretch, to_host=False)
            # What the buffer held before has been left: this stream has waited for it.
            self._coming[stretch] = self._side.record_event() if self._side is not None else None

    def _copy(self, stretch: Stretch, to_host: bool) -> None:
        start, end = self.spans[stretch[0]][0], self.spans[stretch[1] - 1][1]
        there, here = self.host[start:end], self._on_device(start, end, stretch[0])
        with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            if to_host:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)

    def _on_device(self, start: int, end: int, tensor: int) -> Tensor:
        buffer, begin = self._shift[self._group[tensor]]
        return self.buffers[buffer][start - begin : end - begin]


def walk(windows: Sequence[Window], part: Stretch, parts: Sequence[Stretch], changed: bool) -> Iterator[Stretch]:
    """The part's tensors, stretch by stretch, each on the device while it is the caller's turn.

    windows: of the same tensors, cut alike. parts: all that the pass will go through, in order, `part` among them.
    changed: whether the caller writes.
    """
    sequence = windows[0].sequence(parts)
    following = dict(zip(sequence, [*sequence[1:], None], strict=True))
    for stretch in windows[0].sequence((part,)):
        for window in windows:
            window.arrive(stretch, following[stretch])
        yield stretch
        for window in windows:
            window.leave(stretch, changed)


def free_host_memory() -> int:
    """Bytes that processes can still take."""
    try:
        with open("/proc/meminfo") as lines:
            figures = dict(line.split(":") for line in lines)
        return int(figures["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_host_memory(needed: int) -> None:
    """Raises ValueError where the host has less than so many bytes left."""
    free = free_host_memory()
    if needed > free:
        raise ValueError(
            f"offload needs {needed / 1e9:.2f} GB of host memory for this rank, and {free / 1e9:.2f} GB are free; free "
            "some, offload less, or shard the model over more ranks"
        )


def _pin(tensor: Tensor) -> None:
    """Locks the tensor's memory where it is: PyTorch's own pinned tensors take the next power of two."""
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"{tensor.nbytes / 1e9:.2f} GB of host memory for offload cannot be locked ({error}); free some, raise "
            "the limit on locked memory (ulimit -l), or leave offload empty"
        )


def _unpin(tensor: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

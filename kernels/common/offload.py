"""Optimizer state in host memory, with three groups of tensors at a time on the device.

While a pass processes one group of tensors, the next group is copied to the device on one CUDA stream, and the previous
group, if it was changed, to the host on another one. Host memory is registered with the CUDA driver, so that copies are
asynchronous and run at the full rate of the link. PyTorch's own pinned tensors are rounded up to a power of two, which
would waste up to half of the memory of large state. On a CPU the same copies are blocking.
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

from torchtitan_scape.kernels.common.tensors import in_dry_run

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


# [first, end) of tensor indices
TensorRange = tuple[int, int]
BUFFERS = 3  # one to process, one that is filled, one that is emptied


class BlockingCopies:
    """Blocking copies, for devices without streams."""

    def fetch(self, on_device: Tensor, on_host: Tensor, after: Any) -> Any:
        """Start a copy to the device after an event of `released`. Return an event after it, for `main_waits`."""
        on_device.copy_(on_host)

    def store(self, on_host: Tensor, on_device: Tensor) -> None:
        """Start a copy to the host after all work that is queued on the current stream."""
        on_host.copy_(on_device)

    def released(self) -> Any:
        """Return an event after all work that is queued on the current stream and all copies to the host so far."""

    def main_waits(self, event: Any) -> None:
        """Make the current stream wait for an event of `fetch`."""

    def finish(self) -> None:
        """Wait until all copies are done."""


class CopyStreams(BlockingCopies):
    """Asynchronous copies on two CUDA streams, one for each direction of the link, which can be busy at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._in, self._out = device, torch.cuda.Stream(device), torch.cuda.Stream(device)

    def fetch(self, on_device: Tensor, on_host: Tensor, after: Any) -> Any:
        self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            on_device.copy_(on_host, non_blocking=True)
        return self._in.record_event()

    def store(self, on_host: Tensor, on_device: Tensor) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            on_host.copy_(on_device, non_blocking=True)

    def released(self) -> Any:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        return self._out.record_event()

    def main_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        self._in.synchronize()
        self._out.synchronize()


class TripleBuffer:
    """A flat FP32 buffer on the host, and three buffers on the device, each as long as the largest tensor.

    Consecutive tensors form groups that fit into one buffer; groups use the three buffers in turn.

    Args:
        spans: (start, end) of every tensor in the flat buffer, ascending.
        entries: Size of the flat buffer.
        device: Device of the three buffers.

    Attributes:
        host: FP32 (entries,). Call `finish` before reading or writing it.
        views: Each tensor on the device, FP32; valid inside `walk` for the tensors that it yields.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], entries: int, device: torch.device) -> None:
        self.spans = list(spans)
        self.host = torch.zeros(entries, dtype=torch.float32, device="cpu")
        self._side = BlockingCopies()
        if device.type != "cpu" and not in_dry_run():
            self._side = CopyStreams(device)
            register(self.host, self, self._side.finish)
        self.capacity = _largest(self.spans)
        self._group: list[int] = []
        begins: list[int] = []  # start of every group in the flat buffer
        for start, end in self.spans:
            if not begins or end - begins[-1] > self.capacity:
                begins.append(start)
            self._group.append(len(begins) - 1)
        sizes = [self.capacity] * min(BUFFERS, len(begins))
        self.buffers = [torch.empty(size, dtype=torch.float32, device=device) for size in sizes]
        # Events after the last use of each buffer; the memory may have been freed with work on it still queued.
        self._free = [self._side.released() for _ in self.buffers]
        self._shift = [(number % BUFFERS, begin) for number, begin in enumerate(begins)]
        self.views = [self._on_device(start, end, i) for i, (start, end) in enumerate(self.spans)]
        self._sequences: dict[tuple[TensorRange, ...], list[TensorRange]] = {}
        self._fetched: dict[TensorRange, Any] = {}

    @staticmethod
    def saves_memory(spans: Sequence[tuple[int, int]], entries: int) -> bool:
        """Return True if the flat buffer is larger than the buffers on the device."""
        return entries > BUFFERS * _largest(spans)

    def walk(self, part: TensorRange, parts: Sequence[TensorRange], changed: bool) -> Iterator[TensorRange]:
        """Yield ranges of tensors that are on the device until the next iteration.

        Args:
            part: Range of tensors to iterate over.
            parts: All ranges that the pass will process, in order; `part` is one of them.
            changed: True if the caller writes to the tensors.
        """
        sequence = self.sequence(parts)
        following = dict(zip(sequence, [*sequence[1:], None], strict=True))
        for tensors in self.sequence((part,)):
            if tensors == sequence[0]:
                self._fetched.clear()  # of a pass that did not complete
            self._acquire(tensors, following[tensors])
            yield tensors
            self._release(tensors, changed)

    def sequence(self, parts: Sequence[TensorRange]) -> list[TensorRange]:
        """Split ranges of tensors where a group ends."""
        key = tuple(parts)
        if key not in self._sequences:
            pieces: list[TensorRange] = []
            for first, end in key:
                start = first
                for tensor in range(first + 1, end + 1):
                    if tensor == end or self._group[tensor] != self._group[start]:
                        pieces.append((start, tensor))
                        start = tensor
            self._sequences[key] = pieces
        return self._sequences[key]

    def _acquire(self, tensors: TensorRange, following: TensorRange | None) -> None:
        """Make the current stream wait for these tensors, and start copying the following ones to the device."""
        self._fetch(tensors)
        self._side.main_waits(self._fetched.pop(tensors))
        if following is not None:
            self._fetch(following)

    def _release(self, tensors: TensorRange, changed: bool) -> None:
        """Copy the tensors back to the host if they were changed, after the work that is queued on them."""
        if changed:
            self._side.store(*self._both(tensors))
        # Also without changes, because another group is copied to the buffer. This event is after the stores of the
        # same tensors too, so that they are not fetched before they are on the host.
        self._free[self._buffer_of(tensors)] = self._side.released()

    def finish(self) -> None:
        """Wait for all copies. `host` is up to date afterwards, and may be read and written."""
        self._side.finish()
        self._fetched.clear()

    def _fetch(self, tensors: TensorRange) -> None:
        if tensors not in self._fetched:
            # Passes that alternate may have fetched another group into this buffer.
            buffer = self._buffer_of(tensors)
            self._fetched = {other: e for other, e in self._fetched.items() if self._buffer_of(other) != buffer}
            on_host, on_device = self._both(tensors)
            self._fetched[tensors] = self._side.fetch(on_device, on_host, self._free[self._buffer_of(tensors)])

    def _buffer_of(self, tensors: TensorRange) -> int:
        return self._shift[self._group[tensors[0]]][0]

    def _both(self, tensors: TensorRange) -> tuple[Tensor, Tensor]:
        """Return (tensors on the host, tensors on the device), flat."""
        start, end = self.spans[tensors[0]][0], self.spans[tensors[1] - 1][1]
        return self.host[start:end], self._on_device(start, end, tensors[0])

    def _on_device(self, start: int, end: int, tensor: int) -> Tensor:
        buffer, begin = self._shift[self._group[tensor]]
        return self.buffers[buffer][start - begin : end - begin]


class StateStorage:
    """FP32 state of several tensors in one flat buffer, initially zero, on the device or in host memory.

    Args:
        spans: (start, end) of every tensor in the buffer, ascending.
        entries: Size of the buffer.
        offload: Store it in host memory, unless it would fit into the buffers on the device.
        device: Device of the passes.

    Attributes:
        flat: The buffer; call `finish` before reading or writing it on the host.
        tensors: Every tensor on the device, as passes access it.
        window: Buffers on the device of a state in host memory, else None.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], entries: int, offload: bool, device: torch.device) -> None:
        self.window: TripleBuffer | None = None
        if offload and TripleBuffer.saves_memory(spans, entries):
            check_host_memory(4 * entries)
            self.window = TripleBuffer(spans, entries, device)
            self.flat, self.tensors = self.window.host, self.window.views
        else:
            self.flat = torch.zeros(entries, dtype=torch.float32, device=device)
            self.tensors = [self.flat[start:end] for start, end in spans]

    def kept(self) -> list[Tensor]:
        """Return the stored tensors, up to date; on the host if offloaded."""
        if self.window is None:
            return self.tensors
        self.finish()
        return [self.flat[start:end] for start, end in self.window.spans]

    def finish(self) -> None:
        """Wait until host memory contains the current values of an offloaded state."""
        if self.window is not None:
            self.window.finish()


def _largest(spans: Sequence[tuple[int, int]]) -> int:
    return max((end - start for start, end in spans), default=0)

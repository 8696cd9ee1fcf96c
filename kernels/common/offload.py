"""Optimizer state in host memory, with three groups of tensors at a time on the device.

While a pass processes one group of tensors, the next group is copied to the device on one CUDA stream, and the previous
group, if it was changed, to the host on another one. Host memory is registered with the driver, so that copies are
asynchronous. On a CPU the same copies are blocking.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.dry_run import in_dry_run
from torchtitan_scape.kernels.common.host_memory import check_host_memory, register

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

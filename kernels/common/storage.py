"""Storage of optimizer state: on the device, or in host memory."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.host_memory import check_host_memory
from torchtitan_scape.kernels.common.offload import TensorRange, TripleBuffer, walk

# ((start, end) of every tensor in a flat buffer, ascending; size of the buffer).
StateAllocation = tuple[Sequence[tuple[int, int]], int]


class Storage:
    """Flat FP32 buffers of several kinds of state, initially zero, and the tensors in them.

    Args:
        allocations: By kind.
        offload: Kinds to store in host memory. A kind that would fit into the device buffers stays on the device.
        device: Device of the passes.

    Attributes:
        flat: FP32 buffers by kind, on the host if offloaded; call `finish` before reading or writing them.
        tensors: By kind, on the device, as passes access them.
        windows: Buffers of the offloaded kinds.
    """

    def __init__(
        self, allocations: Mapping[str, StateAllocation], offload: Sequence[str], device: torch.device
    ) -> None:
        offloaded = [
            kind
            for kind, allocation in allocations.items()
            if kind in offload and TripleBuffer.saves_memory(*allocation)
        ]
        check_host_memory(4 * sum(allocations[kind][1] for kind in offloaded))
        self.windows = {kind: TripleBuffer(*allocations[kind], device) for kind in offloaded}
        self.flat: dict[str, Tensor] = {}
        self.tensors: dict[str, list[Tensor]] = {}
        for kind, (spans, entries) in allocations.items():
            if kind in offloaded:
                self.flat[kind], self.tensors[kind] = self.windows[kind].host, self.windows[kind].views
                continue
            self.flat[kind] = torch.zeros(entries, dtype=torch.float32, device=device)
            self.tensors[kind] = [self.flat[kind][start:end] for start, end in spans]

    def kept(self, kind: str) -> list[Tensor]:
        """Return the stored tensors, up to date; on the host if offloaded."""
        if kind not in self.windows:
            return self.tensors[kind]
        self.finish()
        window = self.windows[kind]
        return [window.host[start:end] for start, end in window.spans]

    def finish(self) -> None:
        """Wait until host memory contains the current values of offloaded state."""
        for window in self.windows.values():
            window.finish()

    def walk(
        self, kinds: Sequence[str], part: TensorRange, parts: Sequence[TensorRange], changed: bool
    ) -> Iterator[TensorRange]:
        """Yield ranges of tensors [first, end) of `part` whose offloaded state is on the device.

        Args:
            kinds: Kinds of state that the pass uses.
            part: Range of tensors to iterate over.
            parts: All ranges that the pass will process, in order.
            changed: True if the pass writes the state.
        """
        windows = [self.windows[kind] for kind in kinds if kind in self.windows]
        if not windows:
            yield part
        else:
            yield from walk(windows, part, parts, changed)

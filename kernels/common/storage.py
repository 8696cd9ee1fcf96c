"""Where optimizer state lies: on the device, or in host memory."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kernels.common.offload import DoubleBuffer, Stretch, check_host_memory, walk

# Where every tensor's entries lie in a flat buffer, (start, end), ascending; and the buffer's entries.
StateAllocation = tuple[Sequence[tuple[int, int]], int]


class Storage:
    """Flat FP32 buffers of several kinds of state, zeros at first, and the tensors in them.

    Args:
        rooms: by kind.
        offload: the kinds that are to lie in host memory. Those stay on the device that its two buffers would hold.

    Attributes:
        flat: FP32 by kind, on the host where that is offloaded; call `finish` before it is read or written.
        tensors: by kind, as passes see them, on the device.
        windows: of the kinds that are offloaded.
    """

    def __init__(self, rooms: Mapping[str, StateAllocation], offload: Sequence[str], device: torch.device) -> None:
        away = [kind for kind, room in rooms.items() if kind in offload and DoubleBuffer.pays(*room)]
        check_host_memory(4 * sum(rooms[kind][1] for kind in away))
        self.windows = {kind: DoubleBuffer(*rooms[kind], device) for kind in away}
        self.flat: dict[str, Tensor] = {}
        self.tensors: dict[str, list[Tensor]] = {}
        for kind, (spans, entries) in rooms.items():
            if kind in away:
                self.flat[kind], self.tensors[kind] = self.windows[kind].host, self.windows[kind].views
                continue
            self.flat[kind] = torch.zeros(entries, dtype=torch.float32, device=device)
            self.tensors[kind] = [self.flat[kind][start:end] for start, end in spans]

    def kept(self, kind: str) -> list[Tensor]:
        """The tensors where they are kept, on the host where offloaded; up to date."""
        if kind not in self.windows:
            return self.tensors[kind]
        self.finish()
        window = self.windows[kind]
        return [window.host[start:end] for start, end in window.spans]

    def finish(self) -> None:
        """Waits until what is offloaded lies in host memory."""
        for window in self.windows.values():
            window.finish()

    def walk(self, kinds: Sequence[str], part: Stretch, parts: Sequence[Stretch], changed: bool) -> Iterator[Stretch]:
        """The part's tensors [first, end), those at a time whose offloaded state is on the device.

        kinds: what the pass works on. parts: all that it will go through, in order. changed: whether it writes.
        """
        windows = [self.windows[kind] for kind in kinds if kind in self.windows]
        if not windows:
            yield part
        else:
            yield from walk(windows, part, parts, changed)

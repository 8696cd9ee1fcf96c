"""Delayed masks: each replica selects in its share of the blocks, and the mask is used one step later.

SCAPE paper, Section IV-A and Figure 7. The asynchronous all-gather starts at the end of a step, when the payload's
buffer is free to receive it. The next step waits for it before it first uses the mask.
"""

import torch
from torch import Tensor

from torchtitan_scape.kernels.scape.blocks import Mask
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import Handle


class DelayedMasks:
    """The mask in use (A), the previous mask (P), and the all-gather of the next one."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._passes, self.layout, self.collectives = passes, passes.layout, collectives
        self.in_use, self.previous = (Mask(_new_bits(self.layout.mask_bytes(), device)) for _ in range(2))
        # (handle, received selections, density) of the exchange in flight.
        self._in_flight: tuple[Handle, Tensor | None, float] | None = None
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def moment_masks(self, applied: bool) -> tuple[Mask, Mask]:
        """Return (the mask on which the first moment is stored, the other of the two masks).

        Between an applied step and `rotate` the moment is stored on the mask in use; after `rotate`, or after a skipped
        step, on the previous mask.

        Args:
            applied: Whether the last step was applied.
        """
        if self._in_flight is not None and applied:
            return self.in_use, self.previous
        return self.previous, self.in_use

    def exchange(self, own: Tensor | None, density: float) -> None:
        """Start the all-gather of the next mask. Collective.

        The selections are received in the payload buffer, which is not used before the next step, if they fit.

        Args:
            own: This replica's encoded selection, uint8; None for a mask of all ones.
            density: Density of the next mask.
        """
        handle, received = Handle(), own
        if own is not None and not self.collectives.is_fake and self.collectives.replicas > 1:
            received = self._receive_buffer(self.collectives.replicas * own.shape[-1])
            handle = self.collectives.all_gather(received, own)
        self._in_flight = (handle, received, density)

    def _receive_buffer(self, size: int) -> Tensor:
        spare = self._passes.payload.view(-1).view(torch.uint8)
        if spare.numel() >= size:
            self._received = spare[:0]
            return spare[:size]
        if self._received.numel() != size:
            self._received = torch.empty(size, dtype=torch.uint8, device=spare.device)
        return self._received

    def rotate(self, was_applied: bool) -> None:
        """Wait for the exchange, and use the received mask from now on if its step was applied; otherwise drop it."""
        if self._in_flight is None:
            return
        handle, received, density = self._in_flight
        self._in_flight = None
        handle.wait()
        if was_applied:
            self._passes.rotate(received, density, self.in_use.bits, self.previous.bits)
            self.previous.density, self.in_use.density = self.in_use.density, density


def _new_bits(size: int, device: torch.device) -> Tensor:
    """Return zeros, uint8 (size,), in a storage of full 32-bit words, because the kernels write words."""
    return torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=device)[:size]

"""Delayed masks: each replica selects in its own run, and the mask is used one step later.

SCAPE paper, Section IV-A and Figure 7. The exchange is asynchronous: it starts at the end of a step, when the payload's
buffer is free to receive it, and is waited for where the next step first needs the mask.
"""

import torch
from torch import Tensor

from kernels.scape.blocks import Mask
from kernels.scape.passes import ScapePasses
from topology.collectives import ReplicaCollectives
from topology.comm_stream import Handle


class DelayedMasks:
    """The mask in use (A), the one before it (P), and the one on its way."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._passes, self.layout, self.collectives = passes, passes.layout, collectives
        self.in_use, self.previous = (Mask(_new_bits(self.layout.mask_bytes(), device)) for _ in range(2))
        self._arriving: tuple[Handle, Tensor | None, float] | None = None
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def of_moment(self, applied: bool) -> tuple[Mask, Mask]:
        """The mask on which m lives, and its neighbour in time. `applied` tells of the last step.

        Before `rotate` an applied step's m lives on the mask in use; after it, or after a skipped step, on the
        one before.
        """
        if self._arriving is not None and applied:
            return self.in_use, self.previous
        return self.previous, self.in_use

    def exchange(self, own: Tensor | None, density: float) -> None:
        """Starts the all-gather of what each replica selected, uint8; None for a mask of all ones.

        What arrives lies in the payload buffer, which nobody needs before the next step, wherever it fits.
        """
        handle, received = Handle(), own
        if own is not None and not self.collectives.is_fake and self.collectives.replicas > 1:
            received = self._room(self.collectives.replicas * own.shape[-1])
            handle = self.collectives.all_gather(received, own)
        self._arriving = (handle, received, density)

    def _room(self, size: int) -> Tensor:
        spare = self._passes.payload.view(-1).view(torch.uint8)
        if spare.numel() >= size:
            self._received = spare[:0]
            return spare[:size]
        if self._received.numel() != size:
            self._received = torch.empty(size, dtype=torch.uint8, device=spare.device)
        return self._received

    def rotate(self, was_applied: bool) -> None:
        """Waits for the exchange; if its step was applied its mask comes into use, else it is dropped."""
        if self._arriving is None:
            return
        handle, received, density = self._arriving
        self._arriving = None
        handle.wait()
        if was_applied:
            self._passes.rotate(received, density, self.in_use.bits, self.previous.bits)
            self.previous.density, self.in_use.density = self.in_use.density, density


def _new_bits(size: int, device: torch.device) -> Tensor:
    """Zeros, uint8 (size,), in storage of whole 32-bit words, as the kernels set their bits."""
    return torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=device)[:size]

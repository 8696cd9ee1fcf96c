"""Delayed masks: each replica selects in its own run, and the mask is used one step later.

SCAPE paper, Section IV-A and Figure 7. The exchange is asynchronous: it starts behind the payload's and is
waited for where the next step first needs the mask.
"""

import torch
from torch import Tensor

from kernels.blocks import Mask
from kernels.passes import ScapePasses
from topology.collectives import Handle, ReplicaCollectives


class DelayedMasks:
    """The mask in use (A), the one before it (P), and the one on its way."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._passes, self.layout, self.collectives = passes, passes.layout, collectives
        self.in_use, self.previous = (Mask(_new_bits(self.layout.mask_bytes(), device)) for _ in range(2))
        self._arriving: tuple[Handle, Tensor | None, float] | None = None
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def idle(self) -> bool:
        """Whether no mask is on its way."""
        return self._arriving is None

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
        if own is None:
            self._arriving = (Handle(None), None, density)
        elif self.collectives.is_fake:
            self._arriving = (Handle(None), own, density)
        else:
            received = self._room(self.collectives.replicas * own.numel())
            self._arriving = (self.collectives.all_gather(received, own), received, density)

    def _room(self, size: int) -> Tensor:
        spare = self._passes.payload.view(torch.uint8)
        if spare.numel() >= size:
            self._received = spare[:0]
            return spare[:size]
        if self._received.numel() != size:
            self._received = torch.empty(size, dtype=torch.uint8, device=spare.device)
        return self._received

    def rotate(self, applied: Tensor, was_applied: bool | None) -> None:
        """Waits for the exchange; if the step was applied its mask comes into use, else it is dropped.

        applied: bool (), on the device. was_applied: the same where the host knows it; None while a CUDA graph is
        captured, which takes a density that no longer changes.
        """
        assert self._arriving is not None
        handle, received, density = self._arriving
        self._arriving = None
        handle.wait()
        self._passes.rotate(received, density, self.in_use.bits, self.previous.bits, applied)
        if was_applied is None and not self.in_use.density == self.previous.density == density:
            raise RuntimeError(
                f"a CUDA graph needs a density that stays: the masks have {self.previous.density}, "
                f"{self.in_use.density} and {density}; take more steps before the capture"
            )
        if was_applied:
            self.previous.density, self.in_use.density = self.in_use.density, density


def _new_bits(size: int, device: torch.device) -> Tensor:
    """Zeros, uint8 (size,), in storage of whole 32-bit words, as the kernels set their bits."""
    return torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=device)[:size]

"""Delayed masks: each replica selects in its own run, and the mask is used one step later.

SCAPE paper, Section IV-A and Figure 7. The exchange is asynchronous: it starts at the end of a step, when the payload's
buffer is free to receive it, and is waited for where the next step first needs the mask.
"""

import torch
from torch import Tensor

from kernels.scape.blocks import Mask
from kernels.scape.passes import ScapePasses
from topology.collectives import ReplicaCollectives
from topology.lanes import Handle


class DelayedMasks:
    """The mask in use (A), the one before it (P), and the one on its way."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._passes, self.layout, self.collectives = passes, passes.layout, collectives
        self.in_use, self.previous = (Mask(_new_bits(self.layout.mask_bytes(), device)) for _ in range(2))
        self._arriving: tuple[Handle, Tensor | None, float] | None = None
        # A captured graph rotates and exchanges without the host, which therefore cannot tell whether there is a mask
        # to be taken into use; this flag can. It makes `rotate` do nothing the second time.
        self._waiting = torch.zeros((), dtype=torch.bool, device=device)
        self._captured: tuple[Handle, Tensor | None, float] | None = None
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def of_moment(self, applied: bool) -> tuple[Mask, Mask]:
        """The mask on which m lives, and its neighbour in time. `applied` tells of the last step.

        Before `rotate` an applied step's m lives on the mask in use; after it, or after a skipped step, on the
        one before.
        """
        on_its_way = self._arriving is not None or (self._captured is not None and bool(self._waiting))
        if on_its_way and applied:
            return self.in_use, self.previous
        return self.previous, self.in_use

    def exchange(self, own: Tensor | None, density: float, applied: Tensor) -> None:
        """Starts the all-gather of what each replica selected, uint8; None for a mask of all ones.

        What arrives lies in the payload buffer, which nobody needs before the next step, wherever it fits.
        applied: bool (), on the device; false for a mask that shall not come into use.
        """
        handle, received = Handle(), own
        if own is not None and not self.collectives.is_fake and self.collectives.replicas > 1:
            received = self._room(self.collectives.replicas * own.shape[-1])
            handle = self.collectives.all_gather(received, own)
        self._arriving = (handle, received, density)
        self._waiting.copy_(applied)

    def _room(self, size: int) -> Tensor:
        spare = self._passes.payload.view(-1).view(torch.uint8)
        if spare.numel() >= size:
            self._received = spare[:0]
            return spare[:size]
        if self._received.numel() != size:
            self._received = torch.empty(size, dtype=torch.uint8, device=spare.device)
        return self._received

    def rotate(self, was_applied: bool | None) -> None:
        """Waits for the exchange; if its step was applied its mask comes into use, else it is dropped.

        was_applied: as the device's flag, for the densities; None where the host does not know, as after replays.
        """
        arriving = self._arriving or self._captured
        if arriving is None:
            return
        self._arriving = None
        self._take(arriving)
        if was_applied:
            self.previous.density, self.in_use.density = self.in_use.density, arriving[2]

    def rotate_captured(self) -> None:
        """`rotate` while a CUDA graph is captured. Raises RuntimeError where the density still changes."""
        arriving = self._arriving or self._captured
        densities = (self.previous.density, self.in_use.density, arriving[2] if arriving else None)
        if arriving is None or len(set(densities)) > 1:
            raise RuntimeError(
                f"a CUDA graph needs a density that stays, and the masks have {densities[0]}, {densities[1]} and "
                f"{densities[2]}; take more steps before the capture"
            )
        self._captured = arriving
        self._take(arriving)

    def drop(self) -> None:
        """Forgets the mask on its way, after a step that was not applied."""
        if self._arriving is not None:
            self._arriving[0].wait()
        self._arriving = None
        self._waiting.zero_()

    def _take(self, arriving: tuple[Handle, Tensor | None, float]) -> None:
        handle, received, density = arriving
        handle.wait()
        self._passes.rotate(received, density, self.in_use.bits, self.previous.bits, self._waiting)
        self._waiting.zero_()


def _new_bits(size: int, device: torch.device) -> Tensor:
    """Zeros, uint8 (size,), in storage of whole 32-bit words, as the kernels set their bits."""
    return torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=device)[:size]

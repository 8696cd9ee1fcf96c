"""A limit on the norm of a replica's gradient, relative to its usual norm."""

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import masked_copy_

FACTOR = 4.0  # largest norm of a replica's gradient, in units of the usual one
_STEPS = 10  # over which the usual norm is averaged
_SPIKES = 2  # in a row; the next one is the usual norm


class NormLimit:
    """Scales a replica's gradient down if its norm is above `FACTOR` times the usual one.

    Error feedback keeps the part of a gradient that a code or a mask did not send. A single huge gradient would
    therefore dominate the exchanges of many steps, and the averages of a whitening basis those of hundreds. Clipping by
    the synchronized norm comes too late for these. Limits relative to a running norm are known from ZClip (Kumar et
    al., arXiv:2504.02507) and AdaGC (Wang et al., arXiv:2502.11034); this one is for spikes alone, and far above the
    usual variation.

    A rank compares the norm of its own shards. All ranks of a replica use the smallest of their factors, so that the
    direction of the gradient stays, and so do equal copies of a parameter. A change that lasts is followed within a few
    steps.

    Attributes:
        usual: FP64 (3,) on the device: the usual norm, 0 before the first gradient; the number of averaged steps; and
            the number of the last steps in a row above the limit.
    """

    def __init__(self, device: torch.device) -> None:
        self.usual = torch.zeros(3, dtype=torch.float64, device=device)
        self._norm = self._largest = self.usual[0]

    def factor(self, norms: Tensor) -> Tensor:
        """Return the factor by which this rank would scale the gradients, FP32 (); 1 within the limit, and for NaN.

        Args:
            norms: FP64 (n,), of the gradient of each parameter.
        """
        self._norm = torch.linalg.vector_norm(norms)
        self._largest = torch.where(self.usual[0] > 0.0, FACTOR * self.usual[0], torch.inf)
        return torch.where(self._norm > self._largest, self._largest / self._norm, 1.0).float()

    def update(self, finite: Tensor) -> None:
        """Update the usual norm by the last one, if that is not 0 and all gradients are `finite`, bool ()."""
        mean, steps, above = self.usual
        is_above, largest = self._norm > self._largest, torch.minimum(self._norm, self._largest)
        steps = torch.where(mean > 0.0, (steps + 1.0).clamp(max=_STEPS), 1.0)
        above = torch.where(is_above, above + 1.0, 0.0)
        weight = torch.where(is_above, 0.5, 1.0 / steps)
        mean = torch.where(above > _SPIKES, self._norm, mean + weight * (largest - mean))
        masked_copy_(self.usual, torch.stack([mean, steps, above]), finite & (self._norm > 0.0))

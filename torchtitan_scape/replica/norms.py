"""Norms of gradients, relative to their usual values: a limit for each replica, and an alarm for their mean."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import masked_copy_

FACTOR = 4.0  # largest norm of a replica's gradient, in units of the usual one
_STEPS = 10  # over which the usual norm is averaged
ABSURD = 1000.0  # a norm that only damaged memory explains, in units of the usual one
_UNKNOWN = 20  # steps at the begin of a run without an alarm


class NormLimit:
    """Scales a replica's gradient down if its norm is above `FACTOR` times the usual one.

    Error feedback keeps the part of a gradient that a code or a mask did not send. A single huge gradient would
    therefore dominate the exchanges of many steps, and the averages of a whitening basis those of hundreds. Clipping by
    the synchronized norm comes too late for these. Limits relative to a running norm are known from ZClip (Kumar et
    al., arXiv:2504.02507) and AdaGC (Wang et al., arXiv:2502.11034); this one is for spikes alone, and far above the
    usual variation. A rank compares the norm of its own shards, so that no communication is needed. A change that lasts
    is followed within a few steps.

    Attributes:
        usual: FP64 (2,) on the device: the usual norm, 0 before the first gradient, and the number of averaged steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.usual = torch.zeros(2, dtype=torch.float64, device=device)
        self._norm = self._largest = self.usual[0]

    def holds(self, norms: Tensor) -> Tensor:
        """Return whether the norm of the gradients is within the limit, bool (). NaN is within it.

        Args:
            norms: FP64 (n,), of the gradient of each parameter.
        """
        self._norm = torch.linalg.vector_norm(norms)
        self._largest = torch.where(self.usual[0] > 0.0, FACTOR * self.usual[0], torch.inf)
        return ~(self._norm > self._largest)

    def apply(self, gradients: list[Tensor], finite: Tensor, multiply: Callable[[list[Tensor], Tensor], None]) -> None:
        """Scale the gradients of the last `holds` down to the limit, in place, and update the usual norm.

        Args:
            finite: bool (); the usual norm stays if it is false.
            multiply: multiplies tensors by a factor, FP32 (); see `kernels.backends.scaling`.
        """
        mean, steps = self.usual
        is_above, largest = self._norm > self._largest, torch.minimum(self._norm, self._largest)
        if gradients:
            multiply(gradients, torch.where(is_above, self._largest / self._norm, 1.0).float())
        steps = torch.where(mean > 0.0, (steps + 1.0).clamp(max=_STEPS), 1.0)
        weight = torch.where(is_above, 0.5, 1.0 / steps)
        masked_copy_(self.usual, torch.stack([mean + weight * (largest - mean), steps]), finite)


class NormAlarm:
    """Finds norms of clipped gradients that only damaged memory explains, on the host.

    Attributes:
        is_on: whether the last norm was one.
        usual: the mean of the last usual ones.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.usual = 0.0
        self._seen = 0

    def judge(self, norm: float) -> bool:
        """Return `is_on` for the norm of an applied step."""
        self.is_on = self._seen >= _UNKNOWN and norm > ABSURD * self.usual > 0.0
        if not self.is_on:
            self._seen += 1
            self.usual += (norm - self.usual) / min(self._seen, _STEPS)
        return self.is_on

"""A limit on the norm of a replica's gradient, relative to its usual norm."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import masked_copy_

FACTOR = 4.0  # largest norm of a replica's gradient, in units of the usual one
ABSURD = 1e4  # a norm of the synchronized gradient that only damage explains, in units of a replica's usual one
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


class NormLimits:
    """The limits of the replicas of this process, combined with those of all ranks.

    Args:
        numbers: of the replicas of this process.
        replicas: number of all replicas.
        scale: by which gradients are multiplied after their check.

    Attributes:
        each: one limit per replica of this process.
    """

    def __init__(self, numbers: Sequence[int], replicas: int, scale: float, device: torch.device) -> None:
        self.each = [NormLimit(device) for _ in numbers]
        self.replicas, self._numbers, self._scale = replicas, list(numbers), scale

    def own_factors(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the factors of this rank, FP32 (replicas,): infinity for replicas of other processes.

        The smallest of each over all ranks is the factor of the replica.

        Args:
            norms: FP64 (n,) for each replica of this process, of the gradient of each parameter.
        """
        row = self.each[0].usual.new_full((self.replicas,), torch.inf, dtype=torch.float32)
        for number, limit, of_parameters in zip(self._numbers, self.each, norms, strict=True):
            row[number].copy_(limit.factor(of_parameters))
        return row

    def scale(
        self, rows: Sequence[list[Tensor]], factors: Tensor, multiply: Callable[[list[Tensor], Tensor], None]
    ) -> None:
        """Multiply the gradients of each replica of this process by its factor, in place."""
        for number, gradients in zip(self._numbers, rows, strict=True):
            multiply(gradients, factors[number])

    def is_absurd(self, norm: Tensor) -> Tensor:
        """Return whether only damage explains the norm of the synchronized gradient, bool ()."""
        usual = torch.stack([limit.usual[0] for limit in self.each]).amax()
        return (usual > 0.0) & (norm > ABSURD * self._scale * usual)


def above_the_limit(factors: Sequence[float]) -> str:
    """Return which replica's gradient was above its limit by how much, from the factors of all; "" if none was."""
    above = [number for number, factor in enumerate(factors) if factor < 1.0]
    if not above:
        return ""
    times = FACTOR / max(factors[above[0]], 1e-38)
    more = f" (and {len(above) - 1} more)" if len(above) > 1 else ""
    return f"the gradient of replica {above[0]}{more} had {times:.3g} times its usual norm"

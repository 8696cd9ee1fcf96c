"""Elementwise steps of optimizers in plain PyTorch, tensor by tensor."""

from collections.abc import Callable, Sequence

from torch import Tensor

from torchtitan_scape.kernels.common.flat import Flat
from torchtitan_scape.kernels.common.gating import masked_copy_
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.dense.reference import adams_update_, adamw_update_, frozen_adam_update_

UPDATES: dict[str, Callable[..., None]] = {
    "adams": adams_update_,
    "adamw": adamw_update_,
    "frozen": frozen_adam_update_,
}


class TorchUpdate:
    """The elementwise step of an optimizer, with `kernels.dense.reference`.

    Args:
        rule: One of `UPDATES`.
    """

    def __init__(self, rule: str) -> None:
        self._update = UPDATES[rule]

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
        factor: Tensor | None = None,
    ) -> None:
        """Update all parameters in place.

        Args:
            parameters: Local shards, any floating-point dtype; the update is computed in FP32.
            gradients: Contiguous, one per parameter. With "frozen": the new first moments divided by 1 - beta1, FP32.
            states: First moments, and unless the rule is "adams" the second ones, in the order of the parameters and
                all of one dtype for a parameter; written, except the second ones of "frozen".
            rates: Hyper-parameters of each parameter.
            steps: (len(parameters),), applied steps of each parameter, this one included; with "frozen" those that
                updated the second moment.
            applied: bool (); nothing is written if it is false.
            factor: FP32 (), multiplies the gradients; None for 1.
        """
        for i, (parameter, gradient, r, count) in enumerate(zip(parameters, gradients, rates, steps, strict=True)):
            written = [Flat(tensor) for tensor in (parameter, *(each[i] for each in states))]
            values = gradient.float().view(-1)
            self._update(
                written[0].flat,
                values if factor is None else values * factor,
                *(each.flat for each in written[1:]),
                rates=r,
                bias_corrections=(1 - r.beta1**count, 1 - r.beta2**count),
                applied=applied,
            )
            for each in written:
                each.store()


class TorchMuon:
    """The elementwise parts of Muon's step, before and after the orthogonalization."""

    def average(
        self,
        gradients: list[Tensor],
        averages: list[Tensor],
        momenta: Sequence[float],
        applied: Tensor,
        factor: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """Add gradients to the momenta, in place: average = momentum * average + (1 - momentum) * gradient.

        Args:
            gradients: Contiguous FP32 matrices, multiplied by `factor` first, FP32 (); None for 1.
            averages: FP32, of the shapes of the gradients; not written if `applied`, bool (), is false.
            momenta: Of every matrix.
            needed: Whether the direction of a matrix is needed.

        Returns:
            BF16, (1 - momentum) * gradient + momentum * average; an empty tensor where it is not needed.
        """
        directions = []
        for gradient, average, momentum, is_needed in zip(gradients, averages, momenta, needed, strict=True):
            gradient = gradient if factor is None else gradient * factor
            new = average.lerp(gradient, 1 - momentum)
            masked_copy_(average, new, applied)
            directions.append(gradient.lerp(new, momentum).bfloat16() if is_needed else gradient.new_empty(0))
        return directions

    def move(
        self, weights: list[Tensor], directions: list[Tensor], factors: Sequence[tuple[float, float]], applied: Tensor
    ) -> None:
        """Replace weights by factor 0 times weight plus factor 1 times direction, in place, if `applied`.

        Args:
            weights: FP32.
            directions: BF16, of the shapes of the weights.
            factors: Of every weight.
        """
        for weight, direction, (kept, moved) in zip(weights, directions, factors, strict=True):
            masked_copy_(weight, (weight * kept).add_(direction, alpha=moved), applied)

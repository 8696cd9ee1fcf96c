"""Steps of elementwise optimizers, norms and the finite check in plain PyTorch: specification, and CPU code."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.tensors import Flat, Rates, adams, decay_, gated, known_false, masked_copy_


def finite(gradients: list[Tensor], limit: float = math.inf) -> Tensor:
    """Check flat gradients: bool (len(gradients),), false for a gradient with NaN or Inf. One read, no temporary.

    Args:
        limit: power of two, or infinity; absolute values from it on count as infinite.
    """
    one = torch.ones((), dtype=torch.bool, device=gradients[0].device)
    results = []
    for gradient in gradients:
        if gradient.numel() == 0:
            results.append(one)
            continue
        low, high = gradient.aminmax()  # NaN propagates through both
        results.append((low > -limit) & (high < limit))  # false for NaN
    return torch.stack(results)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of tensors, FP64 (len(tensors),)."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64))


# A rule of an elementwise optimizer returns the step without the learning rate, and the new moments, of a gradient, the
# hyper-parameters, the bias corrections of both moments, 1 - beta^t, and the moments. All tensors are FP32 (n,).
Corrections = tuple[Tensor, Tensor]
NewMoments = tuple[Tensor, tuple[Tensor, ...]]


def adams_rule(gradient: Tensor, rates: Rates, corrections: Corrections, moment: Tensor) -> NewMoments:
    """Return those of dense AdamS."""
    moment, step = adams(moment, gradient, gradient, rates, corrections)
    return step, (moment,)


def adamw_rule(
    gradient: Tensor, rates: Rates, corrections: Corrections, moment: Tensor, variance: Tensor
) -> NewMoments:
    """Return those of AdamW (Loshchilov and Hutter, arXiv:1711.05101), as `torch.optim.AdamW`."""
    new = moment.lerp(gradient, 1.0 - rates.beta1)
    second = (variance * rates.beta2).addcmul_(gradient, gradient, value=1.0 - rates.beta2)
    return (new / corrections[0]).div_((second / corrections[1]).sqrt_().add_(rates.eps)), (new, second)


def frozen_adam_rule(
    momentum: Tensor, rates: Rates, corrections: Corrections, moment: Tensor, variance: Tensor
) -> NewMoments:
    """Return those of AdamW with a frozen second moment (arXiv:2102.02888, Algorithm 1).

    An entry without variance has never had a gradient. It only decays, because its quotient would be unbounded.

    Args:
        momentum: The new first moment divided by 1 - beta1.
    """
    new = momentum * (1.0 - rates.beta1)
    step = (new / corrections[0]).div_((variance / corrections[1]).sqrt_().add_(rates.eps))
    return torch.where(variance > 0.0, step, 0.0), (new,)


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a factor, (), in place. On a CPU, where reading it costs nothing, 1 leaves out the pass."""
    if tensors and not (factor.is_cpu and factor == 1.0):
        torch._foreach_mul_(tensors, factor)


# ------------------------------------------------------------------------------------ passes over tensors

RULES: dict[str, Callable[..., NewMoments]] = {"adams": adams_rule, "adamw": adamw_rule, "frozen": frozen_adam_rule}


class TorchUpdate:
    """The elementwise step of an optimizer, with the functions above.

    Args:
        rule: One of `RULES`.
    """

    def __init__(self, rule: str) -> None:
        self._rule = RULES[rule]

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
            steps: (len(parameters),), applied steps of each parameter, this one included; with "frozen"
                (len(parameters), 2), those that updated the first and the second moment.
            applied: bool (); nothing is written if it is false.
            factor: FP32 (), multiplies the gradients; None for 1.
        """
        if known_false(applied):
            return
        for i, (parameter, gradient, r, count) in enumerate(zip(parameters, gradients, rates, steps, strict=True)):
            weight, *moments = (Flat(tensor) for tensor in (parameter, *(each[i] for each in states)))
            values = gradient.float().view(-1)
            values = values if factor is None else values * factor
            first, second = count.expand(2)
            corrections = 1 - r.beta1**first, 1 - r.beta2**second
            step, new = self._rule(values, r, corrections, *(each.flat for each in moments))
            decay_(weight.flat, r.lr * r.weight_decay, applied)
            weight.flat.sub_(gated(applied, step * r.lr, torch.zeros_like(step)))
            weight.store()
            for old, value in zip(moments, new, strict=False):  # a frozen moment stays
                old.flat.copy_(gated(applied, value, old.flat))
                old.store()


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

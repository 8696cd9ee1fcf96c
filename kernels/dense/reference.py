"""Steps of elementwise optimizers, norms and the finite check in plain PyTorch: specification, and CPU code.

The first part is shared by all passes: hyper-parameters, FP32 views, gated writes, AdamS, and sums in a given order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def in_dry_run() -> bool:
    """Return True if tensors are fake, that is, have sizes but no memory."""
    return torch._guards.detect_fake_mode() is not None


@dataclass(frozen=True)
class Rates:
    """Hyper-parameters of one tensor in one step.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: As in AdamW.
        scale: Factor on the gradient: the number of replicas if their gradients are summed.
        counted: True if the tensor is part of the gradient norm of the model.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0
    counted: bool = True

    @classmethod
    def of(cls, group: Mapping[str, Any], scale: float = 1.0, counted: bool = True) -> "Rates":
        """Return the rates of an optimizer's parameter group."""
        # Numbers, also if a learning rate is a tensor that a scheduler changes in place.
        lr, eps, weight_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return cls(lr, beta1, beta2, eps, weight_decay, scale, counted)


class Flat:
    """A tensor as writable FP32 (n,), a view if possible. `store` copies the result back if it is not a view.

    A BF16 parameter loses updates that are smaller than its rounding error.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.flat = tensor.float().contiguous().view(-1)

    def store(self) -> None:
        """Copy the values to the tensor, unless `flat` is a view of it."""
        if self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))


def known_false(flag: Tensor) -> bool:
    """Return True if the flag is false and on a CPU. On a GPU the answer would need a synchronization."""
    return flag.is_cpu and not flag


def gated(applied: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Select `new` if the step is applied, else `old`. A flag on a CPU is true here: `known_false` was checked."""
    return new if applied.is_cpu else torch.where(applied, new, old)


def masked_copy_(target: Tensor, source: Tensor | float, applied: Tensor) -> None:
    """Copy `source` to `target` if `applied`, bool (), without waiting for the device."""
    if applied.is_cpu:  # reading it costs nothing
        if applied:
            target.copy_(source.view(target.shape)) if isinstance(source, Tensor) else target.fill_(source)
        return
    value = source if isinstance(source, Tensor) else torch.full_like(target, source)
    torch.where(applied, value.view(target.shape).to(target.dtype), target, out=target)


def record_streams(*tensors: Tensor | None) -> None:
    """Mark memory as used by the current stream: a hook of the backward pass may have allocated it on another one."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def decay_(parameter: Tensor, rate: float, applied: Tensor) -> None:
    """Decay in place: parameter -= rate * parameter.

    A factor 1 - rate would be rounded to FP32, with the same error in every step.
    """
    parameter.addcmul_(parameter, applied.to(parameter.dtype), value=-rate)


def adams(
    before: Tensor, gradient: Tensor, clipped: Tensor, rates: Rates, bias_corrections: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute AdamS: the new first moment, and the step without the learning rate (AdamS paper, Algorithm 1).

    The second moment is v = beta2 * m^2 + (1 - beta2) * g^2 with the first moment m of the last step. All tensors are
    FP32 (n,).

    Args:
        before: First moment of the last step.
        gradient: For the first moment.
        clipped: Clipped gradient, for the second moment.
        bias_corrections: (1 - beta1^t, 1 - beta2^t); t counts applied steps.
    """
    second = before.square().mul_(rates.beta2).add_(clipped.square(), alpha=1.0 - rates.beta2)
    moment = (before * rates.beta1).add_(gradient, alpha=1.0 - rates.beta1)
    return moment, (moment / bias_corrections[0]).div_((second / bias_corrections[1]).sqrt_().add_(rates.eps))


def divisor_of(x: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor, (), to divide x by.

    PyTorch replaces a division by a Python number on a GPU with a multiplication by its inverse, which rounds twice.
    """
    return x.new_full((), value)


def add_in_order_(total: Tensor, rows: Tensor) -> None:
    """Add `rows`, FP32 (k, ...), to `total`, FP32 (...), one after the other.

    On a CPU this is one operator, because `index_add_` adds the rows in order. On a GPU its order is undefined, so that
    each row is one launch; the Triton kernels add all rows in one.
    """
    if rows.is_cpu:
        total[None].index_add_(0, torch.zeros(len(rows), dtype=torch.int64, device="cpu"), rows)
        return
    for row in rows:
        total += row


# ------------------------------------------------------------------------------------ checks, norms and steps


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
# hyper-parameters, the bias corrections (1 - beta1^t, 1 - beta2^t), and the moments. All tensors are FP32 (n,).
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
    step = new / (variance / corrections[1]).sqrt_().add_(rates.eps)
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
            steps: (len(parameters),), applied steps of each parameter, this one included; with "frozen" those that
                updated the second moment.
            applied: bool (); nothing is written if it is false.
            factor: FP32 (), multiplies the gradients; None for 1.
        """
        if known_false(applied):
            return
        for i, (parameter, gradient, r, count) in enumerate(zip(parameters, gradients, rates, steps, strict=True)):
            weight, *moments = (Flat(tensor) for tensor in (parameter, *(each[i] for each in states)))
            values = gradient.float().view(-1)
            values = values if factor is None else values * factor
            corrections = 1 - r.beta1**count, 1 - r.beta2**count
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

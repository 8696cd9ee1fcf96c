"""Shared parts of the PyTorch passes: hyper-parameters, FP32 views, gated writes, AdamS, and sums in a given order."""

from collections.abc import Mapping
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

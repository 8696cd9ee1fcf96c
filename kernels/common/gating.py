"""Writes that a flag on the device gates, and weight decay, for the PyTorch passes."""

import torch
from torch import Tensor


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


def decay_(parameter: Tensor, rate: float, applied: Tensor) -> None:
    """Decay in place: parameter -= rate * parameter.

    A factor 1 - rate would be rounded to FP32, with the same error in every step.
    """
    parameter.addcmul_(parameter, applied.to(parameter.dtype), value=-rate)

"""Gradient norm, clipping, and an optimizer step that the device can skip."""

from collections.abc import Sequence

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard


def norm_over_model(
    shards: Sequence[Shard], norms: Sequence[Tensor], collectives: ReplicaCollectives, device: torch.device
) -> Tensor:
    """Return the norm over the whole model, FP32 (). Collective.

    The result is bitwise equal on ranks with bitwise equal inputs.

    Args:
        norms: FP64 () per shard.
    """
    counted = [norm for shard, norm in zip(shards, norms, strict=True) if shard.counted]
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        squares += torch.stack(counted).square().sum().float()
    return collectives.sum_over_model(squares).sqrt()


def clip(gradients: list[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`, and return the factor, FP32 ()."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor)
    return factor


def update(optimizer: torch.optim.Optimizer, applied: Tensor) -> None:
    """Run the optimizer's step if `applied`, bool () on the device."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Fused optimizers skip the step on the device if `found_inf` is set, as for `torch.amp.GradScaler`.
        optimizer.found_inf = (~applied).float()  # type: ignore[union-attr]
        optimizer.step()
    elif applied.item():
        optimizer.step()

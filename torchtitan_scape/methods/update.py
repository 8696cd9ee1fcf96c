"""Clipping and the optimizer's update, of a step that may have to be skipped."""

from collections.abc import Sequence

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard


def norm_over_model(
    shards: Sequence[Shard], norms: Sequence[Tensor], collectives: ReplicaCollectives, device: torch.device
) -> Tensor:
    """FP32 (): of what has these norms, FP64 () a shard. The same bits wherever those are the same."""
    counted = [norm for shard, norm in zip(shards, norms, strict=True) if shard.counted]
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        squares += torch.stack(counted).square().sum().float()
    return collectives.sum_over_model(squares).sqrt()


def clip(gradients: list[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scales the gradients, in place, to a norm of `max_norm` at most; returns the factor, FP32 ()."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return factor


def update(optimizer: torch.optim.Optimizer, applied: Tensor) -> None:
    """The optimizer's step, unless not `applied`."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # The way a gradient scaler skips a step, on the device.
        optimizer.found_inf = (~applied).float()  # type: ignore[union-attr]
        optimizer.step()
    elif applied.item():
        optimizer.step()

"""Gradient norm, clipping, and an optimizer step that the device can skip or that stands for several steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.topology.collectives import ReplicaCollectives


def norm_over_model(
    shards: Sequence[Shard], norms: Sequence[Tensor] | Tensor, collectives: ReplicaCollectives, device: torch.device
) -> Tensor:
    """Return the norm over the whole model, FP32 (). Collective.

    The result is bitwise equal on ranks with bitwise equal inputs.

    Args:
        norms: FP64 () per shard, or FP64 (n,).
    """
    counted = [i for i, shard in enumerate(shards) if shard.counted]
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        if not isinstance(norms, Tensor) or len(counted) < len(shards):
            norms = torch.stack([norms[i] for i in counted])
        squares += norms.square().sum().float()
    return collectives.sum_over_model(squares).sqrt()


def clip(
    gradients: list[Tensor],
    norm: Tensor,
    max_norm: float,
    scale: float = 1.0,
    multiply: Callable[[list[Tensor], Tensor], None] = torch._foreach_mul_,
) -> Tensor:
    """Multiply the gradients by `scale`, and clip their norm to `max_norm`, in place.

    Args:
        norm: FP32 (), of the gradients times `scale`.
        multiply: Multiplies tensors by a factor, see `kernels.backends.scaling`.

    Returns:
        The factor of the clipping, FP32 ().
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        multiply(gradients, factor * scale)
    return factor


def update(optimizer: torch.optim.Optimizer, applied: Tensor) -> None:
    """Run the optimizer's step if `applied`, bool () on the device."""
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not _creates_momentum(optimizer):
        # Fused optimizers skip the step on the device if `found_inf` is set, as for `torch.amp.GradScaler`.
        optimizer.found_inf = (~applied).float()  # type: ignore[union-attr]
        optimizer.step()
    elif applied.item():
        optimizer.step()


def _creates_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this step creates momentum buffers: fused SGD leaves them uninitialized if it skips the step."""
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )


@contextmanager
def one_for_several_steps(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    """Let one step of the optimizer, with the mean of several gradients, stand for as many steps.

    Learning rates are multiplied by `steps`, and `betas` raised to that power. With AdamW equal gradients then have the
    same effect as in these steps; with AdamS and momentum about the same, once the moments have settled. SGD adds
    gradients up in its momentum, which receives the sum of those in the steps. Rates with other names stay.
    """
    groups = optimizer.param_groups if steps > 1 else []
    keys = ("lr", "betas", "momentum", "dampening")
    kept = [{key: group[key] for key in keys if key in group} for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * steps
        if "betas" in group:
            group["betas"] = tuple(beta**steps for beta in group["betas"])
        elif momentum := group.get("momentum"):
            group["momentum"] = momentum**steps
            group["dampening"] = 1.0 - (1.0 - group["dampening"]) * sum(momentum**i for i in range(steps))
    try:
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)

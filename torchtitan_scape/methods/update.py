"""Gradient norm, clipping, and an optimizer step that the device can skip or that stands for several steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, store_gradient
from torchtitan_scape.optimizers.adamw_pass import AdamWPass
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


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, FP32 (), that limits a norm, FP32 (), to `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class OptimizerStep:
    """The step of an optimizer on gradients times a factor, which the device can skip.

    A kernel multiplies the gradients as it reads them, if it has the optimizer's rule. Otherwise they are multiplied in
    place before; those of parameters in FP16 as well, whose range a gradient before clipping may exceed.

    Args:
        optimizer: The optimizer.
        backend: "triton" or "torch".
        multiply: Multiplies tensors in place by a factor on their device, see `kernels.backends.scaling`.

    Attributes:
        may_multiply: Whether a kernel may multiply, so that the stored gradients do not change. A method that reads
            them after the step sets it to False.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, backend: str, multiply: Callable[[list[Tensor], Tensor], None]
    ) -> None:
        self._optimizer, self._multiply = optimizer, multiply
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        self.may_multiply = backend == "triton" and torch.float16 not in dtypes
        self._adamw = AdamWPass(optimizer, backend) if self.may_multiply else None

    def __call__(
        self, shards: Sequence[Shard], gradients: list[Tensor], applied: Tensor, factor: Tensor | None = None
    ) -> None:
        """Take the step if `applied`, bool () on the device.

        Args:
            shards: Parameters that receive their gradients here; those of others are unchanged.
            gradients: FP32, of the shards; they may be overwritten.
            factor: FP32 (); None for 1.
        """
        optimizer = self._optimizer
        adamw = self._adamw if self._adamw is not None and self._adamw.has_rule() else None
        multiplies = self.may_multiply and (adamw is not None or hasattr(optimizer, "gradient_factor"))
        if factor is not None and not multiplies:
            self._multiply(gradients, factor)
            factor = None
        for shard, gradient in zip(shards, gradients, strict=True):
            store_gradient(shard, gradient)
        if adamw is not None:
            adamw.step(applied, factor)
        elif multiplies:
            optimizer.gradient_factor = factor  # type: ignore[attr-defined]
            try:
                self._step(applied)
            finally:
                optimizer.gradient_factor = None  # type: ignore[attr-defined]
        else:
            self._step(applied)

    def _step(self, applied: Tensor) -> None:
        optimizer = self._optimizer
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
def scaled_for_steps(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    """Scale the rates so that one step of the optimizer, with the mean of several gradients, replaces as many steps.

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

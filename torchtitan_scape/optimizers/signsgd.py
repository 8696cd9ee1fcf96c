"""Sign descent (Bernstein et al., "signSGD", ICML 2018, arXiv:1802.04434), an optimizer without moments."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.options import check_hyperparameters
from torchtitan_scape.core.parameters import collect_shards, local
from torchtitan_scape.core.tensors import masked_copy_


class SignSGD(Optimizer):
    """theta = theta - lr weight_decay theta - lr sign(gradient), on synchronized gradients.

    Momentum must be part of the gradient, as with `[sync] method = "demo"`. Clipping has no effect. A parameter without
    a gradient is not changed. If `found_inf`, a tensor set from outside as a gradient scaler does, is not 0, the step
    is skipped on the device and nothing is written. The state of every parameter is "step".

    Args:
        params, lr, weight_decay: As in `torch.optim.SGD`. Parameters are plain tensors or DTensors, named or not.
    """

    found_inf: Tensor | None = None  # `GradScaler` sets and deletes that of an object

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        check_hyperparameters(lr, (0.0, 0.0), 0.0, weight_decay)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self._step_supports_amp_scaling = True  # Declares support of `found_inf`, as PyTorch's fused optimizers do.
        self._shards = collect_shards(self.param_groups)
        for shard in self._shards:
            step = torch.zeros((), dtype=torch.float32, device=local(shard.parameter).device)
            self.state[shard.parameter] = {"step": step}

    def for_parts(self, param_groups: list[dict[str, Any]]) -> "SignSGD":
        """Return an optimizer with the same settings for other param groups."""
        return SignSGD(param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Return the closure's value, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for shard in (shard for shard in self._shards if shard.parameter.grad is not None):
            group, theta = self.param_groups[shard.group], local(shard.parameter).detach()
            applied = torch.ones((), dtype=torch.bool, device=theta.device)
            if self.found_inf is not None:
                applied = self.found_inf.to(theta.device) == 0
            decayed = theta * (1.0 - group["lr"] * group["weight_decay"])
            masked_copy_(theta, decayed.sub_(local(shard.parameter.grad).sign(), alpha=group["lr"]), applied)
            self.state[shard.parameter]["step"] += applied
        return loss

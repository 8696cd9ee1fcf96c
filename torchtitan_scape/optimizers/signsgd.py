"""Descent by signs (Bernstein et al., "signSGD", ICML 2018, arXiv:1802.04434): an optimizer that keeps nothing."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.hyperparameters import check_hyperparameters
from torchtitan_scape.core.parameters import collect_shards, local
from torchtitan_scape.methods.interface import masked_copy_


class SignSGD(Optimizer):
    """theta = theta - lr weight_decay theta - lr sign(gradient), on gradients that are already synchronised.

    It has no moments: momentum is to be in the gradient, as `[sync] method = "demo"` gives it. No clipping is seen.
    Args as in `torch.optim.SGD`; plain tensors or DTensors, named or not. A parameter without a gradient is left as it
    is. `found_inf`, a tensor set from outside as a gradient scaler sets it, skips the step where it is not 0, on the
    device, with nothing written. State of every parameter is "step" alone.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        check_hyperparameters(lr, (0.0, 0.0), 0.0, weight_decay)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.found_inf: Tensor | None = None
        self._step_supports_amp_scaling = True  # as PyTorch's fused optimizers say that they mind `found_inf`
        self._shards = collect_shards(self.param_groups)
        for shard in self._shards:
            step = torch.zeros((), dtype=torch.float32, device=local(shard.parameter).device)
            self.state[shard.parameter] = {"step": step}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Returns the closure's value, None without one."""
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

"""Dense AdamS: Adam whose normaliser is its own momentum, so that it keeps one moment instead of two.

Zhang, Wang, Chen, "AdamS: Momentum Itself Can Be A Normalizer for LLM Pretraining and Post-training" (EMNLP 2025).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kernels import reference
from torchtitan_scape.optimizer.options import check_hyperparameters
from torchtitan_scape.optimizer.shards import FlatParameter, collect_shards, flat_gradient, local


class AdamS(Optimizer):
    """AdamS on gradients that are already synchronised; decoupled weight decay.

    Args as in `torch.optim.AdamW`; `params` may be plain tensors or DTensors, named or not. A parameter
    without a gradient is left as it is. `found_inf`, a tensor set from outside as a gradient scaler sets it,
    skips the step where it is not 0, on the device, with nothing written.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.found_inf: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. All state exists at once: checkpoint helpers would otherwise make it by taking a step."""
        super().add_param_group(param_group)
        self._shards = collect_shards(self.param_groups)
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32).detach(),
                "step": torch.zeros((), dtype=torch.float64, device=local(parameter).device),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps its dtypes, and the step counter comes to the parameter's device."""
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            saved, device = state_dict["state"][saved_id], local(parameter).device
            self.state[parameter] = {
                "exp_avg": saved["exp_avg"].to(device=device, dtype=torch.float32),
                "step": saved["step"].to(device=device, dtype=torch.float64),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Returns the closure's value, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for shard in self._shards:
            if shard.parameter.grad is None:
                continue
            group, state = self.param_groups[shard.group], self.state[shard.parameter]
            applied = torch.ones_like(state["step"], dtype=torch.bool)
            if self.found_inf is not None:
                applied = self.found_inf == 0
            state["step"] += applied
            parameter, moment = FlatParameter(shard.parameter), FlatParameter(state["exp_avg"])
            beta1, beta2 = group["betas"]
            reference.adams_update_(
                parameter.flat,
                flat_gradient(shard),
                moment.flat,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                bias_corrections=(1 - beta1 ** state["step"], 1 - beta2 ** state["step"]),
                applied=applied,
            )
            parameter.store()
            moment.store()
        return loss

"""Dense AdamS and SignSGD: the elementwise optimizers that PyTorch does not have."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.options import check_hyperparameters
from torchtitan_scape.core.parameters import Shard, collect_shards, contiguous_gradient, local, stored
from torchtitan_scape.core.tensors import add_to_each_, masked_copy_
from torchtitan_scape.kernels.backends import choose_backend, elementwise_update
from torchtitan_scape.kernels.common.tensors import Rates


class AdamS(Optimizer):
    """AdamS on synchronized gradients: Adam with a normalizer computed from its momentum, so that it stores one moment.

    Zhang, Wang, Chen, "AdamS: Momentum Itself Can Be A Normalizer for LLM Pretraining and Post-training" (EMNLP 2025),
    with decoupled weight decay.

    A parameter without a gradient is not changed. If `found_inf`, a tensor set from outside as a gradient scaler does,
    is not 0, the step is skipped on the device and nothing is written. The gradients are multiplied by
    `gradient_factor`, FP32 () or None, as they are read.

    Args:
        params, lr, betas, eps, weight_decay: As in `torch.optim.AdamW`. Parameters are plain tensors or DTensors, named
            or not.
        kernels: "auto" (one Triton launch on a GPU, PyTorch on a CPU), "triton" or "torch".
        allocate_state: False for an optimizer that supplies its rates to a method that performs the update itself.
            It has no state and cannot step.
    """

    found_inf: Tensor | None = None  # `GradScaler` sets and deletes that of an object
    gradient_factor: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        kernels: str = "auto",
        allocate_state: bool = True,
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        self._allocates_state = allocate_state
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._step_supports_amp_scaling = True  # Declares support of `found_inf`, as PyTorch's fused optimizers do.
        self._kernels = kernels
        self._passes: dict[torch.device, Any] = {}  # One launch processes tensors of one device.
        for shard in self._shards:
            # Raises here instead of in a step.
            choose_backend(kernels, local(shard.parameter).device, [shard.parameter.dtype])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as torch does, with all state, because checkpoint helpers would otherwise create it by a
        step.
        """
        super().add_param_group(param_group)
        has_any = any(group["params"] for group in self.param_groups)  # the first param groups may be empty
        self._shards = collect_shards(self.param_groups) if has_any else []
        for parameter in self.param_groups[-1]["params"] if self._allocates_state else ():
            self.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32).detach(),
                "step": torch.zeros((), dtype=torch.float64, device=local(parameter).device),
            }

    def for_parts(self, param_groups: list[dict[str, Any]]) -> "AdamS":
        """Return an optimizer with the same settings for other param groups."""
        return AdamS(param_groups, kernels=self._kernels)

    def release_state(self) -> None:
        """Drop the moments: a method stores them, and reads the rates of this optimizer."""
        self.state.clear()
        self._allocates_state = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, but keep its dtypes, and move the step counter to the parameter's device."""
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True) if self._allocates_state else ():
            saved, device = state_dict["state"][saved_id], local(parameter).device
            self.state[parameter] = {
                "exp_avg": saved["exp_avg"].to(device=device, dtype=torch.float32),
                "step": saved["step"].to(device=device, dtype=torch.float64),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Return the closure's value, or None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_device: dict[torch.device, list[Shard]] = defaultdict(list)
        for shard in self._shards:
            if shard.parameter.grad is not None:
                by_device[local(shard.parameter).device].append(shard)
        for device, shards in by_device.items():
            if device not in self._passes:
                backend = choose_backend(self._kernels, device, {s.parameter.dtype for s in shards})
                self._passes[device] = elementwise_update(backend, "adams")
            applied = torch.ones((), dtype=torch.bool, device=device)
            if self.found_inf is not None:
                applied = self.found_inf.to(device) == 0
            states = [self.state[shard.parameter] for shard in shards]
            add_to_each_([state["step"] for state in states], applied)
            rates = [Rates.of(group) for group in self.param_groups]
            self._passes[device].step(
                [stored(shard.parameter) for shard in shards],
                [contiguous_gradient(shard) for shard in shards],
                [[local(state["exp_avg"]) for state in states]],
                [rates[shard.group] for shard in shards],
                torch.stack([state["step"] for state in states]),
                applied,
                self.gradient_factor,
            )
        return loss


class SignSGD(Optimizer):
    """Sign descent: theta = theta - lr weight_decay theta - lr sign(gradient), on synchronized gradients.

    Bernstein et al., "signSGD", ICML 2018, arXiv:1802.04434.

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

"""The step of PyTorch's AdamW in one launch, with a flag and a factor on the device."""

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import StoredTensors, collect_shards, contiguous_gradient, local
from torchtitan_scape.core.tensors import add_to_each_
from torchtitan_scape.kernels.backends import elementwise_update
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.optimizers.initial_state import create_state

_OTHER_RULES = ("amsgrad", "maximize", "differentiable")


class AdamWPass:
    """Takes the steps of a `torch.optim.AdamW`, whose state and rates it uses.

    PyTorch's own step can be skipped on the device as well, but it writes the gradients if it multiplies them.

    Args:
        optimizer: The optimizer; ask `has_rule` before a step.
        backend: "triton" or "torch".
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: str) -> None:
        self._optimizer, self._pass = optimizer, elementwise_update(backend, "adamw")
        self._shards = collect_shards(optimizer.param_groups)
        self._stored = StoredTensors(self._shards)

    def has_rule(self) -> bool:
        """Return whether a step now would be that of the optimizer: a loaded state may change its settings.

        Its counters of steps must be on the device of the parameters, and its rates on the host. Hooks of its steps
        are run by its own step only.
        """
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        return (
            type(optimizer) is torch.optim.AdamW
            and not any(group.get(key) for group in groups for key in _OTHER_RULES)
            and all(group.get("fused") or group.get("capturable") for group in groups)
            and not any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups)
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        )

    def step(self, applied: Tensor, factor: Tensor | None = None) -> None:
        """Update the parameters that have gradients, if `applied`, bool (). factor: FP32 (), of the gradients."""
        pairs = zip(self._shards, self._stored(), strict=True)
        present = [(shard, stored) for shard, stored in pairs if shard.parameter.grad is not None]
        if not present:
            return
        shards, parameters = zip(*present, strict=True)
        if any(shard.parameter not in self._optimizer.state for shard in shards):
            create_state(self._optimizer)
        states = [self._optimizer.state[shard.parameter] for shard in shards]
        counters = [state["step"] for state in states]
        add_to_each_(counters, applied)
        rates = [Rates.of(group) for group in self._optimizer.param_groups]
        self._pass.step(
            list(parameters),
            [contiguous_gradient(shard) for shard in shards],
            [[local(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq")],
            [rates[shard.group] for shard in shards],
            torch.stack(counters),
            applied,
            factor,
        )

"""PyTorch's optimizers: their algorithm, their state before the first step, and the step of AdamW in one launch."""

from collections import OrderedDict
from collections.abc import Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_scape.core.parameters import Shard, StoredTensors, collect_shards, contiguous_gradient, local
from torchtitan_scape.core.tensors import add_to_each_
from torchtitan_scape.kernels.backends import elementwise_update
from torchtitan_scape.kernels.common.tensors import Rates, in_dry_run

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of PyTorch's optimizers
_NOT_FROM_ZEROS = (torch.optim.ASGD, torch.optim.Rprop)


def initial_value(kind: str) -> float:
    """Return the value of all entries of an optimizer's state before the first step, by its key."""
    return 1.0 if kind == "mu_product" else 0.0  # NAdam's product of momenta


def state_by_kind(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """Return the local tensors of an optimizer's state without counters, by kind and name of the parameter.

    Returns:
        The state of the shapes of the parameters, and that of other shapes. A number per parameter has the shape of one
        without dimensions; it counts as of another shape if it has one for any parameter.
    """
    moments, others = dict[str, dict[str, Tensor]](), dict[str, dict[str, Tensor]]()
    for shard in shards:
        for kind, values in optimizer.state[shard.parameter].items():
            if isinstance(values, Tensor) and kind != "step":
                by_kind = moments if values.shape == shard.parameter.shape else others
                by_kind.setdefault(kind, {})[shard.name] = local(values)
    for kind in others:
        others[kind] |= moments.pop(kind, {})
    return moments, others


def create_state(optimizer: torch.optim.Optimizer, to_load: bool = False) -> None:
    """Make an optimizer create the state that parameters lack, as it is before the first step.

    PyTorch creates it in `step` alone: this takes a step of length 0 with zero gradients, and resets what it counted.
    Neither weights, param groups nor the state of other parameters change, also if an optimizer stores counters in its
    param groups, or changes weights although its rates are 0.

    Args:
        to_load: All of it is loaded before the next step.

    Raises:
        ValueError: the state of this class, or with these rates, does not start from zeros.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    without = [p for p in parameters if not optimizer.state.get(p)]
    if not without:
        return
    if isinstance(optimizer, _NOT_FROM_ZEROS):
        raise ValueError(
            f"{type(optimizer).__name__} keeps state that does not start from zeros, which checkpoints and some "
            "methods need; use another optimizer, such as AdamW"
        )
    if not to_load and any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} with dampening does not dampen its first gradient, so that its momentum does "
            "not start from zeros. Methods with state of each replica need that, and so do saves before the first step "
            "and loads from another method or optimizer; set dampening = 0"
        )
    neutral = {"lr": 0.0, "weight_decay": 0.0, "eps": 0.7310585786}  # with eps = 0 the step would compute 0 / 0
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    known = type(optimizer).__module__.startswith(("torch.optim", "torchtitan_scape."))
    weights = [] if known else [p.detach().clone() for p in parameters]
    for group, rates in zip(optimizer.param_groups, kept, strict=True):
        for key in neutral.keys() & rates:
            if isinstance(rates[key], Tensor):
                group[key] = torch.full_like(rates[key], neutral[key])  # torchao's optimizers refuse other types
            elif not isinstance(rates[key], tuple):  # Adafactor's eps is a pair
                group[key] = neutral[key]
    for parameter in parameters:
        parameter.grad = None
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    hooks = {name: getattr(optimizer, name) for name in _STEP_HOOKS}
    for name in _STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())  # this is no step of the run
    optimizer.step()
    for name, registered in hooks.items():
        setattr(optimizer, name, registered)
    with torch.no_grad():
        for parameter, values in zip(parameters, weights, strict=False):
            parameter.copy_(values)
    for parameter in without if not in_dry_run() else ():
        state = optimizer.state.get(parameter, {})
        set_counter(state, 0.0)
        for key, values in state.items():
            if not isinstance(values, Tensor) or is_traceable_wrapper_subclass(local(values)):
                continue  # torchao's states of 4 or 8 bits are still zeros
            # Schedule-free optimizers start from a copy of the weights.
            if key == "step" or not torch.equal(local(values), local(parameter)):
                values.fill_(initial_value(key))
    for group, rates in zip(optimizer.param_groups, kept, strict=True):
        for key in group.keys() - rates - {"params"}:
            del group[key]
        group.update(rates)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def set_counter(state: dict[str, Any], steps: float) -> None:
    """Set the number of steps in the state of a parameter, if it has one: a tensor, or a number in some classes."""
    if isinstance(counter := state.get("step"), Tensor):
        counter.fill_(steps)
    elif counter is not None:
        state["step"] = type(counter)(steps)


_METHODS = ("step", "_init_group")  # the second one creates PyTorch's state


def has_step_of(optimizer: Optimizer, *kinds: type[Optimizer]) -> bool:
    """Return whether an optimizer is of one of these classes, or of a subclass with the same step."""
    return any(isinstance(optimizer, kind) and _step_of(type(optimizer)) == _step_of(kind) for kind in kinds)


def _step_of(kind: type[Optimizer]) -> list[Any]:
    """Return the functions of a step, without the wrappers that PyTorch adds when a class is first used."""
    return [unwrap(getattr(kind, name, None)) for name in _METHODS]  # type: ignore[arg-type]


def difference_from_adamw(optimizer: Optimizer) -> str:
    """Return the settings by which the step of an Adam differs from that of AdamW; "" if there are none."""
    groups = optimizer.param_groups
    settings = [key for key in ("amsgrad", "maximize") if any(group.get(key) for group in groups)]
    if any(group.get("weight_decay") and not group.get("decoupled_weight_decay", True) for group in groups):
        settings.append("L2 weight decay")
    return " and ".join(settings)


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

"""The state of an optimizer, by kind, and its values before the first step."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.kernels.common.dry_run import in_dry_run

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of PyTorch's optimizers
_NOT_FROM_ZEROS = (torch.optim.ASGD, torch.optim.Rprop)


def initial_value(kind: str) -> float:
    """Return the value of all entries of an optimizer's state before the first step, by its key."""
    return 1.0 if kind == "mu_product" else 0.0  # NAdam's product of momenta


def state_by_kind(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """Return the local tensors of an optimizer's state without counters, by kind and name of the parameter.

    Returns:
        The state of the shapes of the parameters, and that of other shapes.
    """
    moments, others = dict[str, dict[str, Tensor]](), dict[str, dict[str, Tensor]]()
    for shard in shards:
        for kind, values in optimizer.state[shard.parameter].items():
            if isinstance(values, Tensor) and kind != "step":
                by_kind = moments if values.shape == shard.parameter.shape else others
                by_kind.setdefault(kind, {})[shard.name] = local(values)
    return moments, others


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create the state that parameters lack, as it is before the first step.

    PyTorch creates it in `step` alone: this takes a step of length 0 with zero gradients, and resets what it counted.
    Neither weights, param groups nor the state of other parameters change.

    Raises:
        ValueError: the state of this class does not start from zeros.
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
    neutral = {"lr": 0.0, "weight_decay": 0.0, "eps": 0.7310585786}  # with eps = 0 the step would compute 0 / 0
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    for group, rates in zip(optimizer.param_groups, kept, strict=True):
        # Adafactor's eps is a pair.
        group.update({key: neutral[key] for key in neutral.keys() & rates if not isinstance(rates[key], tuple)})
    for parameter in parameters:
        parameter.grad = None
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    hooks = {name: getattr(optimizer, name) for name in STEP_HOOKS}
    for name in STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())  # this is no step of the run
    optimizer.step()
    for name, registered in hooks.items():
        setattr(optimizer, name, registered)
    for parameter in without if not in_dry_run() else ():
        for key, values in optimizer.state.get(parameter, {}).items():
            is_copy = isinstance(values, Tensor) and key != "step" and torch.equal(local(values), local(parameter))
            if isinstance(values, Tensor) and not is_copy:  # schedule-free optimizers start from a copy of the weights
                values.fill_(initial_value(key))
    for group, rates in zip(optimizer.param_groups, kept, strict=True):
        group.update(rates)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

"""An optimizer for other tensors in place of a model's parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.algorithms import has_step_of
from torchtitan_scape.optimizers.initial_state import STEP_HOOKS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.signsgd import SignSGD


def optimizer_of_parts(optimizer: Optimizer, parts: Sequence[Shard], wholes: Mapping[str, Tensor]) -> Optimizer | None:
    """Return an optimizer as another one, for parts of its parameters, without their state; None if there are no parts.

    Args:
        optimizer: Supplies class, rates and hooks. It is not changed.
        parts: Have the indices of its param groups.
        wholes: Its parameters, by the names of the parts.

    Raises:
        ValueError: It is a subclass of an optimizer of this project with a step of its own.
    """
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        own = [part for part in parts if part.group == index]
        of_group = {"params": [part.parameter for part in own], "param_names": [part.name for part in own]}
        groups.append({**group, **of_group})
    if not parts:
        return None
    made: Optimizer
    if isinstance(optimizer, Muon | AdamS | SignSGD):
        if not has_step_of(optimizer, Muon, AdamS, SignSGD):
            raise ValueError(
                f"{type(optimizer).__name__} has a step of its own, which would be lost: its updates are divided among "
                "replicas; pass an optimizer that is no subclass of Muon, AdamS or SignSGD"
            )
        made = optimizer.for_parts(groups, wholes) if isinstance(optimizer, Muon) else optimizer.for_parts(groups)
        for hooks in STEP_HOOKS:
            setattr(made, hooks, getattr(optimizer, hooks))
        return made
    made = object.__new__(type(optimizer))
    # A learning-rate scheduler replaces the step of an object, by one that is bound to it.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def release_state(optimizer: Optimizer) -> None:
    """Drop the state of all parameters: it is stored elsewhere from now on."""
    if isinstance(optimizer, AdamS):
        optimizer.release_state()
    else:
        optimizer.state.clear()

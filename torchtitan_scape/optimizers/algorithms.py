"""The algorithm of an optimizer, by its class and settings.

Names of classes and keys of param groups do not identify it: Adamax, NAdam and optimizers with three betas have `betas`
too, and other packages have classes of the name AdamW.
"""

from inspect import unwrap
from typing import Any

from torch.optim import Optimizer

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

"""An optimizer for other tensors in place of a model's parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.signsgd import SignSGD


def optimizer_of_parts(optimizer: Optimizer, parts: Sequence[Shard], wholes: Mapping[str, Tensor]) -> Optimizer | None:
    """Return an optimizer as another one, for parts of its parameters, without their state; None if there are no parts.

    Args:
        optimizer: Supplies class, rates and hooks. It is not changed.
        parts: Have the indices of its param groups.
        wholes: Its parameters, by the names of the parts.
    """
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        own = [part for part in parts if part.group == index]
        of_group = {"params": [part.parameter for part in own], "param_names": [part.name for part in own]}
        groups.append({**group, **of_group})
    if not parts:
        return None
    if isinstance(optimizer, Muon):
        return optimizer.for_parts(groups, wholes)
    if isinstance(optimizer, AdamS | SignSGD):
        return optimizer.for_parts(groups)
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def release_state(optimizer: Optimizer) -> None:
    """Drop the state of all parameters: it is stored elsewhere from now on."""
    if isinstance(optimizer, Muon | AdamS):
        optimizer.release_state()
    else:
        optimizer.state.clear()

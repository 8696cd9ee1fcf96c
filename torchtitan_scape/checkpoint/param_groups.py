"""The values of param groups in a checkpoint: learning rates, betas, and those that schedulers keep there.

They have the names that PyTorch gives them, "param_groups.NAME.KEY", where NAME is a parameter of the group. Schedulers
compute a rate from the present one, so a resumed run needs these values besides the scheduler's state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.optimizers.algorithms import has_decoupled_decay

PREFIX = "param_groups."
# Keys that select an implementation, or determine which state the optimizer has: a run keeps its own values.
_OF_THIS_RUN = {"fused", "foreach", "capturable", "differentiable", "amsgrad"}


def group_values(param_groups: Sequence[dict[str, Any]], shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the plain values of all param groups, each under the name of its group's first parameter."""
    first = {shard.group: shard.name for shard in reversed(shards)}
    return {
        f"{PREFIX}{first[index]}.{key}": value
        for index, group in enumerate(param_groups)
        if index in first
        for key, value in _plain_values(group).items()
    }


def restore_groups(optimizer: torch.optim.Optimizer, shards: Sequence[Shard], saved: dict[str, Any], by: str) -> str:
    """Load saved values into the param groups of an optimizer.

    A group receives the values of the saved groups that contain its parameters, or of all if none does. An optimizer of
    another class receives the numbers that both have, and `weight_decay` only if both decouple it, or neither does.

    Args:
        saved: values by their name in the checkpoint.
        by: name of the optimizer class that saved.

    Returns:
        A line about the values that were restored and those that were not.
    """
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in saved.items():
        parameter, _, key = name.removeprefix(PREFIX).rpartition(".")
        by_parameter.setdefault(parameter, {})[key] = value
    kept, this_class = dict[str, str](), type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        names = [shard.name for shard in shards if shard.group == index]
        sources = [_plain_values(by_parameter[name]) for name in names if name in by_parameter]
        sources = sources or [_plain_values(source) for source in by_parameter.values()]
        present = _plain_values(group)
        decays = {has_decoupled_decay(by, source) for source in sources} | {has_decoupled_decay(this_class, present)}
        same_decay = len(decays) == 1 and None not in decays
        for key in sorted(present.keys() | {key for source in sources for key in source}):
            found = [source[key] for source in sources if key in source]
            if reason := _reason_to_keep(key, found, present, by == this_class, same_decay):
                kept[key] = reason
            elif found and found[0] != present.get(key, ...):
                _assign(group, key, found[0])
    rates = ", ".join(dict.fromkeys(f"{float(group['lr']):.4g}" for group in optimizer.param_groups if "lr" in group))
    if not saved:
        return f"param groups are this run's (lr {rates}), as the checkpoint has none"
    reasons = ", ".join(f"{key} ({reason})" for key, reason in sorted(kept.items()))
    return f"param groups as they were saved (lr {rates})" + (f", except {reasons}" if reasons else "")


def _reason_to_keep(key: str, found: Sequence[Any], present: dict[str, Any], same_class: bool, same_decay: bool) -> str:
    """Return why a group keeps its own value of `key`, or has none; "" if it receives the saved one."""
    if not found:
        return "not in the checkpoint"
    if any(value != found[0] for value in found):
        return "saved param groups differ in it"
    if key in present and present[key] == found[0]:
        return ""
    if key in _OF_THIS_RUN:
        return f"{found[0]} in the checkpoint"
    if key == "weight_decay" and not same_class and not same_decay:
        return f"{found[0]} in the checkpoint, of an optimizer that may apply it in another way"
    # `initial_lr` belongs to schedulers, and those that are built after the load read it.
    if same_class or key == "initial_lr" or (key in present and _is_number(present[key]) and _is_number(found[0])):
        return ""
    return "of another optimizer"


def _plain_values(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group that are numbers, text, None or tuples of these; tensors of one entry as numbers."""
    values = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in values.items() if value is not ...}


def _plain(value: Any) -> Any:
    """Return a plain value, tensors as numbers and lists as tuples; `...` if it is none."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else ...
    if isinstance(value, tuple | list):
        parts = tuple(_plain(part) for part in value)
        return ... if ... in parts else parts
    return value if isinstance(value, bool | int | float | str | None) else ...


def _is_number(value: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in tree_leaves(value))


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value; one that is a tensor, as the `lr` of a captured graph, is changed in place."""
    tensors = [one for one in tree_leaves(group.get(key)) if isinstance(one, Tensor)]
    if not tensors:
        group[key] = value
    for tensor, number in zip(tensors, tree_leaves(value), strict=False):
        tensor.fill_(number)

"""The entries of a checkpoint: model, optimizer, method, random state and param groups, and their description.

Tensors have the parameters' names and global shapes, so that every shard degree can read them. State that differs
between replicas has a leading dimension with one row per replica: as a plain tensor, DCP would take the replicas'
values for copies of one tensor and keep a single one. The record of a checkpoint describes its kinds of state, see
`methods.interface.State`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves

from torchtitan_scape.checkpoint.global_layout import FlatSlices, GlobalLayout, own_storage, slices_of
from torchtitan_scape.core.parameters import Shard, local, plain_name
from torchtitan_scape.core.plausibility import LARGEST, check_plausible, is_plausible
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.initial_state import create_state
from torchtitan_scape.optimizers.registry import FIRST
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import mean_of_rows, rows_of

RESIDUALS = ("exact", "mean", "drop")  # values of `[checkpoint] residual`
RANDOM = "random"  # name of the random state in a checkpoint
WEIGHTS = "weights"  # first part of the names of weights that are stored besides their masters
PREFIX = "param_groups."
# Keys of param groups that select an implementation, or determine which state the optimizer has: a run keeps its own.
_OF_THIS_RUN = {"fused", "foreach", "capturable", "differentiable", "amsgrad"}


# ---------------------------------------------------------------------------------------- what DCP saves and loads


class ModelCheckpoint(Stateful):
    """The model for a checkpoint or an export: the weights that all replicas share, under all names of the model.

    Args:
        own: state of the model itself, with `state_dict` and `load_state_dict`. Loading goes into it.
    """

    def __init__(self, own: Any, optimizer: ReplicaOptimizer, layout: GlobalLayout) -> None:
        self.own, self._optimizer, self._layout = own, optimizer, layout

    def state_dict(self) -> dict[str, Any]:
        shared = self._optimizer.saved_model()
        parameters = {shard.name: shard.parameter for shard in self._optimizer.shards()}
        state: dict[str, Any] = dict(self.own.state_dict())
        others = {other: name for other, name in self._other_names.items() if other in state}
        state |= {name: self._layout.whole(parameters[name], own_storage(shared[name])) for name in shared}
        return state | {other: state[name] for other, name in others.items()}

    def load_targets(self) -> dict[str, Any]:
        """Return the tensors to read a checkpoint's model into: the model's own, or its FP32 masters.

        A tied parameter is read once, by its first name.
        """
        targets = {name: values for name, values in self.own.state_dict().items() if name not in self._other_names}
        slices = slices_of(self._optimizer.shards()).items()
        return targets | {name: self._layout.whole(parameter, parameter.detach()) for name, parameter in slices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.own.state_dict()
        state_dict = state_dict | {other: state_dict[name] for other, name in self._other_names.items() if other in own}
        self.own.load_state_dict({k: v for k, v in state_dict.items() if not isinstance(v, FlatSlices)})
        self._optimizer.model_loaded()

    @cached_property
    def _other_names(self) -> dict[str, str]:
        """Each further name of a tied parameter, with its first name, that of the shard."""
        model = self._optimizer.model
        names = list(model.named_parameters(remove_duplicate=False)) if model is not None else []
        first = {id(parameter): plain_name(name) for name, parameter in reversed(names)}
        pairs = {plain_name(name): first[id(parameter)] for name, parameter in names}
        return {other: name for other, name in pairs.items() if other != name}


class OptimizerCheckpoint(Stateful):
    """State of the optimizer and the method for `dcp.save`. `migration.load_optimizer` loads it.

    Args:
        residual: "exact", "mean" or "drop", as in `[checkpoint] residual`.
    """

    def __init__(self, optimizer: ReplicaOptimizer, layout: GlobalLayout, residual: str) -> None:
        self._optimizer, self._layout, self._residual = optimizer, layout, residual

    def state_dict(self) -> dict[str, Any]:
        optimizer, layout = self._optimizer, self._layout
        optimizer.finish_previous_step()
        parameters = {shard.name: shard.parameter for shard in optimizer.shards()}
        dense, saved = dense_state(optimizer), states(optimizer, self._residual)
        check_states(optimizer, saved, dense)
        entries = layout.of_optimizer(dense, slices_of(optimizer.shards()))
        entries |= group_values(optimizer.param_groups, optimizer.shards())
        for name, (parameter, bits) in saved_weights(optimizer).items():
            entries[f"{WEIGHTS}.{name}"] = layout.whole(parameter, own_storage(bits))
        for state in saved:
            for name, values in state.tensors.items():
                if state.packed:
                    values = state.entries(name, local(parameters[name]).shape)
                values, key = own_storage(values), f"{state.kind}.{name}"
                if not state.by_parameter:
                    entries[f"{key}.{optimizer.collectives.model_rank}"] = values
                elif state.per_replica:
                    entries[key] = layout.rows(parameters[name], values, layout.replicas * layout.simulated)
                elif state.starts is not None:
                    entries[key] = layout.part(parameters[name], values, state.starts[name])
                else:
                    entries[key] = layout.whole(parameters[name], values)
        return entries

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a load by DCP alone, which knows neither the layout nor the method of the run that saved."""
        raise ValueError("dcp.load cannot load the optimizer's state; call torchtitan_scape.load_checkpoint")


class RandomState(Stateful):
    """The states of every rank's random number generators. `restore` applies the loaded states."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._name = device, f"rank{dist.get_rank()}"
        self._loaded: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        states = {f"{self._name}.cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            states[f"{self._name}.device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._loaded = dict(state_dict)

    def restore(self) -> None:
        """Apply the loaded states, before the first forward pass: data loaders draw a number when they begin."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            torch.set_rng_state(loaded[f"{self._name}.cpu"])
        if loaded and self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(loaded[f"{self._name}.device"], self._device)


# ------------------------------------------------------------------------------------- the state of the optimizer


def has_dense_state(optimizer: ReplicaOptimizer) -> bool:
    """Return whether the wrapped optimizer's state is stored by parameter, as by PyTorch; else `states` contains it."""
    options = optimizer.options
    return not (optimizer.weights or options.holds_optimizer_state or options.divides_update)


def stores(optimizer: ReplicaOptimizer) -> list[Any]:
    """Return what has moments of its own: the replicas of this process, or their parts; empty if the optimizer has."""
    return optimizer.weights or [method.owned for method in optimizer.methods if method.owned is not None]


def dense_state(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return the wrapped optimizer's state by name ("state.PARAMETER.exp_avg"); empty if `states` contains it.

    This makes an optimizer create its state if it has not taken a step yet.

    Raises:
        ValueError: the optimizer has no state yet, and it does not start from zeros.
    """
    if not has_dense_state(optimizer):
        return {}
    if not optimizer.inner.state:
        create_state(optimizer.inner)
    of_parameter = {shard.name: optimizer.inner.state.get(shard.parameter, {}) for shard in optimizer.shards()}
    return {f"state.{name}.{key}": value for name, state in of_parameter.items() for key, value in state.items()}


def load_dense_state(optimizer: ReplicaOptimizer, state: dict[str, Any]) -> None:
    """Load the values of `dense_state` that are not tensors. Tensors are read in place."""
    for shard in optimizer.shards():
        for key in optimizer.inner.state.get(shard.parameter, {}):
            optimizer.inner.state[shard.parameter][key] = state[f"state.{shard.name}.{key}"]


def states(optimizer: ReplicaOptimizer, residual: str) -> list[State]:
    """Return the method's state, after `finish_previous_step`. Collective.

    Tensors of per-replica states have a leading dimension: one row per replica of this process.

    Args:
        residual: "exact"; "mean" for the replicas' mean of everything that differs between them; or "drop" for that
            mean without pending updates.
    """
    each = optimizer.replicas.run(lambda i: optimizer.methods[i].checkpoint_states(residual))
    of_stores = [store.states() for store in stores(optimizer)] or [[] for _ in each]
    saved = rows_of([_kept([*one, *two], residual) for one, two in zip(each, of_stores, strict=True)])
    for i, state in enumerate(saved):
        if state.per_replica and residual != "exact":
            means = {name: mean_of_rows(rows, optimizer.collectives) for name, rows in state.tensors.items()}
            saved[i] = State(state.kind, means, per_replica=False, on_migration=state.on_migration)
    return [*saved, *usual_norms(optimizer), *optimizer.sharding.unsent.states(residual, optimizer.shards())]


def _kept(declared: Sequence[State], residual: str) -> list[State]:
    """Return the states that are saved besides the model."""
    dropped = residual == "drop"
    return [state for state in declared if not (state.is_in_model(residual) or (dropped and state.is_pending))]


def check_states(optimizer: ReplicaOptimizer, saved: Sequence[State], moments: dict[str, Any]) -> None:
    """Check the states that a checkpoint is about to store. Collective; waits for the device.

    Pending gradients and first moments are compared with the usual norm of the gradients, if the method limits these.
    A flipped exponent bit in a residual has no visible effect before the next exchange, and would be saved.

    Args:
        moments: other tensors, by description.

    Raises:
        DamagedParametersError: on every rank, with ranks and states.
    """
    usual = [norm[0] for norm in optimizer.guard.usual_norms]
    usual_norm = torch.stack(usual).max() if usual else torch.zeros((), dtype=torch.float64, device="cpu")
    of_gradients = torch.where(usual_norm > 0.0, LARGEST * usual_norm, torch.inf)
    # A basis that divides by root mean squares enlarges values, by a thousand at most.
    largest = {"gradient": of_gradients, "pending": 1024.0 * of_gradients, "displacement": LARGEST, "model": LARGEST}
    named = [
        (f"{state.kind} of {name!r}", values, largest.get(state.on_migration, torch.inf))
        for state in saved
        for name, values in state.tensors.items()
    ]
    for name, tensor in moments.items():
        if isinstance(tensor, Tensor):
            named.append((name, local(tensor), of_gradients if name.endswith(f".{FIRST}") else torch.inf))
    checked = [(name, is_plausible(t, largest=most)) for name, t, most in named if t.is_floating_point()]
    nothing = ("", torch.ones((), dtype=torch.bool, device=optimizer.grad_norm.device))
    what = "states of the optimizer or the method"
    check_plausible([nothing, *checked], optimizer.collectives, optimizer.attempted_steps, what)


def usual_norms(optimizer: ReplicaOptimizer) -> list[State]:
    """Return the usual norms of the gradients of this process's replicas, if the method limits them."""
    of_replica = zip(optimizer.replicas.endpoints, optimizer.guard.usual_norms, strict=False)
    tensors = {f"replica_{endpoint.replica}": usual for endpoint, usual in of_replica}
    if not tensors:
        return []
    return [State("usual_norm", tensors, per_replica=False, on_migration="copy", by_parameter=False)]


def describe_states(optimizer: ReplicaOptimizer, residual: str) -> dict[str, dict[str, Any]]:
    """Return the description of each kind in `states`, for the checkpoint's record. No communication."""
    own = stores(optimizer)[0].states() if stores(optimizer) else []
    declared = _kept([*optimizer.methods[0].declared_states(), *own, *usual_norms(optimizer)], residual)
    exact = residual == "exact"
    described = {state.kind: state.describe() | {"per_replica": state.per_replica and exact} for state in declared}
    return described | optimizer.sharding.unsent.described(residual)


def record(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return the counters and the state that is not a tensor, as plain values for the checkpoint's record."""
    optimizer.finish_previous_step()
    guard = optimizer.guard
    counters = {"skipped": guard.skipped, "skipped_in_a_row": guard.skipped_in_a_row}
    values = {"counters": counters, "attempted_steps": optimizer.attempted_steps, **optimizer.methods[0].record()}
    if (each := stores(optimizer)) and (steps := each[0].steps()):
        values["applied_steps"] = float(steps[0])
    return values


def saved_weights(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return, by name, (a parameter of the model, its bits), for weights that no other state determines exactly."""
    return optimizer.levels.bits() if optimizer.levels else {}


# ------------------------------------------------------------------------------------------------- param groups
#
# Values of param groups have the names that PyTorch gives them, "param_groups.NAME.KEY", where NAME is a parameter of
# the group. Schedulers compute a rate from the present one, so a resumed run needs these besides the scheduler's.


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

    A group receives the values of the saved groups whose first parameter it contains, or of all if there is none. An
    optimizer of another class receives the numbers that both have, except `weight_decay`, which it may apply in another
    way.

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
        for key in sorted(present.keys() | {key for source in sources for key in source}):
            values = [source[key] for source in sources if key in source]
            if reason := _reason_to_keep(key, values, present, by == this_class):
                kept[key] = reason
            elif values and values[0] != present.get(key, ...):
                _assign(group, key, values[0])
    rates = ", ".join(dict.fromkeys(f"{float(group['lr']):.4g}" for group in optimizer.param_groups if "lr" in group))
    if not saved:
        return f"param groups are this run's (lr {rates}), as the checkpoint has none"
    reasons = ", ".join(f"{key} ({reason})" for key, reason in sorted(kept.items()))
    return f"param groups as they were saved (lr {rates})" + (f", except {reasons}" if reasons else "")


def _reason_to_keep(key: str, values: Sequence[Any], present: dict[str, Any], same_class: bool) -> str:
    """Return why a group keeps its own value of `key`, or has none; "" if it receives the saved one."""
    if not values:
        return "not in the checkpoint"
    if any(value != values[0] for value in values):
        return "saved param groups differ in it"
    if key in present and present[key] == values[0]:
        return ""
    if key in _OF_THIS_RUN:
        return f"{values[0]} in the checkpoint"
    if key == "weight_decay" and not same_class:
        return f"{values[0]} in the checkpoint, of another optimizer"
    # `initial_lr` belongs to schedulers, and those that are built after the load read it.
    if same_class or key == "initial_lr" or (key in present and _is_number(present[key]) and _is_number(values[0])):
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

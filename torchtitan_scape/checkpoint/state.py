"""The state of a replica optimizer in a checkpoint: its tensors, their description, sizes and counters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.initial_state import create_state
from torchtitan_scape.optimizers.registry import OPTIMIZERS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.simulation import mean_of_rows, rows_of
from torchtitan_scape.topology.groups import gather_lists

# Values of `[checkpoint] residual`.
RESIDUALS = ("exact", "mean", "drop")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def has_dense_state(optimizer: ReplicaOptimizer) -> bool:
    """Return whether the wrapped optimizer's state is stored by parameter, as by PyTorch; else `states` contains it."""
    method = optimizer.methods[0]
    return not (optimizer.weights or method.holds_optimizer_state or method.divides_optimizer_state)


def stores(optimizer: ReplicaOptimizer) -> list[Any]:
    """Return what has moments of its own: the replicas of this process, or their parts; empty if the optimizer has."""
    return optimizer.weights or [method.owned for method in optimizer.methods if method.divides_optimizer_state]


def dense_state(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return the wrapped optimizer's state by parameter name ("state.NAME.exp_avg"); empty if `states` contains it.

    This makes an optimizer create its state if it has not taken a step yet.

    Raises:
        ValueError: the optimizer has no state yet, and it does not start from zeros.
    """
    if not has_dense_state(optimizer):
        return {}
    assert optimizer.model is not None
    if not optimizer.inner.state:
        create_state(optimizer.inner)  # PyTorch would create it, too, but as that after one step
    for module in optimizer.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # Names of gathered weights, as after a validation, are not found.
    with _without_empty_groups(optimizer.inner):
        return get_optimizer_state_dict(optimizer.model, optimizer.inner, options=_FLAT)


def load_dense_state(optimizer: ReplicaOptimizer, state: dict[str, Any]) -> None:
    """Load the result of `dense_state`."""
    assert optimizer.model is not None
    with _without_empty_groups(optimizer.inner):
        set_optimizer_state_dict(optimizer.model, optimizer.inner, optim_state_dict=state, options=_FLAT)


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Remove param groups without parameters for a while: PyTorch takes the name of each group's first parameter."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:  # a load has replaced the others
        others = iter(optimizer.param_groups)
        optimizer.param_groups = [next(others) if group["params"] else group for group in groups]


def states(optimizer: ReplicaOptimizer, residual: str) -> list[State]:
    """Return the method's state, after `finish_previous_step`. Collective.

    Tensors of per-replica states have a leading dimension: one row per replica of this process.

    Args:
        residual: "exact"; "mean" for the replicas' mean of everything that differs between them; or "drop" for that
            mean without pending updates.
    """
    found = rows_of(optimizer.replicas.run(lambda i: _of_replica(optimizer, i, residual)))
    if residual != "exact":
        found = [state for state in found if not (residual == "drop" and state.is_pending)]
        found = [_mean(optimizer, state) if state.per_replica else state for state in found]
    return [*found, *usual_norms(optimizer), *optimizer.sharding.unsent.states(residual, optimizer.shards())]


def usual_norms(optimizer: ReplicaOptimizer) -> list[State]:
    """Return the usual norms of the gradients of this process's replicas, if the method limits them."""
    of_replica = zip(optimizer.replicas.endpoints, optimizer.guard.limits, strict=False)
    tensors = {f"replica_{endpoint.replica}": limit.usual for endpoint, limit in of_replica}
    if not tensors:
        return []
    return [State("usual_norm", tensors, per_replica=False, on_migration="copy", by_parameter=False, if_absent=0.0)]


def _of_replica(optimizer: ReplicaOptimizer, replica: int, residual: str) -> list[State]:
    """Return the states of one replica, without weights that are saved as the model."""
    found = [s for s in optimizer.methods[replica].checkpoint_states(residual) if not s.is_in_model(residual)]
    return [*found, *stores(optimizer)[replica].states()] if stores(optimizer) else found


def _mean(optimizer: ReplicaOptimizer, state: State) -> State:
    means = {name: mean_of_rows(rows, optimizer.collectives) for name, rows in state.tensors.items()}
    return State(state.kind, means, per_replica=False, on_migration=state.on_migration)


def describe_states(optimizer: ReplicaOptimizer, residual: str) -> dict[str, dict[str, Any]]:
    """Return the description of each kind in `states`, for the checkpoint's record. No communication."""
    declared = [s for s in optimizer.methods[0].declared_states() if not s.is_in_model(residual)]
    if each := stores(optimizer):
        declared += each[0].states()
    declared += usual_norms(optimizer)
    found = {}
    for state in declared:
        if residual == "drop" and state.is_pending:
            continue
        found[state.kind] = state.describe() | {"per_replica": state.per_replica and residual == "exact"}
    return found | optimizer.sharding.unsent.described(residual)


def sizes(optimizer: ReplicaOptimizer, residual: str) -> dict[str, int]:
    """Return the bytes of the optimizer's and the method's state in a checkpoint, of all ranks, by kind. Collective.

    Results of exchanges that are in flight, which some methods save as well, are not included.
    """
    stages, _ = optimizer.collectives.gather_from_stages(_sizes_of_stage(optimizer, residual))
    own = _sizes_of_shard(optimizer, residual)
    shards = [own] if optimizer.collectives.is_fake else gather_lists(optimizer.collectives.groups.model, [own])
    parts = [*stages, *shards]
    return {kind: sum(part.get(kind, 0) for part in parts) for each in parts for kind in each}


def _sizes_of_shard(optimizer: ReplicaOptimizer, residual: str) -> dict[str, int]:
    """Return the bytes of the state that belongs to this shard alone, by kind."""
    of_shard = [state for state in optimizer.methods[0].declared_states() if not state.by_parameter]
    kept = [state for state in of_shard if not (residual == "drop" and state.is_pending)]
    found = {state.kind: sum(values.nbytes for values in state.tensors.values()) for state in kept}
    for state in usual_norms(optimizer):
        found[state.kind] = optimizer.collectives.replicas * next(iter(state.tensors.values())).nbytes
    return found


def _sizes_of_stage(optimizer: ReplicaOptimizer, residual: str) -> dict[str, int]:
    found = dict(optimizer.methods[0].checkpoint_sizes(residual))
    entries = {shard.name: shard.entries for shard in optimizer.shards()}
    if optimizer.weights:
        rows = optimizer.collectives.replicas if residual == "exact" else 1
        for state in optimizer.weights[0].states():
            if not (residual == "drop" and state.is_pending):
                found[state.kind] = rows * sum(entries[n] * t.element_size() for n, t in state.tensors.items())
    elif not optimizer.methods[0].holds_optimizer_state:
        moments = OPTIMIZERS[type(optimizer.inner).__name__].moments
        for shard in optimizer.shards():
            for moment in moments(optimizer.inner, shard):
                kind = "moments" if has_dense_state(optimizer) else moment
                found[kind] = found.get(kind, 0) + 4 * entries[shard.name]
    return {kind: size for kind, size in found.items() if size} | optimizer.sharding.unsent.sizes(residual)


def record(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return the counters and the state that is not a tensor, as plain values for the checkpoint's record."""
    optimizer.finish_previous_step()
    guard = optimizer.guard
    counters = {"skipped": guard.skipped, "skipped_in_a_row": guard.skipped_in_a_row}
    found = {"counters": counters, "attempted_steps": optimizer.attempted_steps, **optimizer.methods[0].record()}
    if (each := stores(optimizer)) and (steps := each[0].steps()):
        found["applied_steps"] = float(steps[0])
    return found


def load_counters(optimizer: ReplicaOptimizer, saved: dict[str, int]) -> None:
    """Load the "counters" of `record`."""
    optimizer.guard.skipped, optimizer.guard.skipped_in_a_row = saved["skipped"], saved["skipped_in_a_row"]


def needs_second_moment(optimizer: ReplicaOptimizer, saved_by: str) -> bool:
    """Return whether loading reads the second moments of the optimizer class `saved_by` parameter by parameter."""
    if optimizer.methods[0].holds_optimizer_state:
        return False
    return bool(stores(optimizer)) or saved_by != type(optimizer.inner).__name__


def shard_key(optimizer: ReplicaOptimizer, key: str) -> str:
    """Return the name of a tensor that differs from shard to shard."""
    return f"{key}.{optimizer.collectives.model_rank}"


def saved_weights(optimizer: ReplicaOptimizer) -> dict[str, Any]:
    """Return, by name, (a parameter of the model, its bits), for weights that no other state determines exactly."""
    return optimizer.levels.bits() if optimizer.levels else {}

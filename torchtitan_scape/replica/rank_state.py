"""The state of one rank as a plain dictionary, for training loops that save with `torch.save`.

Ranks differ: every rank has to save its own, unless `_is_equal_on_all_ranks`.
`checkpoint.own_loop.checkpoint_states` returns states for `torch.distributed.checkpoint` instead, which another layout
or method can load.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torchtitan_scape.core.parameters import stored
from torchtitan_scape.core.renamed_keys import with_present_keys
from torchtitan_scape.replica.setup_checks import raise_on_all_ranks
from torchtitan_scape.replica.simulation import ReplicaWeights

_DCP = (
    "Every rank can save into one checkpoint instead, which load_checkpoint() loads with another number of ranks, "
    "method or options too: torch.distributed.checkpoint.save(checkpoint_states(model, optimizer), "
    "checkpoint_id=path), with both functions from torchtitan_scape"
)


def save(optimizer: Any) -> dict[str, Any]:
    """Return everything that an exact resume needs besides the model's parameters. Collective.

    Weights of each replica are part of it, because `replicate` would overwrite those that were loaded before it.

    Args:
        optimizer: a `ReplicaOptimizer`.

    Returns:
        "state" and "param_groups" of the wrapped optimizer, and "replica": the method's state. The tensors are those in
        use, not copies.

    Raises:
        ValueError: called by `torch.distributed.checkpoint`, which would lose the state of other replicas; or, on the
            first rank, not called on all ranks although each needs its own state.
    """
    optimizer.finish_previous_step()
    caller = sys._getframe(2).f_globals["__name__"]  # that of `optimizer.state_dict()`
    if optimizer.collectives.replicas > 1 and caller.startswith("torch.distributed.checkpoint"):
        raise ValueError(
            "torch.distributed.checkpoint stores one of the replicas' entries of the same name, so the others' state "
            "would be lost; save checkpoint_states(model, optimizer) and load with load_checkpoint(), both from "
            "torchtitan_scape"
        )
    if not _is_equal_on_all_ranks(optimizer):
        optimizer.joint_calls.expect("state_dict", f"ranks differ, so every rank has to save its own state. {_DCP}")
    return optimizer.inner.state_dict() | {"replica": _replica_state(optimizer)}


def _is_equal_on_all_ranks(optimizer: Any) -> bool:
    """Return whether the state of one rank is that of all, as with `dense` and unsharded parameters."""
    first = optimizer.methods[0]
    return optimizer.collectives.model_ranks == 1 and not (
        optimizer.weights
        or any(state.per_replica for state in first.declared_states())
        or first.divides_optimizer_state
    )


def _replica_state(optimizer: Any) -> dict[str, Any]:
    return {
        "layout": _layout(optimizer),
        "methods": optimizer.replicas.run(lambda i: optimizer.methods[i].state_dict()),
        "weights": [[stored(shard.parameter) for shard in one.shards] for one in optimizer.weights],
        "optimizers": [one.optimizer.state_dict() for one in optimizer.weights[1:]],
        "usual_norms": [limit.usual for limit in optimizer.guard.limits],
        "attempted_steps": optimizer.attempted_steps,
        "skipped": (optimizer.guard.skipped, optimizer.guard.skipped_in_a_row),
        "sent_bytes": dict(optimizer.collectives.ledger.sent),
    }


def _layout(optimizer: Any) -> dict[str, Any]:
    """The settings that a state depends on, and this rank's position."""
    collectives, settings = optimizer.collectives, dict(optimizer.settings)
    if _is_equal_on_all_ranks(optimizer):
        return settings
    return settings | {
        "replicas": collectives.replicas,
        "replica": collectives.replica,
        "shard": collectives.model_rank,
    }


def _mismatch(optimizer: Any, saved: dict[str, Any] | None) -> str:
    """Return why a saved state cannot be loaded on this rank, or an empty string."""
    if saved is None:
        return (
            "the state has no 'replica' entry; save what ReplicaOptimizer.state_dict() returns, each rank its own "
            "(helpers that gather optimizer state by parameter drop the method's state)"
        )
    layout = with_present_keys(saved["layout"], f"sync.{saved['layout']['method']}")
    for key, value in _layout(optimizer).items():
        if key == "shard" and key not in layout:  # earlier versions did not save it
            continue
        if layout.get(key) == value:
            continue
        different = f"the saved state has {key}={layout.get(key)!r}, this run has {value!r}; "
        if key in ("replica", "shard"):
            return f"{different}ranks differ, so every rank has to load the file that it saved. {_DCP}"
        return (
            f"{different}the file of a rank needs the layout and options that saved it. To change them, load the files "
            f"with these, and save once more. {_DCP}"
        )
    if optimizer.methods[0].divides_optimizer_state and "applied_steps" not in saved["methods"][0]:
        return (
            "the saved state is that of an earlier version, where the optimizer had all moments; use checkpoint_states"
        )
    if len(saved["weights"]) != len(optimizer.weights):
        return "the saved state lacks weights of a replica, as those of earlier versions; use checkpoint_states"
    return ""


def _without_shared_memory(saved: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return a saved state with copies of the tensors that are still in use, which a load begins to overwrite."""
    in_use = {values.data_ptr() for values in tree_leaves(_replica_state(optimizer)) if isinstance(values, Tensor)}
    return tree_map_only(Tensor, lambda values: values.clone() if values.data_ptr() in in_use else values, saved)


@torch.no_grad()
def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load the result of `save`. Collective.

    Raises:
        ValueError: on every rank, if the state of one is of another layout, replica or method, or of other options.
    """
    saved = state_dict.get("replica")
    raise_on_all_ranks(optimizer.collectives, _mismatch(optimizer, saved))
    assert saved is not None
    saved = _without_shared_memory(saved, optimizer)
    optimizer.prepare_to_load()
    optimizer.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "replica"})
    if optimizer.weights:
        optimizer.weights[0] = ReplicaWeights.of(optimizer.shards(), optimizer.inner)
        optimizer.replace_weights(saved["weights"][0])
    for i, one in enumerate(optimizer.weights[1:]):
        for shard, value in zip(one.shards, saved["weights"][i + 1], strict=True):
            stored(shard.parameter).copy_(value)
        one.optimizer.load_state_dict(saved["optimizers"][i])
        optimizer.weights[i + 1] = ReplicaWeights.of(one.shards, one.optimizer)
    optimizer.replicas.run(lambda i: optimizer.methods[i].load_state_dict(saved["methods"][i]))
    for limit, usual in zip(optimizer.guard.limits, saved.get("usual_norms", ()), strict=False):
        limit.usual.copy_(usual)
    optimizer.attempted_steps = saved["attempted_steps"]
    optimizer.guard.skipped, optimizer.guard.skipped_in_a_row = saved["skipped"]
    optimizer.collectives.ledger.sent.clear()
    optimizer.collectives.ledger.sent.update(saved["sent_bytes"])
    optimizer.sharding.version.changed()

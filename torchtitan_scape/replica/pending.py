"""Sending of everything that is pending, after the last step."""

from typing import Any

import torch

from torchtitan_scape.methods.interface import StepInfo


@torch.no_grad()
def flush(optimizer: Any) -> None:
    """Send everything that is pending, if no further step will do it. Collective.

    Args:
        optimizer: a `ReplicaOptimizer`. With per-replica weights this is an exchange alone: the replicas' optimizers
            do not step.
    """
    optimizer.joint_calls.expect("flush")
    if optimizer.weights:
        optimizer.request_full_exchange()
        optimizer._full_exchange_next = False
        info = StepInfo(optimizer.attempted_steps, torch.ones_like(optimizer.grad_norm, dtype=torch.bool))
        with optimizer.timer.phase("exchange"):
            optimizer.replicas.run(lambda i: optimizer.methods[i].exchange(info))
        optimizer.sharding.version.changed()
        return
    pending = any(state.is_gradient for state in optimizer.methods[0].declared_states())
    if pending or optimizer.sharding.unsent.described("exact"):
        optimizer.zero_grad()
        optimizer.request_full_exchange()
        optimizer.sharding.unsent.as_gradients(optimizer.shards())
        for _ in optimizer.replicas.endpoints:
            optimizer.stash_replica_gradients()
        optimizer.step()

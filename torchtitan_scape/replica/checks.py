"""Checks of a replica optimizer for damaged memory: plausible parameters and states, and equal replicas."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import check_replicas_equal
from torchtitan_scape.core.parameters import local, stored
from torchtitan_scape.core.plausibility import LARGEST, check_plausible, is_plausible
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.registry import FIRST
from torchtitan_scape.topology.dry_run import DryRunCollectives


def check_parameters(optimizer: Any, step: int) -> None:
    """Check the parameters of every replica; see `ReplicaOptimizer.check_parameters`. Collective."""
    optimizer.wait_for_weights()
    check_plausible(_parameters(optimizer), optimizer.collectives, step)


def _parameters(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name, and whether the values are plausible, of the parameters of every replica of this process."""
    if not optimizer.weights:
        for shard in optimizer.shards():
            yield f"parameter {shard.name!r}", is_plausible(stored(shard.parameter))
    for i, replica in enumerate(optimizer.weights):
        anchors, label = optimizer.methods[i].anchors(), optimizer.replicas.endpoints[i].label
        for shard in replica.shards:
            plausible = is_plausible(stored(shard.parameter), anchors[shard.name])
            yield f"parameter {shard.name + label!r}", plausible


def check_states(optimizer: Any, states: Sequence[State], moments: Mapping[str, Any], step: int) -> None:
    """Check the states that a checkpoint is about to store. Collective; waits for the device.

    Pending gradients and first moments are compared with the usual norm of the gradients, if the method limits these.
    A flipped exponent bit in a residual has no visible effect before the next exchange, and would be saved.

    Args:
        optimizer: a `ReplicaOptimizer`.
        moments: other tensors, by description.

    Raises:
        DamagedParametersError: on every rank, with ranks and states.
    """
    usual = [limit.usual[0] for limit in optimizer.guard.limits]
    usual_norm = torch.stack(usual).max() if usual else torch.zeros((), dtype=torch.float64, device="cpu")
    of_gradients = torch.where(usual_norm > 0.0, LARGEST * usual_norm, torch.inf)
    # A basis that divides by root mean squares enlarges values, by a thousand at most.
    largest = {"gradient": of_gradients, "pending": 1024.0 * of_gradients, "displacement": LARGEST, "model": LARGEST}
    named = [
        (f"{s.kind} of {name!r}", t, largest.get(s.on_migration, torch.inf))
        for s in states
        for name, t in s.tensors.items()
    ]
    for name, tensor in moments.items():
        if isinstance(tensor, Tensor):
            named.append((name, local(tensor), of_gradients if name.endswith(f".{FIRST}") else torch.inf))
    found = [(name, is_plausible(values, largest=most)) for name, values, most in named if values.is_floating_point()]
    nothing = ("", torch.ones((), dtype=torch.bool, device=optimizer.grad_norm.device))
    check_plausible([nothing, *found], optimizer.collectives, step, "states of the optimizer or the method")


def check_replicas(optimizer: Any, step: int) -> None:
    """Compare the replicas; see `ReplicaOptimizer.check_consistency`. Collective."""
    if optimizer.levels is not None:
        optimizer.finish_previous_step()
        optimizer.levels.check_consistency(optimizer.grad_norm.device, step, optimizer.repairs)
    collectives = optimizer.collectives
    if collectives.replicas == 1 or isinstance(collectives, DryRunCollectives):
        return
    with optimizer.timer.phase("compare"):
        optimizer.finish_previous_step()
        tensors = optimizer.replicated_tensors()
        if not check_replicas_equal(collectives, tensors, optimizer.grad_norm.device, step, optimizer.repairs):
            optimizer.sharding.version.changed()

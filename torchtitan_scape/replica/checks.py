"""Checks of a replica optimizer for damaged memory: plausible parameters, and equal replicas."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchtitan_scape.core.consistency import check_replicas_equal
from torchtitan_scape.core.parameters import stored
from torchtitan_scape.core.plausibility import check_plausible
from torchtitan_scape.topology.dry_run import DryRunCollectives


def check_parameters(optimizer: Any, step: int) -> None:
    """Check the parameters of every replica; see `ReplicaOptimizer.check_parameters`. Collective."""
    check_plausible(_parameters(optimizer), optimizer.collectives, step)


def _parameters(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, values and shared weights of the parameters of every replica of this process."""
    if not optimizer.weights:
        yield from ((shard.name, stored(shard.parameter), None) for shard in optimizer.shards())
    for i, replica in enumerate(optimizer.weights):
        anchors, label = optimizer.methods[i].anchors(), optimizer.replicas.endpoints[i].label
        yield from ((s.name + label, stored(s.parameter), anchors[s.name]) for s in replica.shards)


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

"""States of the replicas of one process, for a checkpoint: a row each, or their mean."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.methods.interface import Method, State


def rows_of(each: Sequence[list[State]]) -> list[State]:
    """The states of the replicas of a process as one: own tensors get a row in front for each."""
    found = []
    for states in zip(*each, strict=True):
        first = states[0]
        tensors = first.tensors
        if first.per_replica:
            rows = {name: [state.tensors[name] for state in states] for name in tensors}
            tensors = {name: torch.stack(r) if len(r) > 1 else r[0].unsqueeze(0) for name, r in rows.items()}
        found.append(replace(first, tensors=tensors))
    return found


def residuals_of(methods: Sequence[Method], name: str) -> list[Tensor]:
    """What each method has not delivered of a parameter, FP32 (n,); of one that delivers all nothing."""
    found = []
    for method in methods:
        kept = [s.tensors[name] for s in method.states() if s.on_migration == "gradient" and name in s.tensors]
        if kept:
            found.append(torch.stack([values.view(-1) for values in kept]).sum(0))
    return found


def mean_of_rows(rows: Tensor, collectives: ReplicaCollectives) -> Tensor:
    """The mean over all replicas, of which this process has the rows (first dimension). A collective call."""
    mean = rows.mean(0)
    collectives.sum_over_replicas(mean)
    return mean.div_(collectives.replicas)

"""The saved state of one parameter, in a form that does not depend on the method that saved it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.interface import PENDING_GRADIENTS, REPLICA_WEIGHTS, State
from torchtitan_scape.optimizers.registry import FIRST, SECOND


class CheckpointReader(Protocol):
    """The part of `checkpoint.migration.StateReader` that methods use. Calls are collective."""

    saved: dict[str, Any]
    same_count: bool

    def mean(self, own: Tensor) -> Tensor: ...
    def fill_of_this_shard(self, states: Sequence[State]) -> bool: ...
    def model(self, shard: Shard) -> Tensor: ...
    def applied_steps(self) -> float: ...


class SavedValues:
    """One quantity of a parameter: `own` of each replica plus `shared`, which all replicas have in common.

    Args:
        reader: Has the numbers of replicas, before and now.
        own: FP32 (rows, n) of the replicas whose rows this rank reads; None if all replicas were equal.
        shared: FP32 (n,); None for zeros.
    """

    def __init__(self, reader: CheckpointReader, own: Tensor | None, shared: Tensor | None = None) -> None:
        self.reader, self.own, self.shared = reader, own, shared

    @cached_property
    def mean(self) -> Tensor:
        """The mean over the replicas that saved, FP32 (n,). Collective at the first use."""
        if self.own is None:
            assert self.shared is not None
            return self.shared
        mean = self.reader.mean(self.own)
        return mean if self.shared is None else mean + self.shared

    def of_replica(self, row: int) -> Tensor:
        """The values of this process's replica `row`, FP32 (n,): its own if the replica counts are equal, else `mean`.

        Collective if the replica counts differ.
        """
        if self.own is None or not self.reader.same_count:
            return self.mean
        return self.own[row] if self.shared is None else self.own[row] + self.shared

    def __add__(self, other: "SavedValues") -> "SavedValues":
        return SavedValues(self.reader, _sum(self.own, other.own), _sum(self.shared, other.shared))


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


@dataclass
class ImportedState:
    """The saved state of one parameter on this rank's shard, on the device. None: nothing of the kind was saved.

    Attributes:
        kinds: All tensors as they were saved, flat, see `CheckpointReader`.
        exp_avg: The first moment.
        exp_avg_sq: The second moment, if the reader was asked for it.
        pending: Gradients in mean units that no step has applied yet, on any replica.
        weights: Of replicas that differed; None if the weights are those of the saved model.
        displacements: By kind, pending changes of the weights, to be subtracted from them, besides those in `weights`:
            of replicas that differ, or of all.
        copies: By kind, further state that a run with the same kind continues with.
    """

    kinds: dict[str, Tensor]
    exp_avg: SavedValues | None = None
    exp_avg_sq: SavedValues | None = None
    pending: SavedValues | None = None
    weights: SavedValues | None = None
    displacements: dict[str, SavedValues] = field(default_factory=dict)
    copies: dict[str, SavedValues] = field(default_factory=dict)

    def mean_weights(self) -> Tensor | None:
        """FP32 (n,): the mean weights, with all pending displacements applied. Collective."""
        if self.weights is None:
            return None
        start = self.weights.mean
        for values in self.displacements.values():
            start = start - values.mean
        return start


def import_state(
    kinds: dict[str, Tensor],
    reader: CheckpointReader,
    device: torch.device,
    decode: Callable[[Tensor], Tensor] | None = None,
) -> ImportedState:
    """Interpret the saved state of a method by its declarations. Collective.

    Args:
        kinds: Flat tensors by kind, (n,), or (rows, n) if saved per replica.
        decode: Returns pending gradients (n,) without the coordinates in which they were saved; None to leave out
            those with coordinates.
    """
    imported, states = ImportedState(kinds), reader.saved["states"]
    for kind, tensor in kinds.items():
        described = states.get(kind, {"per_replica": False, "on_migration": "copy"})
        per_replica, rule = described["per_replica"], described["on_migration"]
        values = tensor.to(device, torch.float32 if rule in PENDING_GRADIENTS else None)
        if rule == "pending" and decode is not None:
            rule = "gradient"
            if not per_replica:
                values = decode(values)
            elif len(values):  # a rank of more replicas than before may have read no row
                values = torch.stack([decode(row) for row in values])
        saved = SavedValues(reader, values) if per_replica else SavedValues(reader, None, values)
        if kind == FIRST:
            imported.exp_avg = saved
        elif kind == SECOND:
            imported.exp_avg_sq = saved
        elif kind == REPLICA_WEIGHTS:
            imported.weights = saved
        elif rule == "gradient":
            imported.pending = saved if imported.pending is None else imported.pending + saved
        elif rule == "displacement":
            imported.displacements[kind] = saved
        elif per_replica or rule == "copy":
            imported.copies[kind] = saved
    return imported


def for_moment(pending: Tensor, beta1: float) -> Tensor:
    """Return the addend of a first moment that makes it contain pending gradients in mean units. Zeros if beta1 is 0.

    The next step multiplies the moment by beta1, and a gradient by 1 - beta1.
    """
    return pending * ((1.0 - beta1) / beta1) if beta1 > 0.0 else torch.zeros_like(pending)

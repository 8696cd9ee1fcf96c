"""What replicas have not delivered yet, on its way from a checkpoint into a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.interface import REPLICA_WEIGHTS, State

NO_MOMENT = "with beta1 = 0, or an optimizer without it, no first moment"


class CheckpointReader(Protocol):
    """A checkpoint's optimizer state, parameter by parameter: `checkpoint.state.StateReader`. All calls are collective.

    saved: the record of the run that saved. replicas: of that run; same_count: whether this run has as many.
    simulated: replicas that this process plays, 1 for a real one.
    """

    saved: dict[str, Any]
    replicas: int
    same_count: bool
    simulated: int

    def __iter__(self) -> Iterator[tuple[int, Shard, dict[str, Tensor]]]: ...
    def mean(self, own: Tensor) -> Tensor: ...
    def mean_of_this_run(self, own: Tensor) -> Tensor: ...
    def from_a_rank_that_has_rows(self, values: Tensor) -> None: ...
    def fill(self, keys: dict[str, Any]) -> None: ...
    def fill_of_this_shard(self, states: Sequence[State]) -> bool: ...
    def model(self, shard: Shard) -> Tensor: ...
    def applied_steps(self) -> float: ...
    @property
    def has_dense_state(self) -> bool: ...


@dataclass
class ImportedState:
    """What was saved of a parameter, told apart, on the device; FP32.

    moment: (n,), the first moment, None where none was kept; second: (n,), the second one where it was read.
    common: (n,) in mean units, pending and the same on all replicas; None for zeros.
    own: (rows, n) likewise, of the replicas whose rows this rank reads.
    parameter: (n,), where it is to start, if that is not the model: the mean of replicas that differed, with what they
        had not sent.
    """

    moment: Tensor | None
    own: Tensor | None = None
    common: Tensor | None = None
    second: Tensor | None = None
    parameter: Tensor | None = None

    def moment_with(self, pending: Tensor | None, beta1: float) -> Tensor | None:
        """(n,): the first moment, with what is pending in it; None for zeros."""
        if pending is None:
            return self.moment
        added = for_moment(pending, beta1)
        return added if self.moment is None else self.moment + added

    def mean(self, reader: CheckpointReader) -> Tensor | None:
        """(n,): what is pending in the mean over replicas; None for nothing. A collective call."""
        mean = None if self.own is None else reader.mean(self.own)
        if mean is None or self.common is None:
            return self.common if mean is None else mean
        return mean + self.common


def import_state(kinds: dict[str, Tensor], reader: CheckpointReader, device: torch.device) -> ImportedState:
    """What a method saved that goes with a dense optimizer. A collective call."""

    def common(kind: str) -> Tensor | None:
        """(n,), the mean over replicas of what each has of its own."""
        if kind not in kinds:
            return None
        what, values = reader.saved["states"].get(kind), kinds[kind].to(device)
        return reader.mean(values) if what is not None and what["own"] else values

    found = ImportedState(common("exp_avg"), second=common("exp_avg_sq"), parameter=common(REPLICA_WEIGHTS))
    for kind, what in reader.saved["states"].items():
        if what["carries"] != "gradient" or kind not in kinds:
            continue
        values = kinds[kind].to(device)
        if what["own"]:
            found.own = values if found.own is None else found.own + values
        else:
            found.common = values if found.common is None else found.common + values
    if found.parameter is not None:
        for kind, what in reader.saved["states"].items():
            if what["carries"] == "displacement" and kind != REPLICA_WEIGHTS and (left := common(kind)) is not None:
                found.parameter = found.parameter - left  # it moves against a displacement
    return found


class NormAccumulator:
    """Root of the sum of squares over the model, of what all replicas have in common."""

    def __init__(self, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._collectives = collectives
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, shard: Shard, values: Tensor) -> None:
        if shard.counted:
            self._sum += values.double().square().sum()

    def text(self) -> str:
        return f"{float(self._collectives.sum_over_model(self._sum.float()).sqrt()):.3g}"


def beta1_of(optimizer: torch.optim.Optimizer, shard: Shard) -> float:
    """By which a step takes the first moment; 0 where there is none."""
    return float(optimizer.param_groups[shard.group].get("betas", (0.0,))[0])


def for_moment(pending: Tensor, beta1: float) -> Tensor:
    """What has to be added to a first moment for gradients in mean units that are pending. Zeros where b1 is 0.

    The next step takes the moment times b1, and a gradient times 1 - b1.
    """
    return pending * ((1.0 - beta1) / beta1) if beta1 > 0.0 else torch.zeros_like(pending)

"""Orthogonalization of the mean step of a round, for Muon.

Every replica orthogonalizes its own momentum. Where the gradient noise of its small batch dominates, the result is
nearly a linear function of the momentum, so that the mean over replicas has the direction of the mean momentum, but is
too short: the more replicas, the shorter. Orthogonalizing the mean once more restores its length.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.muon import Muon


class RoundSteps:
    """Changes of the anchor in a round, of the matrices that Muon orthogonalizes.

    Args:
        optimizer: The optimizer of the shards.
        shards: All shards.
        anchors: Anchors by name, FP32.

    Attributes:
        steps: FP32, by name: anchor at the last round's end minus anchor.
    """

    def __init__(self, optimizer: Muon, shards: Sequence[Shard], anchors: Mapping[str, Tensor]) -> None:
        self._optimizer, self._anchors = optimizer, anchors
        self._shards = [shard for shard in shards if optimizer.updates(shard)]
        self.steps = {shard.name: torch.zeros_like(anchors[shard.name]) for shard in self._shards}
        device = next(iter(self.steps.values())).device
        # Sums of the round's steps.
        self._learning_rates = torch.zeros(len(optimizer.param_groups), dtype=torch.float32, device=device)

    def states(self) -> list[State]:
        """Return the states. They are dropped if the layout changes: then the present round counts from there."""
        kinds = {"round_step": self.steps, "round_learning_rate": {"all": self._learning_rates}}
        return [State(kind, tensors, False, "rebuild", by_parameter=False) for kind, tensors in kinds.items()]

    def reset(self, applied: Tensor) -> None:
        """Begin a round if `applied`, bool ()."""
        for tensor in (*self.steps.values(), self._learning_rates):
            masked_copy_(tensor, 0.0, applied)

    def count_step(self, applied: Tensor) -> None:
        """Add the learning rates of a step."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        on_host = torch.tensor(rates, dtype=torch.float32, device="cpu")
        on_device = on_host.to(self._learning_rates.device, non_blocking=True)
        self._learning_rates += torch.where(applied, on_device, torch.zeros_like(on_device))

    def finish_round(self, applied: Tensor) -> None:
        """Replace the sum of the round's steps by Muon's step in its direction, in anchors and parameters.

        Collective over the ranks of the replica. Weight decay is a part of the sum; it is kept.

        Args:
            applied: Bool (); if False, nothing changes, and the round continues.
        """
        ranks = self._optimizer.exchange_ranks
        for first in range(0, len(self._shards), ranks):
            shards = self._shards[first : first + ranks]
            steps = [self._without_decay(shard) for shard in shards]
            directions = self._optimizer.orthogonalize(shards, steps)
            for shard, step, direction in zip(shards, steps, directions, strict=True):
                self._correct(shard, step, direction, applied)
        masked_copy_(self._learning_rates, 0.0, applied)

    def _without_decay(self, shard: Shard) -> Tensor:
        """Return the sum of a round's steps without weight decay, which the anchor represents for all replicas."""
        group = self._optimizer.param_groups[shard.group]
        decay = self._learning_rates[shard.group] * group["weight_decay"]
        return self.steps[shard.name].sub(self._anchors[shard.name] * decay)

    def _correct(self, shard: Shard, step: Tensor, direction: Tensor, applied: Tensor) -> None:
        wanted = direction.float()
        for part, scale in self._optimizer.parts(shard, wanted):
            part.mul_(scale * self._learning_rates[shard.group])
        missing = wanted.view_as(step).sub_(step)
        for target in (self._anchors[shard.name], stored(shard.parameter).detach()):
            masked_copy_(target, target - missing.view_as(target), applied)
        masked_copy_(self.steps[shard.name], 0.0, applied)

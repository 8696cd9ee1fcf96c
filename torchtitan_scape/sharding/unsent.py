"""What stand-ins have not sent yet between steps, as checkpoints, the log and a last whole exchange see it.

It is FP32, what FSDP2's shards will have added to a gradient some day: the sum over ranks counts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, store_gradient
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.pending import CheckpointReader

KIND = "shard_residual"


class ResidualStore:
    """Nothing is kept: by FSDP2's own collectives, and by codes."""

    def states(self, residual: str, shards: Sequence[Shard]) -> list[State]:
        """For a checkpoint. A collective call.

        residual: "exact", what each rank has, for the same degrees; "mean", the sum over ranks with the owner of each
        shard, for any degrees; or "drop".
        """
        return []

    def described(self, residual: str) -> dict[str, dict[str, Any]]:
        """For a checkpoint's record, see `methods.interface.State.describe`."""
        return {}

    def sizes(self, residual: str) -> dict[str, int]:
        """Bytes in a checkpoint, by kind."""
        return {}

    def loading(self, reader: CheckpointReader, shards: Sequence[Shard]) -> list[State]:
        """Before a checkpoint is taken: tensors by parameter that receive what is pending there.

        Raises ValueError where ranks' own residuals were saved, and cannot be taken.
        """
        refuse_exact(reader.saved["states"], "has no [sharding] that keeps any")
        return []

    def request_full_exchange(self) -> None:
        """Makes the next step's exchange whole, so that nothing is kept after it."""

    def as_gradients(self, shards: Sequence[Shard]) -> None:
        """Makes it the gradients of a step that has no backward pass. A collective call."""

    def after_optimizer_step(self, applied: Tensor) -> None:
        """After a step, bool () whether it was applied."""

    def squares(self) -> Tensor | None:
        """FP64 (): the sum of squares of what this rank keeps; None where none do."""
        return None


class ShardResiduals(ResidualStore):
    """Of the groups of a model: every rank has some of all rows, (S, n) a group.

    Made of stand-ins as `sharding.tagc.TagcReduce` is.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = [group for group in groups if group.residual.numel()]

    def states(self, residual: str, shards: Sequence[Shard]) -> list[State]:
        if residual == "drop":
            return []
        if residual == "exact":
            return [self._exact()]
        sums = {name: one for group in self._groups for name, one in group.slices(group.decode_and_sum()).items()}
        return [self._by_parameter(sums, shards)]

    def described(self, residual: str) -> dict[str, dict[str, Any]]:
        if residual == "drop":
            return {}
        what = {"own": False, "carries": "gradient", "by_parameter": residual != "exact"}
        return {KIND: what | ({"lies": self._lies()} if residual == "exact" else {})}

    def sizes(self, residual: str) -> dict[str, int]:
        # Of all ranks: of each the rows of all, or its own.
        rows = {"exact": lambda group: len(group.residual) ** 2, "mean": lambda group: len(group.residual)}
        if residual not in rows:
            return {}
        return {KIND: 4 * sum(rows[residual](group) * group.residual.shape[1] for group in self._groups)}

    def loading(self, reader: CheckpointReader, shards: Sequence[Shard]) -> list[State]:
        what = reader.saved["states"].get(KIND)
        for group in self._groups:
            group.residual.zero_()
        if what is not None and not what["by_parameter"]:
            if what["lies"] != self._lies():
                refuse_exact(reader.saved["states"], "has another shard degree, or compresses other layers")
            assert reader.fill_of_this_shard([self._exact()])
            return []
        own = {name: one for group in self._groups for name, one in group.slices().items()}
        return [self._by_parameter(own, shards)]

    def request_full_exchange(self) -> None:
        for group in self._groups:
            group.request_full_exchange()

    def as_gradients(self, shards: Sequence[Shard]) -> None:
        (sums,) = self.states("mean", shards)
        for shard in shards:
            if shard.name in sums.tensors:
                store_gradient(shard, sums.tensors[shard.name].reshape(-1))
        for group in self._groups:
            group.all_is_sent()

    def after_optimizer_step(self, applied: Tensor) -> None:
        for group in self._groups:
            group.after_optimizer_step(applied)

    def squares(self) -> Tensor | None:
        total = torch.zeros((), dtype=torch.float64, device=self._groups[0].residual.device) if self._groups else None
        for group in self._groups:
            assert total is not None
            total += group.residual.norm(dtype=torch.float64).square()
        return total

    def _exact(self) -> State:
        tensors = {group.name: group.residual for group in self._groups}
        return State(KIND, tensors, per_replica=False, on_migration="gradient", by_parameter=False)

    def _by_parameter(self, rows: dict[str, Tensor], shards: Sequence[Shard]) -> State:
        """Of local shapes: a stretch of a row has zeros after its parameter's last entry."""
        found = {s.name: rows[s.name][: s.size].view(s.local_shape) for s in shards if s.name in rows}
        return State(KIND, found, per_replica=False, on_migration="gradient")

    def _lies(self) -> dict[str, list[Any]]:
        """By group: ranks, and the compressed parameters in their order. As JSON has it."""
        return {group.name: [len(group.residual), *group.slices()] for group in self._groups}


def refuse_exact(states: dict[str, dict[str, Any]], this_run: str) -> None:
    """Raises ValueError where a checkpoint has ranks' own residuals of the shard axis, which this run cannot take."""
    what = states.get(KIND)
    if what is not None and not what["by_parameter"]:
        raise ValueError(
            "the checkpoint has the residuals of the shard axis as ranks keep them (checkpoint.residual = 'exact'), "
            f"and this run {this_run}; resume with what saved it, and save with checkpoint.residual = 'mean', which "
            "any run takes"
        )

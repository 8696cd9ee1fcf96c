"""Residuals of the shard axis between steps: checkpoints, metrics and the final full exchange.

Residuals are FP32. Their sum over ranks is the gradient that has not been applied yet.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, store_gradient
from torchtitan_scape.methods.imported import CheckpointReader
from torchtitan_scape.methods.interface import State

KIND = "shard_residual"


class ResidualStore:
    """Residuals of a model's parameter groups. Every rank stores a residual of all rows, (S, n) per group.

    Args:
        groups: Reduce-scatter hooks with the interface of `sharding.tagc.TagcReduce`. FSDP2's own collectives and block
            codes have no residuals.
    """

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self._groups = [group for group in groups if group.residual.numel()]

    def states(self, residual: str, shards: Sequence[Shard]) -> list[State]:
        """Return the states for a checkpoint. Collective.

        Args:
            residual: "exact" saves the residual of each rank and requires the same degrees on loading; "mean" saves the
                sum over ranks with the owner of each shard, for any degrees; "drop" saves nothing.
            shards: Shards of this rank.
        """
        if residual == "drop" or not self._groups:
            return []
        if residual == "exact":
            return [self._exact()]
        sums = {name: row for group in self._groups for name, row in group.slices(group.decode_and_sum()).items()}
        return [self._by_parameter(sums, shards)]

    def described(self, residual: str) -> dict[str, dict[str, Any]]:
        """Return the description for a checkpoint's record; see `methods.interface.State.describe`."""
        if residual == "drop" or not self._groups:
            return {}
        record = {"per_replica": False, "on_migration": "gradient", "by_parameter": residual != "exact"}
        return {KIND: record | ({"row_layout": self._row_layout()} if residual == "exact" else {})}

    def sizes(self, residual: str) -> dict[str, int]:
        """Return the bytes in a checkpoint, by kind, in total over all ranks."""
        if residual == "drop" or not self._groups:
            return {}
        exponent = 2 if residual == "exact" else 1  # every rank saves all rows, or only its own row
        return {KIND: 4 * sum(len(g.residual) ** exponent * g.residual.shape[1] for g in self._groups)}

    def loading(self, reader: CheckpointReader, shards: Sequence[Shard]) -> list[State]:
        """Return, before a checkpoint is loaded, tensors by parameter that receive its pending residuals.

        Raises:
            ValueError: The checkpoint contains per-rank residuals that this run cannot load.
        """
        record = reader.saved["states"].get(KIND)
        for group in self._groups:
            group.residual.zero_()
        if record is not None and not record["by_parameter"]:
            if record["row_layout"] != self._row_layout():
                reason = "has another shard degree, or compresses other layers"
                raise ValueError(
                    "the checkpoint contains per-rank residuals of the shard axis (checkpoint.residual = 'exact'), but "
                    f"this run {reason if self._groups else 'has no [sharding] option with residuals'}; resume with "
                    "the configuration that saved it, and save with checkpoint.residual = 'mean', which any run can "
                    "load"
                )
            is_filled = not self._groups or reader.fill_of_this_shard([self._exact()])
            assert is_filled
            return []
        rows = {name: one for group in self._groups for name, one in group.slices().items()}
        return [self._by_parameter(rows, shards)] if self._groups else []

    def request_full_exchange(self) -> None:
        """Make the exchange of the next step complete, so that no residual remains after it."""
        for group in self._groups:
            group.request_full_exchange()

    def as_gradients(self, shards: Sequence[Shard]) -> None:
        """Store the residuals as the gradients of a step without a backward pass. Collective."""
        for sums in self.states("mean", shards):
            for shard in shards:
                if shard.name in sums.tensors:
                    store_gradient(shard, sums.tensors[shard.name].reshape(-1))
        for group in self._groups:
            group.mark_full_exchange()

    def after_optimizer_step(self, applied: Tensor) -> None:
        """Update the residuals after a step. `applied`, bool (), is false if the step was skipped."""
        for group in self._groups:
            group.after_optimizer_step(applied)

    def squares(self) -> Tensor | None:
        """Return the sum of squares of this rank's residuals, FP64 (), or None without residuals."""
        squares = [group.residual.norm(dtype=torch.float64).square() for group in self._groups]
        return sum(squares[1:], squares[0]) if squares else None

    def _exact(self) -> State:
        tensors = {group.name: group.residual for group in self._groups}
        return State(KIND, tensors, per_replica=False, on_migration="gradient", by_parameter=False)

    def _by_parameter(self, rows: dict[str, Tensor], shards: Sequence[Shard]) -> State:
        """Return a state of local shapes. A slice of a row is zero-padded after the parameter's last entry."""
        tensors = {s.name: rows[s.name][: s.size].view(s.local_shape) for s in shards if s.name in rows}
        return State(KIND, tensors, per_replica=False, on_migration="gradient")

    def _row_layout(self) -> dict[str, list[Any]]:
        """Return the number of ranks and the compressed parameters in order, by group, as JSON values."""
        return {group.name: [len(group.residual), *group.slices()] for group in self._groups}

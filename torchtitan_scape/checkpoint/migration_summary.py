"""Summary of a load for the log."""

import torch

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.methods.imported import CheckpointReader, ImportedState
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer


class MigrationSummary:
    """The state that a run received from a checkpoint. `text` describes it for the log.

    Args:
        exact: the same method and layout load an exact save: all state as it was.

    Attributes:
        copied: moments were copied parameter by parameter, because another optimizer had saved them.
        moments_continue: there was a first moment, and this run has it.
        further_continue: there was other state than first and second moments, and this run has it.
        flushed: pending gradients were added to first moments.
        lost: pending gradients of parameters without a first moment, or with beta1 = 0.
        restarts: some of the optimizer's state is of other shapes than the parameters', and begins anew.
        complete_exchange: the next exchange is complete.
        unreadable: pending gradients in coordinates that only the layout, method and options that saved them know.
    """

    def __init__(self, reader: CheckpointReader, exact: bool, optimizer: ReplicaOptimizer) -> None:
        self._reader, self._optimizer, self._exact = reader, optimizer, exact
        self._squares = torch.zeros((), dtype=torch.float64, device=optimizer.grad_norm.device)
        self._has_pending = False
        self.copied = self.moments_continue = self.flushed = self.lost = self.complete_exchange = False
        self.unreadable = self.restarts = self.further_continue = False

    def count(self, shard: Shard, imported: ImportedState) -> None:
        """Add a parameter to the norm of the pending gradients' mean. Collective."""
        if self._exact or imported.pending is None:
            return
        self._has_pending = True
        if shard.counted:
            self._squares += sum_of_squares(imported.pending.mean)

    def text(self) -> str:
        """Return a line about the loaded state. Collective."""
        replicas_differ = bool(self._optimizer.weights)
        if self._exact and not self.complete_exchange:
            return "state as it was saved" + (", every replica its own" if replicas_differ else "")
        self.further_continue = any(self._optimizer.collectives.gather_objects(self.further_continue))
        parts = [self._weights_and_moments(), self._pending()]
        if self.lost:
            parts.append("without a first moment, or with beta1 = 0, pending gradients are lost")
        if self.unreadable:
            parts.append("pending gradients are lost: they are stored in the bases of other shards")
        if any(self._optimizer.collectives.gather_objects(self.restarts)):  # owners have different parts
            parts.append("the optimizer's state of other shapes than the parameters' begins anew")
        if self.complete_exchange:
            parts.append("the next exchange is complete")
        return "; ".join(part for part in parts if part)

    def _weights_and_moments(self) -> str:
        reader = self._reader
        if not METHODS[reader.saved["method"]].method.per_replica_weights:
            if self._optimizer.weights:
                return "all replicas start from the model and its moments"
            if not self.copied:
                return "moments as they were saved"
            holds = self._optimizer.methods[0].holds_optimizer_state
            if holds or self.moments_continue:
                return "the first moment was copied"
            return "moments were copied" if self.further_continue else "no moments continue"
        if reader.saved["residual"] == "drop":
            return "all replicas start from the saved model and the mean of the moments"
        if reader.saved["residual"] != "exact":
            return "all replicas start from the mean of weights and moments, as it was saved"
        if self._optimizer.weights and reader.same_count:
            return "every replica continues from its own weights and moments"
        return f"all replicas start from the mean of {reader.replicas} replicas' weights and moments"

    def _pending(self) -> str:
        residual = self._reader.saved["residual"]
        if residual == "drop":
            return "pending updates were not saved and are lost"
        if not self._has_pending:
            return ""
        norm = f"(norm {float(self._optimizer.collectives.sum_over_model(self._squares.float()).sqrt()):.3g})"
        if self.flushed:
            return f"the mean of the pending gradients {norm} was added to the first moment"
        if residual == "mean":
            return f"every replica starts from the mean of the pending gradients, as it was saved {norm}"
        if self._reader.same_count:
            return f"every replica keeps its pending gradients {norm}"
        return f"every replica receives the mean of {self._reader.replicas} replicas' pending gradients {norm}"

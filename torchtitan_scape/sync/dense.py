"""The dense baseline: every gradient, in FP32."""

from torch import Tensor

from topology.collectives import ReplicaCollectives


class DenseSync:
    """All-reduces the gradients over replicas, in chunks. `sent + residual == input` with no residual.

    reduction: "sum" where the loss is divided by the global token count already, else "mean".
    """

    def __init__(self, collectives: ReplicaCollectives, reduction: str = "sum") -> None:
        self.collectives = collectives
        self._mean = reduction == "mean"

    def synchronize(self, gradients: list[Tensor]) -> None:
        """FP32 flat gradients in, their sum or mean over replicas out, in place. A collective call."""
        self.collectives.all_reduce_chunked(gradients, mean=self._mean)

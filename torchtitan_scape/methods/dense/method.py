"""The dense baseline: every gradient, in FP32."""

from collections.abc import Callable

from torch import Tensor

from topology.comm_stream import Handle
from topology.partition import Chunk
from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo


class Dense(ChunkedMethod):
    """All-reduces the gradients over replicas. Nothing is left pending."""

    def __init__(self, context: MethodContext, options: DenseOptions) -> None:
        super().__init__(context, options)
        # Gradients that are to be summed are summed: scaled by N and averaged they would be rounded once more.
        self._divisor = self.collectives.replicas / context.gradient_scale
        if self.collectives.replicas == 1 and self._divisor == 1.0:
            self.chunks = []  # there is nothing to do

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        def finish(step: StepInfo) -> None:
            if self._divisor != 1.0:
                values.div_(self._divisor)

        return self.collectives.all_reduce(values, mean=False), finish

"""Dense baseline: all-reduce of all gradients in FP32."""

from collections.abc import Callable

from torch import Tensor

from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk
from torchtitan_scape.topology.stages import divide_


class Dense(ChunkedMethod):
    """All-reduces the gradients over replicas. There is no residual."""

    limits_gradients = False

    def __init__(self, context: MethodContext, options: DenseOptions) -> None:
        super().__init__(context, options)
        # One division after the sum. Scaling by `gradient_scale` and averaging would round twice.
        self._divisor = self.collectives.replicas / context.gradient_scale
        if self.collectives.replicas == 1 and self._divisor == 1.0:
            self.chunks = []  # the result equals the input

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        def finish(info: StepInfo) -> None:
            divide_(values, self._divisor)

        return self.collectives.all_reduce(values, mean=False), finish

"""Dense baseline: all-reduce of all gradients in FP32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_scape.methods.chunked import ChunkedMethod, ChunkInFlight
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk, whole_chunks
from torchtitan_scape.topology.stages import divide_


class Dense(ChunkedMethod):
    """All-reduces the gradients over replicas. There is no residual.

    On a GPU, with replicas on one level, a chunk consists of whole gradients, which are exchanged in place.
    """

    limits_gradients = False

    def __init__(self, context: MethodContext, options: DenseOptions) -> None:
        super().__init__(context, options)
        # One division after the sum. Scaling by `gradient_scale` and averaging would round twice.
        self._divisor = self.collectives.replicas / context.gradient_scale
        self._together = self.collectives.reduces_together(context.shards[0].device)
        if self._together:
            self.chunks = whole_chunks([shard.size for shard in context.shards])
        if self.collectives.replicas == 1 and self._divisor == 1.0:
            self.chunks = []  # the result equals the input

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> ChunkInFlight:
        if not self._together or applied is None:  # the check reads the gradients while an early exchange is running
            return super().start_chunk(number, gradients, applied)
        whole = [each for s in self.chunks[number].slices if (each := gradients[s.tensor]) is not None]
        averages = self._divisor == self.collectives.replicas
        handle = self.collectives.all_reduce_together(whole, mean=averages)

        def finish(info: StepInfo) -> None:
            handle.wait()
            if not averages and self._divisor != 1.0:
                torch._foreach_div_(whole, self._divisor)

        return ChunkInFlight(handle, finish)

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        def finish(info: StepInfo) -> None:
            divide_(values, self._divisor)

        return self.collectives.all_reduce(values, mean=False), finish

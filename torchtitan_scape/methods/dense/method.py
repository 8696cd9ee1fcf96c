"""Dense baseline: all-reduce of all gradients in FP32."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.topology.chunks import Exchange, double_buffered
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk, whole_chunks
from torchtitan_scape.topology.stages import divide_


class Dense(ChunkedMethod):
    """All-reduces the gradients over replicas. There is no residual.

    On a GPU, with replicas on one level, many whole gradients are exchanged in place by one call. An exchange that
    starts during the backward pass has chunks in buffers, because the check reads the gradients meanwhile.
    """

    limits_gradients = False

    def __init__(self, context: MethodContext, options: DenseOptions) -> None:
        super().__init__(context, options)
        # One division after the sum. Scaling by `gradient_scale` and averaging would round twice.
        self._divisor = self.collectives.replicas / context.gradient_scale
        together = self.collectives.reduces_together(context.shards[0].device)
        self._whole = whole_chunks([shard.size for shard in context.shards]) if together else []
        if self.collectives.replicas == 1 and self._divisor == 1.0:
            self.chunks, self._whole = [], []  # the result equals the input

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        if not self._whole or (self.overlap is not None and self.overlap.active):
            return super().synchronize(gradients, info)
        double_buffered(self._start_together(chunk, gradients) for chunk in self._whole)
        return gradients

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        if not self._whole:
            return super().start(gradients, info)
        started = [self._start_together(chunk, gradients) for chunk in self._whole]

        def finish() -> list[Tensor]:
            for handle, divide in started:
                handle.wait()
                divide()
            return gradients

        return finish

    def _start_together(self, chunk: Chunk, gradients: Sequence[Tensor]) -> Exchange:
        """Start the exchange of whole gradients in their memory."""
        whole = [gradients[s.tensor] for s in chunk.slices]
        averages = self._divisor == self.collectives.replicas
        handle = self.collectives.all_reduce_together(whole, mean=averages)
        return handle, partial(_divide_all_, whole, 1.0 if averages else self._divisor)

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        def finish(info: StepInfo) -> None:
            divide_(values, self._divisor)

        return self.collectives.all_reduce(values, mean=False), finish


def _divide_all_(tensors: list[Tensor], divisor: float) -> None:
    if divisor != 1.0:
        torch._foreach_div_(tensors, divisor)

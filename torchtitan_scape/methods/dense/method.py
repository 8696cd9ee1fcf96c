"""Dense baseline: all-reduce of all gradients in FP32."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk, whole_chunks
from torchtitan_scape.topology.stages import divide_


class SentTensors(NamedTuple):
    """Whole gradients that are reduced in their own memory."""

    handle: Handle
    gradients: list[Tensor]


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
        self._averages = self._divisor == self.collectives.replicas
        together = self.collectives.reduces_together(context.shards[0].device)
        self._whole = whole_chunks([shard.size for shard in context.shards]) if together else []
        if self.collectives.replicas == 1 and self._divisor == 1.0:
            self.chunks, self._whole = [], []  # the result equals the input

    def start_chunks(self, gradients: list[Tensor], applied: Tensor) -> Iterator[Any]:
        if not self._whole:
            return super().start_chunks(gradients, applied)
        return (self._start_together(chunk, gradients) for chunk in self._whole)

    def _start_together(self, chunk: Chunk, gradients: Sequence[Tensor]) -> SentTensors:
        whole = [gradients[s.tensor] for s in chunk.slices]
        return SentTensors(self.collectives.all_reduce_together(whole, mean=self._averages), whole)

    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        if not isinstance(sent, SentTensors):
            super().finish_chunk(sent, applied)
        elif not self._averages and self._divisor != 1.0:
            torch._foreach_div_(sent.gradients, self._divisor)

    def send(self, values: Tensor) -> Handle:
        return self.collectives.all_reduce(values, mean=False)

    def receive(self, values: Tensor) -> None:
        divide_(values, self._divisor)

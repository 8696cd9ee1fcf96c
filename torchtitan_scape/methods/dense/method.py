"""Dense baseline: all-reduce of all gradients in FP32."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.tensors import record_streams
from torchtitan_scape.methods.base import ChunkedMethod
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.topology.chunks import in_place
from torchtitan_scape.topology.partition import Chunk, whole_chunks
from torchtitan_scape.topology.stages import Handle, divide_


class SentBuffer(NamedTuple):
    """A chunk that is reduced in a buffer, or in the memory of its only gradient.

    Attributes:
        handle: The collective.
        values: FP32 (n,), becomes the sum.
        parts, views: The gradients of the chunk, and the views of `values` to copy to them; none without a buffer.
    """

    handle: Handle
    values: Tensor
    parts: list[Tensor]
    views: list[Tensor]


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

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> SentBuffer:
        chunk = self.chunks[number]
        of_slices = [(s, gradient) for s in chunk.slices if (gradient := gradients[s.tensor]) is not None]
        parts = [gradient.view(-1)[s.first : s.first + s.length] for s, gradient in of_slices]
        size, views = self.collectives.padded_size(chunk.entries), list[Tensor]()
        # During the backward pass the check has not read the gradients yet.
        values = in_place(parts) if applied is not None and chunk.entries == size else None
        if values is None:
            values = torch.empty(size, dtype=torch.float32, device=parts[0].device)
            views = list(values[: chunk.entries].split([part.numel() for part in parts]))
            torch._foreach_copy_(views, parts)
            values[chunk.entries :].zero_()
        return SentBuffer(self.collectives.all_reduce(values, mean=False), values, parts, views)

    def finish_chunk(self, sent: SentBuffer | SentTensors, applied: Tensor) -> None:
        if isinstance(sent, SentTensors):
            if not self._averages and self._divisor != 1.0:
                torch._foreach_div_(sent.gradients, self._divisor)
            return
        if sent.views:
            record_streams(sent.values)
        divide_(sent.values, self._divisor)
        if sent.views:
            torch._foreach_copy_(sent.parts, sent.views)

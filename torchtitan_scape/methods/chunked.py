"""Methods whose exchange consists of independent chunks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.topology.chunks import double_buffered, in_place
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk, chunks_of


class SentValues(NamedTuple):
    """A chunk in flight.

    Attributes:
        handle: The collective.
        values: FP32 (n,), becomes the result.
        parts, views: The gradients of the chunk, and the views of `values` to copy to them; none if `values` is a
            gradient itself.
    """

    handle: Handle
    values: Tensor
    parts: list[Tensor]
    views: list[Tensor]


class ChunkedMethod(GradientMethod, EarlyExchange):
    """Exchanges the gradients in chunks that do not depend on each other, starting with the last parameter.

    The boundaries of the chunks follow from the shapes, and the exchange of a chunk uses only its own gradients and
    state. The result therefore has the same bits whenever a chunk is started, provided that all replicas start the
    chunks in the same order. This allows starting them during the backward pass (`[sync] overlap`, see
    `methods.overlap`).
    """

    def __init__(
        self, context: MethodContext, options: Any, codec: Codec | None = None, in_place: bool = False
    ) -> None:
        """Divide the gradients into chunks.

        Args:
            codec: Encoding of the messages. Every parameter starts at a multiple of its block size, so that no two
                parameters share a scale.
            in_place: The gradients are encoded without a buffer.
        """
        super().__init__(context, options)
        self.codec = codec
        sizes = [shard.size for shard in context.shards]
        limit = self.collectives.chunk_limit(sum(sizes), codec, in_place)
        self.chunks = chunks_of(sizes, limit, codec.block_size if codec else 1)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Exchange the chunks, two at once: one is filled while the other is in flight.

        If the backward pass has already started chunks, only wait for them.
        """
        if self.overlap is not None and self.overlap.active:
            return self.overlap.finish(info)
        chunks = self.start_chunks(gradients, info.applied)
        double_buffered((sent.handle, partial(self.finish_chunk, sent, info.applied)) for sent in chunks)
        return gradients

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        """Start all chunks at once, each with its own buffer."""
        return partial(self._finish, list(self.start_chunks(gradients, info.applied)), gradients, info.applied)

    def _finish(self, chunks: Sequence[Any], gradients: list[Tensor], applied: Tensor) -> list[Tensor]:
        for sent in chunks:
            sent.handle.wait()
            self.finish_chunk(sent, applied)
        return gradients

    def begin(self) -> None:
        """Prepare a step. Called before its first chunk starts."""

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        """Prepare `start_chunk` for these gradients: those that exist now, None for the others."""

    def start_chunks(self, gradients: list[Tensor], applied: Tensor) -> Iterator[Any]:
        """Start the exchange of each chunk when the iterator comes to it. Collective."""
        self.begin()
        self.bind(gradients)
        return (self.start_chunk(number, gradients, applied) for number in range(len(self.chunks)))

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        """Start the exchange of a chunk, and return an object with its `handle`. Collective.

        A chunk that is a part of one gradient and needs no padding is exchanged in the gradient's memory if `applied`
        is known.

        Args:
            gradients: As in the last `bind`; those of the chunk exist.
            applied: `StepInfo.applied`; None during the backward pass, before the check for non-finite gradients.
        """
        chunk = self.chunks[number]
        of_slices = [(s, gradient) for s in chunk.slices if (gradient := gradients[s.tensor]) is not None]
        parts = [gradient.view(-1)[s.first : s.first + s.length] for s, gradient in of_slices]
        size = self.collectives.padded_size(chunk.entries, self.codec)
        values = in_place(parts) if applied is not None and parts[0].numel() == size else None
        if values is not None:
            return SentValues(self.send(values), values, [], [])
        values = torch.empty(size, dtype=torch.float32, device=parts[0].device)
        views = _fill(values, chunk, parts)
        return SentValues(self.send(values), values, parts, views)

    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        """Store the result of a chunk, after waiting for its handle, and the method's state if `applied`, bool ()."""
        if sent.views and sent.values.is_cuda:  # a hook of the backward pass may have allocated it on another stream
            sent.values.record_stream(torch.cuda.current_stream(sent.values.device))
        self.receive(sent.values)
        if sent.views:
            torch._foreach_copy_(sent.parts, sent.views)

    def send(self, values: Tensor) -> Handle:
        """Start the exchange of a chunk, FP32 (n,), gradients with zeros as padding. Collective."""
        raise NotImplementedError

    def receive(self, values: Tensor) -> None:
        """Turn the received values of a chunk into the result of `synchronize`, in place."""

    def early_chunks(self) -> Sequence[Collection[int]]:
        return [{s.tensor for s in chunk.slices} for chunk in self.chunks]

    def begin_early(self, step: int) -> Collection[int]:
        self.begin()
        return range(len(self.chunks))

    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> Any:
        self.bind(gradients)
        return self.start_chunk(number, gradients, applied=None)

    def finish_early(self, sent: Any, info: StepInfo) -> None:
        self.finish_chunk(sent, info.applied)


def _fill(values: Tensor, chunk: Chunk, parts: list[Tensor]) -> list[Tensor]:
    """Copy the chunk's slices into `values`, with zeros in the gaps. Return the views of the slices."""
    views, end = [], 0
    for s in chunk.slices:
        if end < s.at:
            values[end : s.at].zero_()
        end = s.at + s.length
        views.append(values[s.at : end])
    if end < values.numel():
        values[end:].zero_()
    torch._foreach_copy_(views, parts)
    return views

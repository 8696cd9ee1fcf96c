"""Methods whose exchange falls into chunks that know nothing of each other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topology.chunks import double_buffered
from topology.codecs import Codec
from topology.comm_stream import Handle
from topology.partition import Chunk, chunks_of
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo


class ChunkInFlight(NamedTuple):
    """A chunk on its way. take: waits for it, puts it into the gradients, and writes the method's state."""

    handle: Handle
    take: Callable[[StepInfo], None]


class ChunkedMethod(GradientMethod):
    """The gradients as one stream, the last parameter's first, cut into chunks that are exchanged each for itself.

    How the stream is cut follows from the shapes alone, and a chunk's exchange from its own gradients and state: chunks
    give the same bits whenever they are started, so long as all replicas start them in their order. So they may go out
    as the backward pass leaves their gradients: `[sync] overlap`, see `methods.overlap`.
    """

    supports_overlap = True

    def __init__(self, context: MethodContext, options: Any, codec: Codec | None = None) -> None:
        """codec: of the exchange; every parameter begins at a multiple of its unit, so that none shares a scale."""
        super().__init__(context, options)
        self.codec = codec
        self.overlap: Any = None  # `methods.overlap.BackwardOverlap`, if chunks start during the backward pass
        sizes = [shard.size for shard in context.shards]
        self.chunks = chunks_of(sizes, self.collectives.chunk_entries, codec.block_size if codec else 1)

    def begin(self) -> None:
        """Before the first chunk of a step is started; for what all chunks of a step go by."""

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        """Starts the exchange of FP32 (n,), which holds this replica's gradients of the chunk, and zeros.

        Returns its handle, and what finishes it once that has been waited for: afterwards `values` is what
        `synchronize` gives, and what is kept of the chunk has been written, unless not `step.applied`.
        """
        raise NotImplementedError

    def start_chunk(self, number: int, gradients: Sequence[Tensor] | Mapping[int, Tensor]) -> ChunkInFlight:
        """Starts a chunk. A collective call. gradients: as `synchronize` takes them, by number; those of the chunk."""
        chunk = self.chunks[number]
        parts = [gradients[s.tensor][s.first : s.first + s.length] for s in chunk.slices]
        values = torch.empty(
            self.collectives.padded_size(chunk.entries, self.codec), dtype=torch.float32, device=parts[0].device
        )
        views, end = [], 0
        for s in chunk.slices:
            values[end : s.at].zero_()
            end = s.at + s.length
            views.append(values[s.at : end])
        values[end:].zero_()
        torch._foreach_copy_(views, parts)
        handle, finish = self.send(chunk, values)

        def take(step: StepInfo) -> None:
            handle.wait()
            if values.is_cuda:  # it may have been allocated on the stream of a hook of the backward pass
                values.record_stream(torch.cuda.current_stream(values.device))
            finish(step)
            torch._foreach_copy_(parts, views)

        return ChunkInFlight(handle, take)

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        """Exchange through the buffers of two chunks: one is filled while the other is in flight.

        Chunks that the backward pass has started are waited for instead.
        """
        if self.overlap is not None and self.overlap.under_way:
            return self.overlap.take(step)
        self.begin()
        started = (self.start_chunk(number, gradients) for number in range(len(self.chunks)))
        double_buffered((arriving.handle, partial(arriving.take, step)) for arriving in started)
        return gradients

    def start(self, gradients: list[Tensor], step: StepInfo) -> Callable[[], list[Tensor]]:
        """All chunks at once, each in a buffer of its own."""
        self.begin()
        started = [self.start_chunk(number, gradients) for number in range(len(self.chunks))]

        def take() -> list[Tensor]:
            for one in started:
                one.take(step)
            return gradients

        return take

"""Methods whose exchange consists of independent chunks."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.topology.chunks import double_buffered
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.partition import chunks_of


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

    @abstractmethod
    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        """Start the exchange of a chunk, and return an object with its `handle`. Collective.

        Args:
            gradients: As in the last `bind`; those of the chunk exist.
            applied: `StepInfo.applied`; None during the backward pass, before the check for non-finite gradients.
        """

    @abstractmethod
    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        """Store the result of a chunk, after waiting for its handle, and the method's state if `applied`, bool ()."""

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

"""Exchanges chunk by chunk, of what is too large for a buffer of its own: dense gradients, payloads of dense masks."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from topology.codecs import Codec
from topology.comm_stream import Handle
from topology.partition import ALIGNED, CHUNK_ENTRIES

Exchange = tuple[Handle, Callable[[], None]]  # in flight, and what takes its result


class Source(Protocol):
    """FP32 entries that lie anywhere, copied to and from contiguous chunks."""

    entries: int
    device: torch.device

    def fill(self, chunk: Tensor, first: int) -> None:
        """chunk = entries [first, first + len(chunk))."""

    def land(self, chunk: Tensor, first: int) -> None:
        """entries [first, first + len(chunk)) = chunk."""


class ConcatSource:
    """`Source` of flat FP32 tensors, one behind the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._ends = list(accumulate(t.numel() for t in tensors))
        self.entries = self._ends[-1] if tensors else 0
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def fill(self, chunk: Tensor, first: int) -> None:
        torch.cat(self._parts(first, chunk.numel()), out=chunk)

    def land(self, chunk: Tensor, first: int) -> None:
        parts = self._parts(first, chunk.numel())
        torch._foreach_copy_(parts, list(chunk.split([part.numel() for part in parts])))

    def _parts(self, first: int, length: int) -> list[Tensor]:
        parts = []
        for i in range(bisect_right(self._ends, first), len(self._ends)):
            begin = self._ends[i] - self._tensors[i].numel()
            if begin >= first + length:
                break
            parts.append(self._tensors[i][max(0, first - begin) : first + length - begin])
        return parts


class AddingSource(ConcatSource):
    """`Source` of flat FP32 tensors, which stay as they are: what arrives is added to other tensors of these sizes."""

    def __init__(self, tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._sums = ConcatSource(sums)

    def land(self, chunk: Tensor, first: int) -> None:
        parts = self._sums._parts(first, chunk.numel())
        torch._foreach_add_(parts, list(chunk.split([part.numel() for part in parts])))


class RowSource:
    """Stretches of a `Source` as the rows of a matrix, a row a replica; a chunk takes as many columns of all of them.

    stretches: for every replica (first entry, length), one behind the other in its row. Rows are padded with zeros to
        the longest one.
    """

    def __init__(self, source: Source, stretches: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._source, self._stretches, self.device = source, stretches, source.device
        self.columns = max((sum(length for _, length in row) for row in stretches), default=0)

    def fill(self, chunk: Tensor, row: int, column: int) -> None:
        """chunk = the row's entries [column, column + len(chunk))."""
        filled = 0
        for at, first, length in self._parts(row, column, chunk.numel()):
            self._source.fill(chunk[at : at + length], first)
            filled = at + length
        chunk[filled:].zero_()

    def land(self, chunk: Tensor, row: int, column: int) -> None:
        """The row's entries [column, column + len(chunk)) = chunk."""
        for at, first, length in self._parts(row, column, chunk.numel()):
            self._source.land(chunk[at : at + length], first)

    def _parts(self, row: int, column: int, count: int) -> list[tuple[int, int, int]]:
        """(place in the chunk, first entry in the source, length) of what the chunk holds."""
        parts, start = [], 0
        for first, length in self._stretches[row]:
            a, b = max(start, column), min(start + length, column + count)
            if a < b:
                parts.append((a - column, first + a - start, b - a))
            start += length
        return parts


class SourceSlice:
    """Entries [start, end) of another `Source`."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source, self._start = source, start
        self.entries, self.device = end - start, source.device

    def fill(self, chunk: Tensor, first: int) -> None:
        self._source.fill(chunk, self._start + first)

    def land(self, chunk: Tensor, first: int) -> None:
        self._source.land(chunk, self._start + first)


def all_reduce_chunked(
    collectives: Any, source: Source, mean: bool, chunk_entries: int, codec: Codec | None = None
) -> None:
    """The mean (or sum) over replicas of all entries, in place. What the codec loses is let go."""
    if collectives.replicas == 1:
        return

    def exchanges() -> Iterator[Exchange]:
        for first in range(0, source.entries, chunk_entries):
            length = min(chunk_entries, source.entries - first)
            buffer = torch.empty(collectives.padded_size(length, codec), dtype=torch.float32, device=source.device)
            chunk = buffer[:length]
            source.fill(chunk, first)
            buffer[length:].zero_()
            yield collectives.all_reduce(buffer, mean, codec=codec), partial(source.land, chunk, first)

    double_buffered(exchanges())


def reduce_scatter_chunked(collectives: Any, rows: RowSource, codec: Codec | None = None) -> None:
    """Every replica's row becomes the mean over replicas, at that replica; the others stay what they were. What the
    codec loses is let go."""
    if collectives.replicas == 1:
        return
    own = collectives.replica

    def exchanges() -> Iterator[Exchange]:
        for column, buffer in _buffers(collectives, rows, codec.block_size if codec else ALIGNED):
            for row, chunk in enumerate(buffer):
                rows.fill(chunk, row, column)
            yield collectives.reduce_scatter(buffer.view(-1), codec=codec), partial(rows.land, buffer[own], own, column)

    double_buffered(exchanges())


def all_gather_chunked(collectives: Any, rows: RowSource, codec: Codec | None = None) -> None:
    """Every replica's row goes to all others. With a codec all take what is decoded, the sender included."""
    if collectives.replicas == 1:
        return
    own = collectives.replica

    def land(buffer: Tensor, messages: Tensor | None, column: int) -> None:
        if codec is not None and messages is not None:
            codec.decode(messages, buffer)
        for row, chunk in enumerate(buffer):
            if codec is not None or row != own:
                rows.land(chunk, row, column)

    def exchanges() -> Iterator[Exchange]:
        for column, buffer in _buffers(collectives, rows, codec.block_size if codec else ALIGNED):
            rows.fill(buffer[own], own, column)
            messages = None
            if codec is None:
                handle = collectives.all_gather(buffer.view(-1), buffer[own], kind="values")
            else:
                handle, messages = collectives.all_gather_coded(buffer[own], codec, kind="values")
            yield handle, partial(land, buffer, messages, column)

    double_buffered(exchanges())


def _buffers(collectives: Any, rows: RowSource, unit: int) -> Iterator[tuple[int, Tensor]]:
    """(first column, FP32 (replicas, columns)) of every chunk; columns are a multiple of `block_size`."""
    width = -(-max(collectives.min_columns, CHUNK_ENTRIES // collectives.replicas) // unit) * unit
    for column in range(0, rows.columns, width):
        shape = collectives.replicas, -(-min(width, rows.columns - column) // unit) * unit
        yield column, torch.empty(shape, dtype=torch.float32, device=rows.device)


def double_buffered(exchanges: Iterable[Exchange]) -> None:
    """Lands each exchange once the next one, which is filled meanwhile, has been started."""
    before: Exchange | None = None
    for exchange in exchanges:
        if before is not None:
            _finish(*before)
        before = exchange
    if before is not None:
        _finish(*before)


def _finish(handle: Handle, land: Callable[[], None]) -> None:
    handle.wait()
    land()

"""Chunked exchange of data that is too large for one buffer: dense gradients, and payloads of dense masks."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, starmap
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_scape.topology.partition import chunk_limit
from torchtitan_scape.topology.stages import Codec, Handle, entries_together

Exchange = tuple[Handle, Callable[[], None]]  # (exchange in flight, function that stores its result)


def in_place(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the only part if a collective can use its memory: FP32, contiguous and aligned to 16 bytes."""
    fits = len(parts) == 1 and parts[0].is_contiguous() and parts[0].data_ptr() % 16 == 0
    return parts[0] if fits and parts[0].dtype == torch.float32 else None


class Source(Protocol):
    """FP32 entries in any storage, which are copied to and from contiguous chunks."""

    entries: int
    device: torch.device

    def fill(self, chunk: Tensor, first: int) -> None:
        """Copy entries [first, first + len(chunk)) to `chunk`."""

    def store(self, chunk: Tensor, first: int) -> None:
        """Copy `chunk` to entries [first, first + len(chunk))."""


class ConcatSource:
    """`Source` of concatenated flat FP32 tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._ends = list(accumulate(t.numel() for t in tensors))
        self.entries = self._ends[-1] if tensors else 0
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def fill(self, chunk: Tensor, first: int) -> None:
        torch.cat(self._parts(first, chunk.numel()), out=chunk)

    def store(self, chunk: Tensor, first: int) -> None:
        parts = self._parts(first, chunk.numel())
        torch._foreach_copy_(parts, list(chunk.split([part.numel() for part in parts])))

    def view(self, first: int, length: int) -> Tensor | None:
        """Return entries [first, first + length) if they can be exchanged in place, otherwise None."""
        return in_place(self._parts(first, length))

    def slices(self, first: int, length: int) -> Iterator[tuple[int, slice]]:
        """Yield (number of a tensor, slice of it) for entries [first, first + length)."""
        for i in range(bisect_right(self._ends, first), len(self._ends)):
            begin = self._ends[i] - self._tensors[i].numel()
            if begin >= first + length:
                break
            yield i, slice(max(0, first - begin), first + length - begin)

    def _parts(self, first: int, length: int) -> list[Tensor]:
        pieces = []
        for i, part in self.slices(first, length):
            whole = self._tensors[i]
            pieces.append(whole if part.start == 0 and part.stop >= whole.numel() else whole[part])  # no needless view
        return pieces


class RowSource:
    """Slices of a `Source` as the rows of a matrix with one row per replica. A chunk is a range of columns.

    Args:
        source: Entries of all rows.
        slices: For every replica the (first entry, length) of its slices, which are concatenated in its row. Rows are
            padded with zeros to the length of the longest one.
    """

    def __init__(self, source: Source, slices: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._source, self._slices, self.device = source, slices, source.device
        self.columns = max((sum(length for _, length in row) for row in slices), default=0)

    def fill(self, chunk: Tensor, row: int, column: int) -> None:
        """Copy entries [column, column + len(chunk)) of a row to `chunk`."""
        filled = 0
        for at, first, length in self._parts(row, column, chunk.numel()):
            self._source.fill(chunk[at : at + length], first)
            filled = at + length
        chunk[filled:].zero_()

    def store(self, chunk: Tensor, row: int, column: int) -> None:
        """Copy `chunk` to entries [column, column + len(chunk)) of a row."""
        for at, first, length in self._parts(row, column, chunk.numel()):
            self._source.store(chunk[at : at + length], first)

    def _parts(self, row: int, column: int, count: int) -> list[tuple[int, int, int]]:
        """Return (first entry in the chunk, first entry in the source, length) of every slice in the chunk."""
        parts, start = [], 0
        for first, length in self._slices[row]:
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

    def store(self, chunk: Tensor, first: int) -> None:
        self._source.store(chunk, self._start + first)


def exchange_chunked(
    collectives: Any, source: Source, chunk_entries: int, start: Callable[[Tensor], Handle], codec: Codec | None = None
) -> None:
    """Exchange all entries, in place, in chunks of `chunk_entries`; `start` begins the exchange of a padded buffer."""

    def exchanges() -> Iterator[Exchange]:
        for first in range(0, source.entries, chunk_entries):
            length = min(chunk_entries, source.entries - first)
            padded = collectives.padded_size(length, codec)
            own = source.view(first, length) if isinstance(source, ConcatSource) and padded == length else None
            if own is not None:
                yield start(own), lambda: None
                continue
            buffer = torch.empty(padded, dtype=torch.float32, device=source.device)
            chunk = buffer[:length]
            source.fill(chunk, first)
            if length < padded:
                buffer[length:].zero_()
            yield start(buffer), partial(source.store, chunk, first)

    double_buffered(exchanges())


def reduce_scatter_chunked(collectives: Any, rows: RowSource, codec: Codec | None) -> None:
    """Set this replica's row to the mean over replicas; other rows keep their values.

    Quantization errors are discarded.
    """
    own = collectives.replica

    def start(column: int, buffer: Tensor) -> Exchange:
        for row, chunk in enumerate(buffer):
            rows.fill(chunk, row, column)
        handle = collectives.reduce_scatter(buffer.view(-1), codec=codec)
        return handle, partial(rows.store, buffer[own], own, column)

    double_buffered(starmap(start, _buffers(collectives, rows, codec)))


def all_gather_chunked(collectives: Any, rows: RowSource) -> None:
    """Gather every replica's row on all replicas."""
    own = collectives.replica

    def store(buffer: Tensor, column: int) -> None:
        for row, chunk in enumerate(buffer):
            if row != own:
                rows.store(chunk, row, column)

    def start(column: int, buffer: Tensor) -> Exchange:
        rows.fill(buffer[own], own, column)
        handle = collectives.all_gather(buffer.view(-1), buffer[own], kind="values")
        return handle, partial(store, buffer, column)

    double_buffered(starmap(start, _buffers(collectives, rows, None)))


def _buffers(collectives: Any, rows: RowSource, codec: Codec | None) -> Iterator[tuple[int, Tensor]]:
    """Yield (first column, FP32 (replicas, columns)) of every chunk of whole blocks; nothing for a single replica."""
    replicas, block_size = collectives.replicas, entries_together(codec)
    limit = chunk_limit(replicas * rows.columns, replicas) // replicas
    width = -(-max(collectives.min_columns, limit) // block_size) * block_size
    for column in range(0, rows.columns if replicas > 1 else 0, width):
        shape = replicas, -(-min(width, rows.columns - column) // block_size) * block_size
        yield column, torch.empty(shape, dtype=torch.float32, device=rows.device)


def double_buffered(exchanges: Iterable[Exchange]) -> None:
    """Finish each exchange after the next one has been started, so that two are in flight at once."""
    previous: Exchange | None = None
    for exchange in chain(exchanges, (None,)):
        if previous is not None:
            _finish(*previous)
        previous = exchange


def _finish(handle: Handle, store: Callable[[], None]) -> None:
    handle.wait()
    store()

"""Exchange of slices of several tensors in a block code: by kernels without a buffer, or through a buffer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.codec.reference import BlockCode, fill_last_block
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.common.tensors import record_streams
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, OWNER_ERROR, SECOND, BlockSlice, SentMessages
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.stages import Handle

Tensors = Sequence[Tensor | None]


class CodedChunk(NamedTuple):
    """Slices that are exchanged together.

    Attributes:
        entries: Entries, without padding at the end.
        passes: `BlockExchange` of `kernels.exchange.triton_passes`; None where an exchange needs a buffer.
        views: Views of the lists that were set, for an exchange in a buffer, by kind of list.
    """

    slices: Sequence[BlockSlice]
    entries: int
    passes: Any
    views: dict[int, list[Tensor | None]]


class SentChunk(NamedTuple):
    """A chunk in flight.

    Attributes:
        handle: The collective.
        chunk: The chunk.
        messages: What kernels have encoded; None for an exchange in a buffer, which has the rest.
        first: The first list.
        values: FP32 (n,), becomes the mean.
        error: FP32 (n,), becomes the quantization error; None if it is discarded or in FP32.
        owner_error: FP32 (n,), copies of the owner's errors, without those that the owner adds to the mean.
        carried_error: FP32 (n / replicas,), these, divided by the number of replicas; becomes the error of the mean.
    """

    handle: Handle
    chunk: CodedChunk
    messages: SentMessages | None
    first: Tensors = ()
    values: Tensor | None = None
    error: Tensor | None = None
    owner_error: Tensor | None = None
    carried_error: Tensor | None = None


class CodedExchange:
    """The mean over replicas of first * factor + second, or of first - second (`subtracts`), in slices of tensors.

    Every replica encodes its values x with a quantization error E. The owner of a part of a chunk sums the decoded
    parts in FP32, in the order of the replicas, and sends the encoded mean, with an error F, to all. Then first = mean
    and second = E. With `subtracts`: first -= mean, and second = first - E.

    The owner adds N F to its E. If there is a list of owner's errors, N F is stored there instead, and F is added to
    the next mean before it is encoded. With several levels sums within a node are sent in FP32; E is then that of the
    node's sum, on one of its ranks, and with `subtracts` part of the owner's errors, if these are stored.

    Args:
        collectives: Communication with the other replicas.
        code: Code of the messages; None for an exchange in FP32.
        block: Entries of a block.
        device: Device of the tensors.
        tensors: Number of tensors.
        passes: `kernels.backends.exchange_passes`.
        repeats: The entries of a shorter last block are repeated in it: zeros would change its mean magnitude, which
            codes of one and two bits have as their scale.

    Attributes:
        in_place: Whether kernels encode the tensors without a buffer.
    """

    def __init__(
        self,
        collectives: ReplicaCollectives,
        code: BlockCode | None,
        block: int,
        device: torch.device,
        tensors: int,
        passes: Any,
        repeats: bool,
        subtracts: bool,
        factor: float = 1.0,
    ) -> None:
        self._collectives, self._code, self._block, self._device = collectives, code, block, device
        self._passes = passes if code is not None and len(collectives.levels) == 1 else None
        self._repeats, self._subtracts, self._factor = repeats, subtracts, factor
        self._table = AddressTable(LISTS, tensors, device)
        self._lists: dict[int, Tensors] = {}
        self._chunks: list[CodedChunk] = []
        self.in_place = self._passes is not None

    def set(self, kind: int, tensors: Tensors) -> None:
        """Set a list of `kernels.exchange.layout`, contiguous tensors of any shape, which are kept in memory.

        tensors: The same object as long as the tensors have the same memory.
        """
        if tensors is not self._lists.get(kind):  # views keep the memory of a replaced tensor
            for chunk in self._chunks:
                chunk.views.pop(kind, None)
        self._lists[kind] = tensors
        self.bind(kind, tensors)

    def bind(self, kind: int, tensors: Tensors) -> None:
        """Read the addresses of a list, if kernels need them. The tensors are not kept in memory."""
        if self.in_place:
            self._table.set(kind, tensors)

    def chunk(self, slices: Sequence[BlockSlice], entries: int, encodes: bool = True) -> CodedChunk:
        """Return a chunk for `start`.

        encodes: It is not only for exchanges in FP32.
        """
        passes = None
        if encodes and self._passes is not None and self._code is not None:
            ranks, size = self._collectives, self._size(entries)
            ends = ranks.replicas, ranks.replica, self._repeats, self._device
            passes = self._passes.BlockExchange(slices, self._code, size, *ends)
        self._chunks.append(CodedChunk(slices, entries, passes, {}))
        return self._chunks[-1]

    def start(
        self,
        chunk: CodedChunk,
        encodes: bool,
        first: Tensors | None = None,
        applied: Tensor | None = None,
        errors_elsewhere: bool = False,
    ) -> SentChunk:
        """Start the exchange of a chunk. Collective.

        Args:
            encodes: Send messages of the code; otherwise values in FP32, which leaves no errors.
            first: The first list, whose addresses are bound already; None for the one that was set.
            applied: Argument of `finish`, if it is known already: without `subtracts` the first pass then stores the
                quantization errors, and the second one does not compute them again.
            errors_elsewhere: See `BlockExchange.encode`.
        """
        if not encodes or chunk.passes is None:
            return self._start_in_buffer(chunk, self._lists[FIRST] if first is None else first, encodes)
        passes, known = chunk.passes, applied if self._table.has(SECOND) and not self._subtracts else None
        sent = passes.encode(self._table, self._subtracts, self._factor, known, errors_elsewhere)
        handle = self._collectives.all_reduce_messages(
            sent.messages, sent.means, passes.count, passes.code, sent.error, sent.adds_error
        )
        return SentChunk(handle, chunk, sent)

    def finish(self, sent: SentChunk, applied: Tensor) -> None:
        """Store the results of an exchange if `applied`, bool (); the first list becomes the mean in any case.

        Call it after waiting for the handle.
        """
        if sent.messages is None:
            self._finish_in_buffer(sent, applied)
            return
        record_streams(sent.messages.messages, sent.messages.means, sent.messages.error)
        sent.chunk.passes.apply(self._table, sent.messages, applied, self._subtracts, self._factor)

    def _start_in_buffer(self, chunk: CodedChunk, first: Tensors, encodes: bool) -> SentChunk:
        """Exchange a chunk through a buffer: the specification of the kernels, bitwise, for any number of levels."""
        second, owner_errors = self._lists.get(SECOND, ()), self._lists.get(OWNER_ERROR, ())
        codec = self._code if encodes else None
        values = self._gather(chunk, first)
        if self._subtracts:
            values.sub_(self._gather(chunk, second))
        else:
            if self._factor != 1.0:
                values.mul_(self._factor)
            if second:
                torch._foreach_add_(*self._views(chunk, values, second))
                self._fill(chunk, values)
        error = torch.empty_like(values) if second and codec is not None else None
        owner_error = self._gather(chunk, owner_errors) if owner_errors else None
        carried_error = None
        if owner_error is not None:
            if codec is not None:
                owned = self._owned(owner_error)
                carried_error = owned / owned.new_full((), self._collectives.replicas)  # as kernels divide
                owned.zero_()
            values.add_(owner_error)  # not zero if the owners or the bases were others before, or errors of nodes
        handle = self._collectives.all_reduce(values, codec=codec, error=error, carried_error=carried_error)
        return SentChunk(handle, chunk, None, first, values, error, owner_error, carried_error)

    def _finish_in_buffer(self, sent: SentChunk, applied: Tensor) -> None:
        _, chunk, _, first, values, error, owner_error, carried_error = sent
        assert values is not None
        record_streams(values, error, owner_error, carried_error)
        # With several levels, the error of a node's sum is one of the owner's errors.
        is_owners = self._subtracts and owner_error is not None and len(self._collectives.levels) > 1
        errors = None if is_owners else error
        if self._subtracts:
            shared = self._gather(chunk, first).sub_(values)
            self._store(chunk, first, shared, applied)
            self._store(chunk, self._lists[SECOND], shared if errors is None else shared.sub_(errors), applied)
        else:
            self._store(chunk, first, values)
            self._store(chunk, self._lists.get(SECOND, ()), errors, applied)
        if owner_error is not None:
            owner_error.copy_(error) if is_owners and error is not None else owner_error.zero_()
            if carried_error is not None:
                self._owned(owner_error).add_(carried_error.mul_(self._collectives.replicas))
            self._store(chunk, self._lists[OWNER_ERROR], owner_error, applied)

    def _owned(self, values: Tensor) -> Tensor:
        """Return the part of a buffer whose mean this replica encodes."""
        return values.view(self._collectives.replicas, -1)[self._collectives.replica]

    def _size(self, entries: int) -> int:
        return self._collectives.padded_size(entries, self._code)

    def _gather(self, chunk: CodedChunk, tensors: Tensors) -> Tensor:
        """Copy slices into a buffer, FP32 (n,), with zeros after the last block and for absent tensors."""
        size, present = self._size(chunk.entries), sum(s.length for s in chunk.slices if tensors[s.tensor] is not None)
        allocate = torch.empty if present == size else torch.zeros
        buffer = allocate(size, dtype=torch.float32, device=self._device)
        parts, views = self._views(chunk, buffer, tensors)
        if views:
            torch._foreach_copy_(parts, views)
        self._fill(chunk, buffer)
        return buffer

    def _fill(self, chunk: CodedChunk, buffer: Tensor) -> None:
        """Repeat the entries of shorter last blocks."""
        for s in chunk.slices if self._repeats else ():
            fill_last_block(buffer, s.start * self._block, s.length, self._block)

    def _store(self, chunk: CodedChunk, tensors: Tensors, values: Tensor | None, applied: Tensor | None = None) -> None:
        """Copy a buffer of `_gather`, or zeros, to the tensors, if `applied` or without it."""
        if not tensors:
            return
        if values is None:
            values = torch.zeros(self._size(chunk.entries), dtype=torch.float32, device=self._device)
        if applied is not None and self._subtracts and not applied.is_cpu:  # many short rows: few launches
            values, applied = torch.where(applied, values, self._gather(chunk, tensors)), None
        parts, views = self._views(chunk, values, tensors)
        if applied is not None:
            for part, view in zip(parts, views, strict=True):
                masked_copy_(view, part, applied)
        elif views:
            torch._foreach_copy_(views, parts)

    def _views(self, chunk: CodedChunk, buffer: Tensor, tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the buffer and of the tensors: of whole blocks, (blocks, block), and shorter last ones."""
        views = self._views_of(chunk, tensors)
        counts = [1 if is_short else length // self._block for _, length, is_short in _pieces(chunk, self._block)]
        blocks = buffer[: sum(counts) * self._block].view(-1, self._block).split(counts)
        parts = [
            part if view is None or view.ndim == 2 else part[0, : len(view)]
            for part, view in zip(blocks, views, strict=True)
        ]
        present = [(part, view) for part, view in zip(parts, views, strict=True) if view is not None]
        return [part for part, _ in present], [view for _, view in present]

    def _views_of(self, chunk: CodedChunk, tensors: Tensors) -> list[Tensor | None]:
        """Return the views of the tensors, of lists that were `set` the same ones: they take milliseconds."""
        key = next((kind for kind, each in self._lists.items() if each is tensors), None)
        views = chunk.views.get(key) if key is not None else None
        if views is None:
            views = []
            for s, length, is_short in _pieces(chunk, self._block):
                tensor, rows = tensors[s.tensor], length // self._block
                if tensor is None:
                    views.append(None)
                elif is_short:
                    first = s.first + (s.length // self._block) * s.stride
                    views.append(tensor.view(-1)[first : first + length])
                else:
                    offset = tensor.storage_offset() + s.first
                    views.append(tensor.as_strided((rows, self._block), (s.stride, 1), offset))
            if key is not None:
                chunk.views[key] = views
        return views


def _pieces(chunk: CodedChunk, block: int) -> Iterator[tuple[BlockSlice, int, bool]]:
    """Yield (slice, entries, whether it is a shorter last block) of the whole blocks and of the last one."""
    for s in chunk.slices:
        rest = s.length % block
        if s.length > rest:
            yield s, s.length - rest, False
        if rest:
            yield s, rest, True

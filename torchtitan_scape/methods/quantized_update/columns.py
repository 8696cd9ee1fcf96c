"""Passes of a step over tensors and messages: in PyTorch with a buffer for the rows of a column, or kernels without."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, StoredTensors
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.backends import exchange_passes
from torchtitan_scape.kernels.codec.reference import BlockCode, fill_last_block
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.common.tensors import divisor_of, record_streams
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice
from torchtitan_scape.methods.owned import Part
from torchtitan_scape.methods.quantized_update.layout import Column
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.partition import Slice
from torchtitan_scape.topology.stages import Handle


class SentGradients(NamedTuple):
    """The gradients of a column on their way to its owners.

    Attributes:
        handle: The collective.
        column: The column.
        code: Its code; None for FP32.
        factor, steps: As of `Columns.send_gradients`.
        messages: uint8 (owners, bytes); on several levels FP32 (owners, width), whose own row becomes the mean.
        received: uint8 (replicas, bytes), none if this replica is no owner; None on several levels.
        error: FP32 (owners, width), quantization errors that are not stored yet.
        is_stored: Whether the residuals are stored already.
    """

    handle: Handle
    column: Column
    code: BlockCode | None
    factor: float
    steps: int
    messages: Tensor
    received: Tensor | None
    error: Tensor | None
    is_stored: bool


class SentChange(NamedTuple):
    """The change of the weights of a column on its way to all replicas.

    Attributes:
        handle: The collective.
        column: The column.
        code: Its code; None for weights in FP32.
        message: uint8 (bytes,) of this replica, in memory as long as another stream may read it.
        received: uint8 (owners, bytes).
        weights: The tensors to change, one per shard.
    """

    handle: Handle
    column: Column
    code: BlockCode | None
    message: Tensor
    received: Tensor
    weights: Sequence[Tensor]


class Columns:
    """The passes in PyTorch, for all levels and codes: the reference of `KernelColumns`.

    Args:
        shards: All parameters of this rank.
        collectives: Communication with the other replicas.
        block: Entries that share the scales of a code.
        residuals: What each replica has not sent of its gradients, one tensor per shard.
        owned: By number of the shard, the part that this replica updates. Between two steps it contains the unsent
            update: the weights of all replicas minus those of the owner.

    Attributes:
        gradients, weights: The tensors of a step, one per shard, None for a gradient that does not exist yet. Empty
            between two steps.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        collectives: ReplicaCollectives,
        block: int,
        residuals: Sequence[Tensor],
        owned: Mapping[int, Part],
    ) -> None:
        self._collectives, self._block, self._device = collectives, block, residuals[0].device
        self._residuals, self._owned, self._stored = residuals, owned, StoredTensors(shards)
        self.gradients: Sequence[Tensor | None] = ()
        self.weights: Sequence[Tensor] = ()

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the passes inside use the present weights. Gradients are kept until the end."""
        self.weights = self._stored()
        try:
            yield
        finally:  # their memory is not kept
            self.gradients = self.weights = ()

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the next passes use these gradients, contiguous, FP32."""
        self.gradients = gradients

    def add_to_residuals(self, numbers: Sequence[int], factor: float, applied: Tensor) -> None:
        """Add the gradients of some shards, times `factor`, to their residuals, if `applied`, bool ()."""
        for i in numbers:
            residual = self._residuals[i].view(-1)
            gradient = _part(self.gradients, Slice(i, 0, residual.numel(), 0)) * factor
            residual.add_(gradient.masked_fill_(~applied, 0.0))

    def send_gradients(
        self, column: Column, code: BlockCode | None, factor: float, steps: int, applied: Tensor | None
    ) -> SentGradients:
        """Start sending gradient * factor + residual, encoded, to the owners of a column.

        Args:
            steps: Divisor of the mean.
            applied: As of `receive_mean`, if it is known already. During a backward pass it is not.
        """
        arguments = column, code, factor, steps
        if len(self._collectives.levels) > 1:
            rows = self._gradient_rows(column, factor)
            error = None if code is None else torch.empty_like(rows)
            flat_error = None if error is None else error.view(-1)
            handle = self._collectives.reduce_scatter(rows.view(-1), codec=code, error=flat_error)
            return SentGradients(handle, *arguments, rows, None, error, is_stored=False)
        messages, error = self._encode(column, code, factor, applied)
        handle, received = self._collectives.send_to_owners(messages, column.owners)
        return SentGradients(handle, *arguments, messages, received, error, is_stored=applied is not None)

    def receive_mean(self, sent: SentGradients, applied: Tensor) -> None:
        """Replace the gradients that this replica owns by the mean over replicas, divided by `steps`.

        The residuals become the quantization errors if `applied`, bool (). Call it after waiting for the handle.
        """
        record_streams(sent.messages, sent.received, sent.error)
        if not sent.is_stored:
            self._store_errors(sent, applied)
        if sent.received is None:
            self._store_row(sent.column, sent.messages[self._collectives.replica], sent.steps)
        elif len(sent.received):
            self._store_mean(sent.column, sent.code, sent.received, sent.steps)

    def _encode(
        self, column: Column, code: BlockCode | None, factor: float, applied: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the messages for the owners, uint8 (owners, bytes), and the errors unless `applied` is known.

        The errors, FP32 (owners, width), are stored as residuals then.
        """
        rows = self._gradient_rows(column, factor)
        error = None if code is None else torch.empty_like(rows)
        messages = rows.view(torch.uint8) if code is None else code.encode(rows, error)
        if applied is None:
            return messages, error
        self._keep_errors(column, error, applied)
        return messages, None

    def _store_errors(self, sent: SentGradients, applied: Tensor) -> None:
        self._keep_errors(sent.column, sent.error, applied)

    def _store_mean(self, column: Column, code: BlockCode | None, received: Tensor, steps: int) -> None:
        """Store the mean of messages, uint8 (replicas, bytes)."""
        row = torch.empty(column.width, dtype=torch.float32, device=self._device)
        if code is None:
            torch.sum(received.view(torch.float32), 0, out=row)
        else:
            code.decode_and_sum(received, row)
        self._store_row(column, row.div_(divisor_of(row, len(received))), steps)

    def _store_row(self, column: Column, row: Tensor, steps: int) -> None:
        divisor = divisor_of(row, steps)
        for s in column.slices[column.owners.index(self._collectives.replica)]:
            _part(self.gradients, s).copy_(row[s.at : s.at + s.length] / divisor)

    def begin_update(self, numbers: Sequence[int], applied: Tensor) -> None:
        """Replace the unsent updates of owned parts by the weights of the owner, if `applied`, bool ()."""
        for i in numbers:
            own = self._owned[i]
            masked_copy_(own.values, own.within(self.weights[i]) - own.values, applied)

    def change(self, column: Column, code: BlockCode | None, applied: Tensor) -> Tensor:
        """Encode what takes all replicas from their weights to those of the owner, nothing unless `applied`, bool ().

        The owned parts, which contain the weights of the owner, become the unsent updates, if `applied`. Without a code
        the message is the weights themselves.

        Returns:
            The message of this replica, uint8 (bytes,); (0,) if it owns nothing of the column.
        """
        if (own := self._own_row(column)) is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        slices, rows = column.slices[own], torch.zeros(1, column.width, dtype=torch.float32, device=self._device)
        for s in slices:
            view, own, weight = rows[0, s.at : s.at + s.length], self._of_owned(s), _part(self.weights, s)
            view.copy_(torch.where(applied, own, weight) if code is None else (own - weight).masked_fill_(~applied, 0))
            fill_last_block(rows[0], s.at, s.length, self._block)
        message, sent = rows.view(torch.uint8), rows
        if code is not None:
            message, sent = code.encode(rows), torch.empty_like(rows)
            code.decode(message, sent)
        for s in slices:
            moved, weight = sent[0, s.at : s.at + s.length], _part(self.weights, s)
            moved = (moved if code is None else weight + moved).to(weight.dtype).float()
            masked_copy_(self._of_owned(s), moved - self._of_owned(s), applied)
        return message.view(-1)

    def send_change(self, column: Column, code: BlockCode | None, message: Tensor) -> SentChange:
        """Start sending a result of `change` to all replicas."""
        size = 4 * column.width if code is None else code.message_bytes(column.width)
        handle, received = self._collectives.gather_from_owners(message, size, column.owners)
        return SentChange(handle, column, code, message, received, self.weights)

    def receive_change(self, sent: SentChange) -> None:
        """Change the weights, after waiting for the handle. Simulated replicas share one set of weights."""
        if self._collectives.is_writer:
            self._add(sent.weights, sent.column, sent.received, sent.code)

    def _add(self, weights: Sequence[Tensor], column: Column, messages: Tensor, code: BlockCode | None) -> None:
        if code is None:
            rows = messages.view(torch.float32)
        else:
            rows = torch.empty(len(messages), column.width, dtype=torch.float32, device=messages.device)
            code.decode(messages, rows)
        placed = [(s, row) for row, slices in zip(rows, column.slices, strict=True) for s in slices]
        parts = [row[s.at : s.at + s.length] for s, row in placed]
        change = torch._foreach_copy_ if code is None else torch._foreach_add_
        change([_part(weights, s) for s, _ in placed], parts)

    def _own_row(self, column: Column) -> int | None:
        """Return the row of this replica in a column, None if it owns none."""
        replica = self._collectives.replica
        return column.owners.index(replica) if replica in column.owners else None

    def _of_owned(self, s: Slice) -> Tensor:
        """Return the entries of a slice in the owned part of its tensor."""
        own = self._owned[s.tensor]
        return own.values.view(-1)[s.first - own.slice.first : s.first - own.slice.first + s.length]

    def _gradient_rows(self, column: Column, factor: float) -> Tensor:
        """Return gradient * factor + residual as FP32 (owners, width), with zeros as padding between blocks."""
        values = torch.zeros(len(column.slices), column.width, dtype=torch.float32, device=self._device)
        placed = [(s, row) for row, slices in zip(values, column.slices, strict=True) for s in slices]
        if views := [row[s.at : s.at + s.length] for s, row in placed]:
            torch._foreach_copy_(views, [_part(self.gradients, s) for s, _ in placed])
            if factor != 1.0:
                values.mul_(factor)
            torch._foreach_add_(views, [_part(self._residuals, s) for s, _ in placed])
        for s, row in placed:
            fill_last_block(row, s.at, s.length, self._block)
        return values

    def _keep_errors(self, column: Column, errors: Tensor | None, applied: Tensor) -> None:
        """Store FP32 (owners, width), or zeros, as the residuals of a column if `applied`, bool ()."""
        for i, s in ((i, s) for i, slices in enumerate(column.slices) for s in slices):
            error = 0.0 if errors is None else errors[i, s.at : s.at + s.length]
            masked_copy_(_part(self._residuals, s), error, applied)


class KernelColumns(Columns):
    """The passes as Triton kernels on the tensors themselves, one launch each, if values are encoded on one level.

    Args:
        passes: The module `kernels.exchange.triton_passes`.
        shards, collectives, block, residuals, owned: As of `Columns`.
    """

    def __init__(self, passes: Any, shards: Sequence[Shard], *arguments: Any) -> None:
        super().__init__(shards, *arguments)
        self._passes, self._sizes = passes, [shard.size for shard in shards]
        self._code = BlockCode("int8", self._block)  # of passes without messages, for its blocks
        self._exchanges: dict[Any, Any] = {}  # columns live as long as the method, so that their identities are keys
        tables = [AddressTable(LISTS, len(shards), self._device) for _ in range(3)]
        self._of_gradients, self._of_weights, self._of_owned_parts = tables
        self._of_gradients.set(SECOND, self._residuals)
        parts = [self._owned.get(i) for i in range(len(shards))]
        firsts = [part.slice.first if part else 0 for part in parts]
        self._of_owned_parts.set(SECOND, [part.values if part else None for part in parts], firsts)

    @contextmanager
    def bound(self) -> Iterator[None]:
        with super().bound():
            self._of_weights.set(FIRST, self.weights)
            self._of_owned_parts.set(FIRST, self.weights)
            yield

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        super().bind(gradients)
        self._of_gradients.set(FIRST, gradients)

    def add_to_residuals(self, numbers: Sequence[int], factor: float, applied: Tensor) -> None:
        rows = [Slice(i, 0, self._sizes[i], 0) for i in numbers]
        self._in_blocks(tuple(numbers), rows).accumulate(self._of_gradients, applied, factor)

    def _encode(
        self, column: Column, code: BlockCode | None, factor: float, applied: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if code is None:
            return super()._encode(column, code, factor, applied)
        sent = self._of_column(column, code).encode(self._of_gradients, False, factor=factor, applied=applied)
        return sent.messages, None

    def _store_errors(self, sent: SentGradients, applied: Tensor) -> None:
        if sent.code is None:
            super()._store_errors(sent, applied)
        else:
            passes = self._of_column(sent.column, sent.code)
            passes.keep_error(self._of_gradients, sent.messages, applied, sent.factor)

    def _store_mean(self, column: Column, code: BlockCode | None, received: Tensor, steps: int) -> None:
        if code is None or (own := self._own_row(column)) is None:
            super()._store_mean(column, code, received, steps)
        else:
            self._of_column(column, code, own).store_mean(self._of_gradients, received, steps)

    def begin_update(self, numbers: Sequence[int], applied: Tensor) -> None:
        rows = [self._owned[i].slice for i in numbers]
        self._in_blocks(("owned", *numbers), rows).subtract(self._of_owned_parts, applied)

    def change(self, column: Column, code: BlockCode | None, applied: Tensor) -> Tensor:
        if code is None or (own := self._own_row(column)) is None:
            return super().change(column, code, applied)
        sent = self._of_column(column, code, own).encode(self._of_owned_parts, True, applied=applied)
        return sent.messages.view(-1)

    def _add(self, weights: Sequence[Tensor], column: Column, messages: Tensor, code: BlockCode | None) -> None:
        if code is None:
            super()._add(weights, column, messages, code)
        else:
            self._of_column(column, code).add(self._of_weights, messages)

    def _of_column(self, column: Column, code: BlockCode, row: int | None = None) -> Any:
        """Return the `BlockExchange` of a column, or of one row of it."""
        rows = column.slices if row is None else column.slices[row : row + 1]
        return self._exchange((id(column), code.name, row is None), rows, column.width, code)

    def _in_blocks(self, key: Any, slices: Sequence[Slice]) -> Any:
        """Return the `BlockExchange` of slices whose messages are not used."""
        blocks = [-(-s.length // self._block) for s in slices]
        starts = accumulate(blocks, initial=0)
        row = [Slice(s.tensor, s.first, s.length, at * self._block) for s, at in zip(slices, starts, strict=False)]
        return self._exchange(key, [row], sum(blocks) * self._block, self._code)

    def _exchange(self, key: Any, rows: Sequence[Sequence[Slice]], width: int, code: BlockCode) -> Any:
        if key not in self._exchanges:
            placed = [(s, (i * width + s.at) // self._block) for i, row in enumerate(rows) for s in row]
            slices = [BlockSlice(s.tensor, s.first, s.length, self._block, start) for s, start in placed]
            arguments = slices, code, len(rows) * width, len(rows)
            self._exchanges[key] = self._passes.BlockExchange(*arguments, -1, True, self._device)
        return self._exchanges[key]


def _part(tensors: Sequence[Tensor | None], s: Slice) -> Tensor:
    tensor = tensors[s.tensor]
    assert tensor is not None
    return tensor.view(-1)[s.first : s.first + s.length]


def has_kernels(backend: str, collectives: ReplicaCollectives) -> bool:
    """Return whether `columns_of` returns `KernelColumns`, which need no buffers for values in a code."""
    return len(collectives.levels) == 1 and exchange_passes(backend, (torch.float32,)) is not None


def columns_of(backend: str, shards: Sequence[Shard], collectives: ReplicaCollectives, *arguments: Any) -> Columns:
    """Return `KernelColumns` on "triton" and one level, else `Columns`. Arguments are those of `Columns`."""
    if not has_kernels(backend, collectives):
        return Columns(shards, collectives, *arguments)
    return KernelColumns(exchange_passes(backend, (torch.float32,)), shards, collectives, *arguments)

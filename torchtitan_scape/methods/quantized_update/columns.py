"""Passes of a step over tensors and messages: in PyTorch with a buffer for the rows of a column, or kernels without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, StoredTensors
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.backends import exchange_passes
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice
from torchtitan_scape.methods.chunked import fill_last_block
from torchtitan_scape.methods.quantized_update.layout import Column, ExchangeGroup, OwnPart
from torchtitan_scape.topology.chunks import Exchange
from torchtitan_scape.topology.codecs import message_bytes
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.partition import Slice


class Columns:
    """The passes in PyTorch, for all levels and codes: the reference of `KernelColumns`.

    Args:
        shards: All parameters of this rank.
        collectives: Communication with the other replicas.
        block: Entries that share the scales of a code.
        residuals, unsent: The states of the method, FP32, one tensor per shard.

    Attributes:
        gradients, weights: The tensors of a step, one per shard; empty between two steps.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        collectives: ReplicaCollectives,
        block: int,
        residuals: Sequence[Tensor],
        unsent: Sequence[Tensor],
    ) -> None:
        self._collectives, self._block, self._device = collectives, block, residuals[0].device
        self._residuals, self._unsent, self._stored = residuals, unsent, StoredTensors(shards)
        self.gradients: Sequence[Tensor] = ()
        self.weights: Sequence[Tensor] = ()

    @contextmanager
    def bound(self, gradients: Sequence[Tensor]) -> Iterator[None]:
        """Let the passes inside use these gradients, contiguous, FP32."""
        self.gradients, self.weights = gradients, self._stored()
        try:
            yield
        finally:  # their memory is not kept
            self.gradients = self.weights = ()

    def add_to_residuals(self, numbers: Sequence[int], factor: float, applied: Tensor) -> None:
        """Add the gradients of some shards, times `factor`, to their residuals, if `applied`, bool ()."""
        for i in numbers:
            gradient = (self.gradients[i] * factor).masked_fill_(~applied, 0.0)
            self._residuals[i].add_(gradient.view(self._residuals[i].shape))

    def to_owners(self, column: Column, code: BlockCode | None, factor: float, steps: int, applied: Tensor) -> Exchange:
        """Start sending gradient * factor + residual, encoded, to the owners of a column.

        The returned function replaces the gradients that this replica owns by the mean over replicas, divided by
        `steps`. If `applied`, bool (), the residuals become the quantization errors.
        """
        if len(self._collectives.levels) == 1:
            handle, received = self._collectives.send_to_owners(
                self._encode(column, code, factor, applied), column.owners
            )
            return handle, partial(self._store_mean, column, code, received, steps)
        rows = self._rows(column.width, column.slices, self.gradients, self._residuals, factor)
        error = None if code is None else torch.empty_like(rows)
        flat_error = None if error is None else error.view(-1)
        handle = self._collectives.reduce_scatter(rows.view(-1), codec=code, error=flat_error)

        def finish() -> None:
            self._store_errors(self._residuals, column.slices, error, applied)
            self._store_row(column, rows[self._collectives.replica], steps)

        return handle, finish

    def _encode(self, column: Column, code: BlockCode | None, factor: float, applied: Tensor) -> Tensor:
        """Return the messages for the owners, uint8 (owners, bytes), and store the residuals."""
        rows = self._rows(column.width, column.slices, self.gradients, self._residuals, factor)
        error = None if code is None else torch.empty_like(rows)
        messages = rows.view(torch.uint8) if code is None else code.encode(rows, error)
        self._store_errors(self._residuals, column.slices, error, applied)
        return messages

    def _store_mean(self, column: Column, code: BlockCode | None, received: Tensor, steps: int) -> None:
        """Store the mean of messages, uint8 (replicas, bytes), or of none if this replica is no owner."""
        if len(received):
            row = torch.empty(column.width, dtype=torch.float32, device=self._device)
            if code is None:
                torch.sum(received.view(torch.float32), 0, out=row)
            else:
                code.decode_and_sum(received, row)
            self._store_row(column, row.div_(len(received)), steps)

    def _store_row(self, column: Column, row: Tensor, steps: int) -> None:
        for s in column.slices[column.owners.index(self._collectives.replica)]:
            _part(self.gradients, s).copy_(row[s.at : s.at + s.length] / steps)

    def begin_update(self, own: OwnPart, applied: Tensor) -> None:
        """Subtract the unsent updates from the weights of owned shards, and keep the weights of before in their place.

        Nothing changes unless `applied`, bool ().
        """
        for i in own.tensors:
            before = self.weights[i].clone()
            masked_copy_(self.weights[i], before - self._unsent[i], applied)
            masked_copy_(self._unsent[i], before, applied)

    def end_update(self, group: ExchangeGroup, own: OwnPart, code: BlockCode | None, applied: Tensor) -> list[Tensor]:
        """Encode the changes of the weights since `begin_update`, zeros unless `applied`, and undo them.

        The unsent updates become the quantization errors.

        Returns:
            The messages of this replica by column, uint8 (bytes,); (0,) where it owns nothing.
        """
        messages = [self._message(column, code, applied) for column in group.columns]
        for s in own.others:
            masked_copy_(_part(self.weights, s), _part(self._unsent, s), applied)
            masked_copy_(_part(self._unsent, s), 0.0, applied)
        return messages

    def _message(self, column: Column, code: BlockCode | None, applied: Tensor) -> Tensor:
        if (own := self._own_row(column)) is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        slices = column.slices[own]
        row = self._rows(column.width, [slices], self.weights, self._unsent, 1.0, -1.0).masked_fill_(~applied, 0.0)
        error = None if code is None else torch.empty_like(row)
        message = row.view(torch.uint8) if code is None else code.encode(row, error)
        for s in slices:
            masked_copy_(_part(self.weights, s), _part(self._unsent, s), applied)
        self._store_errors(self._unsent, [slices], None if error is None else 0.0 - error, applied)
        return message.view(-1)

    def to_replicas(self, column: Column, message: Tensor, code: BlockCode | None) -> Exchange:
        """Start sending the messages of `end_update` to all replicas; the returned function adds them to the weights.

        Simulated replicas share one set of weights.
        """
        size = message_bytes(column.width, code)
        handle, messages = self._collectives.gather_from_owners(message, size, column.owners)
        return handle, partial(self._add, column, messages, code) if self._collectives.is_writer else _nothing

    def _add(self, column: Column, messages: Tensor, code: BlockCode | None) -> None:
        if code is None:
            rows = messages.view(torch.float32)
        else:
            rows = torch.empty(len(messages), column.width, dtype=torch.float32, device=messages.device)
            code.decode(messages, rows)
        placed = [(s, row) for row, slices in zip(rows, column.slices, strict=True) for s in slices]
        parts = [row[s.at : s.at + s.length] for s, row in placed]
        torch._foreach_add_([_part(self.weights, s) for s, _ in placed], parts)

    def _own_row(self, column: Column) -> int | None:
        """Return the row of this replica in a column, None if it owns none."""
        replica = self._collectives.replica
        return column.owners.index(replica) if replica in column.owners else None

    def _rows(
        self,
        width: int,
        rows: Sequence[Sequence[Slice]],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        factor: float,
        sign: float = 1.0,
    ) -> Tensor:
        """Return first * factor + sign * second as FP32 (rows, width), with zeros as padding between blocks."""
        values = torch.zeros(len(rows), width, dtype=torch.float32, device=self._device)
        placed = [(s, row) for row, slices in zip(values, rows, strict=True) for s in slices]
        if views := [row[s.at : s.at + s.length] for s, row in placed]:
            torch._foreach_copy_(views, [_part(first, s) for s, _ in placed])
            if factor != 1.0:
                values.mul_(factor)
            torch._foreach_add_(views, [_part(second, s) for s, _ in placed], alpha=sign)
        for s, row in placed:
            fill_last_block(row, s, self._block)
        return values

    def _store_errors(
        self, states: Sequence[Tensor], rows: Sequence[Sequence[Slice]], errors: Tensor | None, applied: Tensor
    ) -> None:
        for i, s in ((i, s) for i, slices in enumerate(rows) for s in slices):
            masked_copy_(_part(states, s), 0.0 if errors is None else errors[i, s.at : s.at + s.length], applied)


class KernelColumns(Columns):
    """The passes as Triton kernels on the tensors themselves, one launch each, if values are encoded on one level.

    Args:
        passes: The module `kernels.exchange.triton_passes`.
        shards, collectives, block, residuals, unsent: As of `Columns`.
    """

    def __init__(self, passes: Any, shards: Sequence[Shard], *arguments: Any) -> None:
        super().__init__(shards, *arguments)
        self._passes, self._sizes = passes, [shard.size for shard in shards]
        self._code = BlockCode("int8", self._block)  # of passes without messages, for its blocks
        self._exchanges: dict[Any, Any] = {}  # columns live as long as the method, so that their identities are keys
        self._of_gradients, self._of_weights = (AddressTable(LISTS, len(shards), self._device) for _ in range(2))
        self._of_gradients.set(SECOND, self._residuals)
        self._of_weights.set(SECOND, self._unsent)

    @contextmanager
    def bound(self, gradients: Sequence[Tensor]) -> Iterator[None]:
        with super().bound(gradients):
            self._of_gradients.set(FIRST, gradients)
            self._of_weights.set(FIRST, self.weights)
            yield

    def add_to_residuals(self, numbers: Sequence[int], factor: float, applied: Tensor) -> None:
        self._whole(numbers).accumulate(self._of_gradients, applied, factor)

    def _encode(self, column: Column, code: BlockCode | None, factor: float, applied: Tensor) -> Tensor:
        if code is None:
            return super()._encode(column, code, factor, applied)
        sent = self._of_column(column, code).encode(self._of_gradients, False, factor=factor, applied=applied)
        return sent.messages

    def _store_mean(self, column: Column, code: BlockCode | None, received: Tensor, steps: int) -> None:
        if code is None or (own := self._own_row(column)) is None:
            super()._store_mean(column, code, received, steps)
        else:
            self._of_column(column, code, own).store_mean(self._of_gradients, received, steps)

    def begin_update(self, own: OwnPart, applied: Tensor) -> None:
        self._whole(own.tensors).swap(self._of_weights, applied)

    def _message(self, column: Column, code: BlockCode | None, applied: Tensor) -> Tensor:
        if code is None or (own := self._own_row(column)) is None:
            return super()._message(column, code, applied)
        sent = self._of_column(column, code, own).encode(self._of_weights, True, applied=applied)
        return sent.messages.view(-1)

    def _add(self, column: Column, messages: Tensor, code: BlockCode | None) -> None:
        if code is None:
            super()._add(column, messages, code)
        else:
            self._of_column(column, code).add(self._of_weights, messages)

    def _of_column(self, column: Column, code: BlockCode, row: int | None = None) -> Any:
        """Return the `BlockExchange` of a column, or of one row of it."""
        rows = column.slices if row is None else column.slices[row : row + 1]
        return self._exchange((id(column), code.name, row is None), rows, column.width, code)

    def _whole(self, numbers: Sequence[int]) -> Any:
        """Return the `BlockExchange` of whole shards, whose messages are not used."""
        blocks = [-(-self._sizes[i] // self._block) for i in numbers]
        starts = accumulate(blocks, initial=0)
        row = [Slice(i, 0, self._sizes[i], at * self._block) for i, at in zip(numbers, starts, strict=False)]
        return self._exchange(tuple(numbers), [row], sum(blocks) * self._block, self._code)

    def _exchange(self, key: Any, rows: Sequence[Sequence[Slice]], width: int, code: BlockCode) -> Any:
        if key not in self._exchanges:
            placed = [(s, (i * width + s.at) // self._block) for i, row in enumerate(rows) for s in row]
            slices = [BlockSlice(s.tensor, s.first, s.length, self._block, start) for s, start in placed]
            arguments = slices, code, len(rows) * width, len(rows)
            self._exchanges[key] = self._passes.BlockExchange(*arguments, -1, True, self._device)
        return self._exchanges[key]


def _part(tensors: Sequence[Tensor], s: Slice) -> Tensor:
    return tensors[s.tensor].view(-1)[s.first : s.first + s.length]


def _nothing() -> None:
    """Store nothing."""


def columns_of(backend: str, shards: Sequence[Shard], collectives: ReplicaCollectives, *arguments: Any) -> Columns:
    """Return `KernelColumns` on "triton" and one level, else `Columns`. Arguments are those of `Columns`."""
    passes = exchange_passes(backend, (torch.float32,)) if len(collectives.levels) == 1 else None
    if passes is None:
        return Columns(shards, collectives, *arguments)
    return KernelColumns(passes, shards, collectives, *arguments)

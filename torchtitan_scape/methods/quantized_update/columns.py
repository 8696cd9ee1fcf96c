"""Columns of the exchange between the tensors and their messages: through a buffer, or by kernels without one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice
from torchtitan_scape.methods.chunked import fill_last_block
from torchtitan_scape.methods.quantized_update.layout import Column
from torchtitan_scape.topology.codecs import Codec


def rows_of(
    column: Column,
    owners: Sequence[int],
    values: Sequence[Tensor] | Mapping[int, Tensor],
    block: int,
    device: torch.device,
) -> Tensor:
    """Return the rows of some owners in a column, FP32 (rows, width), with zeros as padding between blocks."""
    rows = torch.empty(len(owners), column.width, dtype=torch.float32, device=device)
    views, parts, gaps = [], [], []
    for row, owner in zip(rows, owners, strict=True):
        end = 0
        for s in column.slices[column.owners.index(owner)]:
            gaps.append(row[end : s.at])
            end = s.at + s.length
            views.append(row[s.at : end])
            parts.append(values[s.tensor][s.first : s.first + s.length])
        gaps.append(row[end:])
    if not views:
        return rows.zero_()
    torch._foreach_zero_(gaps)
    torch._foreach_copy_(views, parts)
    for row, owner in zip(rows, owners, strict=True):
        for s in column.slices[column.owners.index(owner)]:
            fill_last_block(row, s, block)
    return rows


def add_rows(column: Column, rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the rows of all owners in a column, FP32 (owners, width), to the tensors."""
    targets, parts = [], []
    for slices, row in zip(column.slices, rows, strict=True):
        for s in slices:
            targets.append(tensors[s.tensor][s.first : s.first + s.length])
            parts.append(row[s.at : s.at + s.length])
    torch._foreach_add_(targets, parts)


def decoded_rows(messages: Tensor, width: int, code: Codec | None) -> Tensor:
    """Return FP32 (messages, width) of uint8 (messages, bytes); code: None for the bytes of FP32 values."""
    if code is None:
        return messages.view(torch.float32)
    values = torch.empty(len(messages), width, dtype=torch.float32, device=messages.device)
    code.decode(messages, values)
    return values


class ColumnMessages:
    """The passes of an exchange in one direction.

    Args:
        passes: `kernels.backends.exchange_passes`.
        code: Code of the messages.
    """

    def __init__(self, passes: Any, code: BlockCode) -> None:
        self._passes, self._code = passes, code
        self._exchanges: dict[int, Any] = {}  # by the identity of a column, which lives as long as a method
        self._table: AddressTable | None = None

    def encode(
        self, column: Column, values: Sequence[Tensor], residuals: Sequence[Tensor], factor: float, applied: Tensor
    ) -> Tensor:
        """Return the messages of the owners, uint8 (owners, bytes), of value * factor + residual.

        If `applied`, bool (), the residuals become the quantization errors.
        """
        exchange, tensors = self._exchange(column, values[0].device), self._tensors(values, residuals)
        messages: Tensor = exchange.encode(tensors, subtracts=False, factor=factor, applied=applied).messages
        return messages

    def add(self, column: Column, values: Sequence[Tensor], messages: Tensor) -> None:
        """Add the owners' decoded messages to the tensors."""
        self._exchange(column, values[0].device).add(self._tensors(values), messages)

    def _tensors(self, first: Sequence[Tensor], second: Sequence[Tensor] = ()) -> AddressTable:
        if self._table is None:
            self._table = AddressTable(LISTS, len(first), first[0].device)
        self._table.set(FIRST, first)
        if second:
            self._table.set(SECOND, second)
        return self._table

    def _exchange(self, column: Column, device: torch.device) -> Any:
        if id(column) not in self._exchanges:
            block, owners = self._code.block_size, len(column.owners)
            slices = [
                BlockSlice(s.tensor, s.first, s.length, block, (i * column.width + s.at) // block)
                for i, row in enumerate(column.slices)
                for s in row
            ]
            size = owners * column.width
            self._exchanges[id(column)] = self._passes.BlockExchange(
                slices,
                self._code,
                size,
                owners,
                -1,
                True,
                device,  # no owner keeps an error of its own
            )
        return self._exchanges[id(column)]

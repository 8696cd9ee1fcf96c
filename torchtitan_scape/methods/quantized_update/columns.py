"""Columns of the exchange between the tensors and their messages: through a buffer, or by kernels without one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.exchange.layout import BlockSlices
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
        self._plans: dict[int, Any] = {}  # lists of tiles, by the identity of a column, which lives as long as a method

    def encode(
        self, column: Column, values: Sequence[Tensor], residuals: Sequence[Tensor], factor: float, applied: Tensor
    ) -> Tensor:
        """Return the messages of the owners, uint8 (owners, bytes), of value * factor + residual.

        If `applied`, bool (), the residuals become the quantization errors.
        """
        slices = self._slices(column, values, residuals)
        messages: Tensor = self._passes.encode(slices, subtracts=False, factor=factor, applied=applied).messages
        self._plans[id(column)] = slices.plan
        return messages

    def add(self, column: Column, values: Sequence[Tensor], messages: Tensor) -> None:
        """Add the owners' decoded messages to the tensors."""
        slices = self._slices(column, values)
        self._passes.add(slices, messages)
        self._plans[id(column)] = slices.plan

    def _slices(self, column: Column, first: Sequence[Tensor], second: Sequence[Tensor] = ()) -> BlockSlices:
        placed = [(i * column.width + s.at, s) for i, row in enumerate(column.slices) for s in row]
        parts = [[each[s.tensor][s.first : s.first + s.length] for _, s in placed] for each in (first, second) if each]
        return BlockSlices(
            parts[0],
            parts[1] if len(parts) > 1 else (),
            self._code,
            len(column.owners) * column.width,
            len(column.owners),
            replica=-1,  # no owner keeps an error of its own
            starts=[at // self._code.block_size for at, _ in placed],
            repeats=True,
            plan=self._plans.get(id(column)),
        )

"""Messages of the shard axis: the code of a row of an FSDP2 flat buffer, and the exchange of messages.

A message is the code of one row of an FSDP2 flat buffer. It contains the block codes of all quantized slices, then
their scales, then the raw slices, each part padded to 16 bytes. A block spans neither two parameters nor two rows: in
the message, every quantized slice is zero-padded to whole blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.sharding.base import (
    GRADIENTS,
    ParameterSlice,
    add_rows,
    entries,
)
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger

CPU_ENTRIES = 1 << 22  # decoded together on a CPU: many short rows, or one long row

Parts = tuple[Tensor, Tensor]
"""The two parts of rows: the quantized part, FP32 (..., q), padded to whole blocks, and the raw part, (..., r)."""


class RowCodec:
    """Codec between rows, (..., m), and messages. All rows are processed at once, so that the number of launches does
    not depend on the number of ranks.

    1-dimensional parameters (norms, biases) are always sent raw, because their magnitudes differ from those of
    matrices.

    Args:
        slices: Slices of the row, in order.
        code: Block code of the parameters with 2 or more dimensions; None to send everything raw.
        hadamard: Apply a Hadamard transform to every 32 entries before encoding; `assemble` inverts it.
    """

    def __init__(self, slices: Sequence[ParameterSlice], code: BlockCode | None = None, hadamard: bool = False) -> None:
        self.code, self._hadamard, self._row = code, hadamard, entries(slices)
        block_size = code.block_size if code else 1
        self._coded: list[tuple[int, int, int, int]] = []  # offsets in the row and in the coded part, size, padded size
        self._raw: list[tuple[int, int]] = []  # offset in the row, size
        self.coded_entries = 0
        for slice_ in (slice_ for slice_ in slices if slice_.size):
            if code is not None and slice_.dims > 1:
                padded_size = -(-slice_.size // block_size) * block_size
                self._coded.append((slice_.start, self.coded_entries, slice_.size, padded_size))
                self.coded_entries += padded_size
            elif self._raw and sum(self._raw[-1]) == slice_.start:
                self._raw[-1] = self._raw[-1][0], self._raw[-1][1] + slice_.size
            else:
                self._raw.append((slice_.start, slice_.size))
        self.raw_entries = sum(size for _, size in self._raw)
        self._coded_bytes = code.message_bytes(self.coded_entries) if code else 0

    def message_bytes(self, dtype: torch.dtype) -> int:
        """Return the size in bytes of the message of a row of this dtype."""
        return self._coded_bytes + padded_bytes(self.raw_entries * dtype.itemsize)

    def split(self, row: Tensor) -> Parts:
        """Return the parts of rows (..., m). The raw part may be a view of the rows."""
        coded = torch.empty(*row.shape[:-1], self.coded_entries, dtype=torch.float32, device=row.device)
        if self._coded:
            torch._foreach_copy_(
                [coded[..., at : at + size] for _, at, size, _ in self._coded],
                [row[..., start : start + size] for start, _, size, _ in self._coded],
            )
            for _, at, size, padded_size in self._coded:
                if padded_size > size:
                    coded[..., at + size : at + padded_size].zero_()
            self._transform(coded)
        if self.raw_entries == self._row:
            return coded, row
        return coded, torch.cat([row[..., start : start + size] for start, size in self._raw] or [row[..., :0]], -1)

    def assemble(self, parts: Parts, row: Tensor) -> None:
        """Write the rows (..., m) that the parts represent. The parts may be overwritten."""
        coded, raw = parts
        targets = [row[..., start : start + size] for start, size in self._raw]
        sources = list(raw.split([size for _, size in self._raw], -1)) if self._raw else []
        if self._coded:
            self._transform(coded)
            targets += [row[..., start : start + size] for start, _, size, _ in self._coded]
            sources += [coded[..., at : at + size] for _, at, size, _ in self._coded]
        torch._foreach_copy_(targets, sources)

    def encoded(self, row: Tensor) -> Tensor:
        """Return the message of a row, uint8 (bytes,)."""
        message = torch.empty(self.message_bytes(row.dtype), dtype=torch.uint8, device=row.device)
        self.encode(self.split(row), message)
        return message

    def encode(self, parts: Parts, message: Tensor) -> None:
        """Encode the parts into `message`, uint8 (..., message_bytes(dtype of the raw part))."""
        coded, raw = parts
        at = self._coded_bytes
        if self.code is not None and coded.numel():
            encoded = self.code.encode(coded.reshape(-1, self.coded_entries))
            message[..., :at] = encoded.view(message[..., :at].shape)
        end = at + raw.shape[-1] * raw.itemsize
        if raw.numel():
            message[..., at:end] = raw.contiguous().view(torch.uint8)
        message[..., end:].zero_()

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Parts:
        """Decode messages (..., bytes), whose raw part has the given dtype."""
        coded = torch.empty(*messages.shape[:-1], self.coded_entries, dtype=torch.float32, device=messages.device)
        if self.code is not None and coded.numel():
            codes = messages[..., : self._coded_bytes]
            self.code.decode(codes if codes.ndim > 1 else codes[None], coded.view(-1, self.coded_entries))
        return coded, self._raw_of(messages, dtype)

    def unpack(self, messages: Tensor, rows: Tensor) -> None:
        """Decode messages (k, bytes) into `rows` (k, m). On a CPU in parts, which take less memory."""
        together = max(1, CPU_ENTRIES // max(1, self._row)) if messages.is_cpu else max(1, len(messages))
        for some, targets in zip(messages.split(together), rows.split(together), strict=True):
            self.assemble(self.decode(some, rows.dtype), targets)

    def decode_and_sum(self, messages: Tensor) -> Parts:
        """Return the FP32 sums of messages (k, ..., bytes) over k, in row order; their raw part is FP32."""
        several = messages.shape[1:-1]
        coded = torch.empty(*several, self.coded_entries, dtype=torch.float32, device=messages.device)
        if self.code is not None and coded.numel():
            self.code.decode_and_sum(messages[..., : self._coded_bytes], coded)
        raw = torch.empty(*several, self.raw_entries, dtype=torch.float32, device=messages.device)
        if self.raw_entries:
            add_rows(self._raw_of(messages, torch.float32), raw)
        return coded, raw

    def _raw_of(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        at = self._coded_bytes
        return messages[..., at : at + self.raw_entries * dtype.itemsize].view(dtype)

    def _transform(self, coded: Tensor) -> None:
        if self._hadamard and self.code is not None:
            self.code.hadamard_(coded)


def hop(parts: Parts, rank_group: RankGroup, rows: RowCodec, ledger: ShardLedger) -> Parts:
    """Exchange gradients over one rank group and return the sums of the rows addressed to this rank, in rank order.

    Args:
        parts: Parts of the rows to send, (receiving rank, index of the row, entries).
        rank_group: The rank group.
        rows: Codec of the messages. Codes are never summed.
        ledger: Byte ledger.

    Returns:
        The parts of the sums, (index of the row, entries).
    """
    ranks, count = parts[0].shape[:2]
    size = rows.message_bytes(torch.float32)
    messages = torch.empty(ranks, count, size, dtype=torch.uint8, device=parts[0].device)
    rows.encode(parts, messages)
    received = torch.empty_like(messages)
    shard_collectives.all_to_all(received.view(ranks, -1), messages.view(ranks, -1), rank_group, ledger, GRADIENTS)
    return rows.decode_and_sum(received)

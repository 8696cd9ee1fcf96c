"""A row of an FSDP2 flat as one message of bytes, and messages on their way over one or two groups of ranks.

A message has the block codes of all segments that are coded, all their scales, then what goes raw, each part padded to
16 bytes. A block never crosses a parameter,
nor a row: every coded segment is filled up with zeros to whole blocks, in the message only.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.codec.codes import BlockCode
from kernels.common.wire import padded_bytes
from topology import shard_collectives
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import ParameterSlice, add_rows, entries

Parts = tuple[Tensor, Tensor]
"""Of a row: what is coded, FP32 (q,), filled up to whole blocks, and what goes raw, (r,)."""


class RowCodec:
    """Rows, (m,) each, to messages and back.

    Args:
        segments: of the row, in their order.
        code: of those of 2 or more dimensions; None for messages that are raw throughout.
        turned: what is coded is turned by a Hadamard matrix, 32 entries at a time, before it is; `assemble` turns back.

    Norms and biases, of 1 dimension, always go raw: their entries are of another size than a matrix's.
    """

    def __init__(self, segments: Sequence[ParameterSlice], code: BlockCode | None = None, turned: bool = False) -> None:
        self.code, self._turned, self._row = code, turned, entries(segments)
        unit = code.block_size if code else 1
        self._coded: list[tuple[int, int, int, int]] = []  # place in the row and in what is coded, entries, filled up
        self._raw: list[tuple[int, int]] = []  # place in the row, entries
        self.coded_entries = 0
        for segment in (segment for segment in segments if segment.size):
            if code is not None and segment.dims > 1:
                filled = -(-segment.size // unit) * unit
                self._coded.append((segment.start, self.coded_entries, segment.size, filled))
                self.coded_entries += filled
            elif self._raw and sum(self._raw[-1]) == segment.start:
                self._raw[-1] = self._raw[-1][0], self._raw[-1][1] + segment.size
            else:
                self._raw.append((segment.start, segment.size))
        self.raw_entries = sum(size for _, size in self._raw)
        self._coded_bytes = code.message_bytes(self.coded_entries) if code else 0

    def message_bytes(self, dtype: torch.dtype) -> int:
        """Of a message of a row of this dtype."""
        return self._coded_bytes + padded_bytes(self.raw_entries * dtype.itemsize)

    def split(self, row: Tensor) -> Parts:
        """The parts of a row (m,); what is raw may be the row itself."""
        coded = torch.empty(self.coded_entries, dtype=torch.float32, device=row.device)
        if self._coded:
            torch._foreach_copy_(
                [coded[at : at + size] for _, at, size, _ in self._coded],
                [row[start : start + size] for start, _, size, _ in self._coded],
            )
            for _, at, size, filled in self._coded:
                if filled > size:
                    coded[at + size : at + filled].zero_()
            self._turn(coded)
        if self.raw_entries == self._row:
            return coded, row
        return coded, torch.cat([row[start : start + size] for start, size in self._raw] or [row[:0]])

    def assemble(self, parts: Parts, row: Tensor) -> None:
        """row (m,) becomes what the parts, which may be overwritten, say."""
        coded, raw = parts
        targets = [row[start : start + size] for start, size in self._raw]
        sources = list(raw.split([size for _, size in self._raw])) if self._raw else []
        if self._coded:
            self._turn(coded)
            targets += [row[start : start + size] for start, _, size, _ in self._coded]
            sources += [coded[at : at + size] for _, at, size, _ in self._coded]
        torch._foreach_copy_(targets, sources)

    def encode(self, parts: Parts, message: Tensor, key: int | None = None) -> None:
        """message, uint8 (bytes_of(raw's dtype),), becomes that of the parts. key: of stochastic rounding."""
        coded, raw = parts
        at = self._coded_bytes
        if self.code is not None and coded.numel():
            message[:at] = self.code.encode(coded.view(1, -1), key=key).view(-1)
        end = at + raw.nbytes
        message[at:end] = raw.contiguous().view(torch.uint8)
        message[end:].zero_()

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Parts:
        """What a message (bytes,) says, or each of (k, bytes), what is raw being of this dtype."""
        coded = torch.empty(*messages.shape[:-1], self.coded_entries, dtype=torch.float32, device=messages.device)
        if self.code is not None and coded.numel():
            codes = messages[..., : self._coded_bytes]
            self.code.decode(codes if codes.ndim > 1 else codes[None], coded.view(-1, self.coded_entries))
        return coded, self._raw_of(messages, dtype)

    def unpack(self, messages: Iterable[Tensor], rows: Tensor) -> None:
        """rows (k, m) become what as many messages say. One after the other: decoded, a row takes 4 bytes an entry."""
        for message, row in zip(messages, rows, strict=True):
            self.assemble(self.decode(message, row.dtype), row)

    def decode_and_sum(self, messages: Tensor) -> Parts:
        """The sum of messages (k, bytes), in FP32 and in their order; what is raw there is FP32."""
        coded = torch.empty(self.coded_entries, dtype=torch.float32, device=messages.device)
        if self.code is not None and coded.numel():
            self.code.decode_and_sum(messages[:, : self._coded_bytes], coded)
        raw = torch.empty(self.raw_entries, dtype=torch.float32, device=messages.device)
        if self.raw_entries:
            add_rows(self._raw_of(messages, torch.float32), raw)
        return coded, raw

    def _raw_of(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        at = self._coded_bytes
        return messages[..., at : at + self.raw_entries * dtype.itemsize].view(dtype)

    def _turn(self, coded: Tensor) -> None:
        if self._turned and self.code is not None:
            self.code.hadamard_(coded)


def gather_between_nodes(own: Tensor, rank_groups: Sequence[RankGroup], ledger: ShardLedger, kind: str) -> Tensor:
    """All-gather `own` over the outermost of the groups. Returns uint8 (ranks of that group, bytes)."""
    outermost = rank_groups[-1]
    output = torch.empty(outermost.size, own.numel(), dtype=own.dtype, device=own.device)
    shard_collectives.all_gather(output.view(-1), own, outermost, ledger, kind)
    return output


def gather_within_node(
    messages: Tensor, rank_groups: Sequence[RankGroup], ledger: ShardLedger, kind: str
) -> list[Tensor]:
    """All-gather within the node the messages that `gather_between_nodes` received. Returns all ranks' messages."""
    if len(rank_groups) == 1:
        return list(messages)
    inside = rank_groups[0]
    output = torch.empty(inside.size, *messages.shape, dtype=messages.dtype, device=messages.device)
    shard_collectives.all_gather(output.view(-1), messages.view(-1), inside, ledger, kind)
    return [output[member, node] for node in range(len(messages)) for member in range(inside.size)]


def sum_over(
    flat: Tensor,
    rank_groups: Sequence[RankGroup],
    rows: Sequence[RowCodec],
    ledger: ShardLedger,
    kind: str,
    key: Callable[[int, int], int | None],
) -> Parts:
    """This rank's parts of the sum over all ranks of `flat`, FP32 (S, m): a hop over each group, innermost first.

    In each, what is meant for a rank goes to it, which decodes and adds in the order of the ranks; no code is ever
    added to a code. rows: of the hops; all cut alike. key: of (hop, which of its messages).
    """
    inside, *across = rank_groups
    # The ranks of this one's place in other nodes get theirs by way of it.
    sums = hop(
        lambda member, node: rows[0].split(flat[node * inside.size + member]),
        flat.shape[0] // inside.size,
        inside,
        rows[0],
        flat.device,
        ledger,
        kind,
        partial(key, 0),
    )
    for rank_group, code in zip(across, rows[1:], strict=True):
        sums = hop(partial(_of, sums), 1, rank_group, code, flat.device, ledger, kind, partial(key, 1))
    (own,) = sums
    return own


def _of(sums: Sequence[Parts], node: int, _: int) -> Parts:
    return sums[node]


def hop(
    part: Callable[[int, int], Parts],
    count: int,
    rank_group: RankGroup,
    rows: RowCodec,
    device: torch.device,
    ledger: ShardLedger,
    kind: str,
    key: Callable[[int], int | None],
) -> list[Parts]:
    """The sums over a group of what each of its ranks has for this one. part: of (rank, which of its `count` rows)."""
    size = rows.message_bytes(torch.float32)
    messages = torch.empty(rank_group.size, count, size, dtype=torch.uint8, device=device)
    for member in range(rank_group.size):
        for number in range(count):
            rows.encode(part(member, number), messages[member, number], key(member * count + number))
    received = torch.empty_like(messages)
    shard_collectives.all_to_all(
        received.view(rank_group.size, -1), messages.view(rank_group.size, -1), rank_group, ledger, kind
    )
    return [rows.decode_and_sum(received[:, number]) for number in range(count)]

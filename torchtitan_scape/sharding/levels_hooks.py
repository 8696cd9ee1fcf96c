"""Collectives of three-level sharding, one object of each per parameter group of FSDP2.

Weights are sharded over w ranks, gradients over g, optimizer states over R = g * N. The parameters of a group form a
row on each of the w ranks. A row has two sections, the quantized one and the raw one, each divided into K = (g / w) * N
equal parts. Part k of both sections forms *slice* k of the row. A *node slice* consists of N consecutive slices: a rank
sums its gradients within the node. One rank among all updates each slice. In a buffer or a master, a slice is
contiguous, its quantized part first.

Source: arXiv 2501.04266, Section V, for the three degrees; the slices are this project's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.sharding.base import (
    UPDATE,
    CollectiveHook,
    ParameterSlice,
    ShardedParamGroup,
)
from torchtitan_scape.sharding.row_codec import Parts, RowCodec, hop
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class MasterSlice(NamedTuple):
    """Entries [start, stop) of a tensor's part of a row, stored from offset `at` of a row slice. Empty: three zeros."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Section:
    """One section of a row.

    Attributes:
        tensors: Indices of the tensors in the section.
        firsts: First entry of each tensor, a multiple of the block size.
        entries: Number of entries, with all padding.
    """

    tensors: tuple[int, ...]
    firsts: tuple[int, ...]
    entries: int

    @classmethod
    def of(cls, numbers: Sequence[int], sizes: Sequence[int], block: int, slice_count: int) -> "Section":
        firsts, end = [], 0
        for number in numbers:
            firsts.append(end)
            end += -(-sizes[number] // block) * block
        return cls(tuple(numbers), tuple(firsts), -(-end // (slice_count * block)) * slice_count * block)


class RowLayout:
    """Layout of a row in sections and slices.

    Args:
        sizes: Entries of each tensor in a row, FSDP2's padding included.
        coded: Whether each tensor is quantized.
        block: Entries that may share a scale. Every quantized tensor starts a block, and no slice boundary divides a
            block.
        pairs: Ranks of a node that hold the same row, g / w.
        nodes: Slices per node slice, N; 1 if a method of the replicate axis exchanges whole node slices.
    """

    def __init__(self, sizes: Sequence[int], coded: Sequence[bool], block: int, pairs: int, nodes: int) -> None:
        self.sizes, self.block, self.pairs, self.nodes = tuple(sizes), block, pairs, nodes
        self.slice_count = pairs * nodes
        numbers = range(len(sizes))
        self.coded = Section.of([i for i in numbers if coded[i]], sizes, block, self.slice_count)
        self.raw = Section.of([i for i in numbers if not coded[i]], sizes, 1, self.slice_count)
        # Entries of a slice: quantized, raw, and both.
        self.slice_coded, self.slice_raw = self.coded.entries // self.slice_count, self.raw.entries // self.slice_count
        self.slice_size = self.slice_coded + self.slice_raw

    def sections(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the zero-padded sections, FP32 (rows, coded.entries) and (rows, raw.entries), of (rows, n) of each
        tensor.
        """
        rows = len(tensors[0])
        sections = []
        for section in (self.coded, self.raw):
            values = torch.zeros(rows, section.entries, dtype=torch.float32, device=tensors[0].device)
            for number, first in zip(section.tensors, section.firsts, strict=True):
                values[:, first : first + tensors[number].shape[1]] = tensors[number]
            sections.append(values)
        return sections[0], sections[1]

    def tensors(self, coded: Tensor, raw: Tensor) -> list[Tensor]:
        """Return each tensor's entries (size,), as views of a row's sections (coded.entries,) and (raw.entries,)."""
        by_index: dict[int, Tensor] = {}
        for section, values in ((self.coded, coded), (self.raw, raw)):
            for number, first in zip(section.tensors, section.firsts, strict=True):
                by_index[number] = values[first : first + self.sizes[number]]
        return [by_index[number] for number in range(len(self.sizes))]

    def parts(self, row_slices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantized parts (n, slice_coded) and the raw parts (n, slice_raw) of row slices (n, slice_size),
        as views.
        """
        return row_slices[:, : self.slice_coded], row_slices[:, self.slice_coded :]

    def row_slice(self, tensors: Sequence[Tensor], slices: Sequence[MasterSlice]) -> Tensor:
        """Return a row slice, FP32 (slice_size,), of which `slices` has each flat tensor's part."""
        values = torch.zeros(self.slice_size, dtype=torch.float32, device=tensors[0].device)
        for part, tensor in zip(slices, tensors, strict=True):
            values[part.at : part.at + part.stop - part.start] = tensor[part.start : part.stop]
        return values

    def slices(self, index: int, sizes: Sequence[int]) -> list[MasterSlice]:
        """Return each tensor's part of one row slice.

        Args:
            index: Index of the row slice.
            sizes: Entries of each tensor on this rank, which may be fewer than in other rows.
        """
        slices = [MasterSlice(0, 0, 0)] * len(self.sizes)
        for section, length, at in ((self.coded, self.slice_coded, 0), (self.raw, self.slice_raw, self.slice_coded)):
            begin, end = index * length, (index + 1) * length
            for number, first in zip(section.tensors, section.firsts, strict=True):
                start, stop = max(begin, first), min(end, first + sizes[number])
                if start < stop:
                    slices[number] = MasterSlice(start - first, stop - first, at + start - begin)
        return slices


class SliceCodec(RowCodec):
    """Codec of `count` consecutive row slices. Without a code both parts are sent in their own dtype."""

    def __init__(self, layout: RowLayout, count: int, code: BlockCode | None) -> None:
        coded, raw = count * layout.slice_coded, count * layout.slice_raw
        super().__init__([ParameterSlice("coded", 0, coded, 2), ParameterSlice("raw", coded, raw, 1)], code)
        self._sizes = coded, raw

    def encode(self, parts: Parts, message: Tensor) -> None:
        if self.code is None:  # Without a code the message has only a raw part.
            parts = parts[0][..., :0], torch.cat(parts, -1)
        super().encode(parts, message)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Parts:
        return self._separate(super().decode(messages, dtype))

    def decode_and_sum(self, messages: Tensor) -> Parts:
        return self._separate(super().decode_and_sum(messages))

    def _separate(self, parts: Parts) -> Parts:
        if self.code is not None:
            return parts
        coded, raw = parts[1].split(self._sizes, -1)
        return coded, raw


@dataclass(eq=False)
class SliceReduceScatter(CollectiveHook):
    """Reduce-scatter of gradients to node slices, accumulated over the micro-batches of a step (Sections V-B and V-C).

    After every backward pass the flat buffer, (w, m), is encoded and exchanged over the g ranks of the node. The rank
    with index q in pair p receives node slice p of row q, sums the contributions in rank order and adds the sum to its
    FP32 buffer. FSDP2 keeps no gradient. Once per step the buffers are summed between nodes by a reduce-scatter, of
    which each rank keeps its row slice. The paper all-reduces and discards (N - 1) / N of the sums.

    Attributes:
        flat: The parameter group.
        layout: Layout of the row.
        ranks: Degree w over which FSDP2 shards.
        rank_group: All g ranks. The index of a rank is (index of its pair) * w + (index in the pair).
        code: Code of the messages; None for FP32. With INT4, every 32 quantized entries are Hadamard-transformed
            before the exchange and after the sum, which is possible because the transform is linear.
        ledger: Byte ledger.
        device: Device of the buffer.
        node_code: Code of the sum between nodes; None for FP32.
        buffer: FP32 (N, slice_size). Zero it after every step, including a skipped one, because it may contain NaN.
    """

    flat: ShardedParamGroup
    layout: RowLayout
    ranks: int
    rank_group: RankGroup
    code: BlockCode | None
    ledger: ShardLedger
    device: torch.device
    node_code: BlockCode | None = None
    buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self._hadamard = self.code if self.code is not None and self.code.name == "int4" else None
        self._codec = SliceCodec(layout, layout.nodes, self.code)
        self._node_codec = SliceCodec(layout, 1, self.node_code)
        self.buffer = torch.zeros(layout.nodes, layout.slice_size, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the gradients of a micro-batch to the buffer. `output_tensor` stays undefined, because its gradient is
        dropped.
        """
        self.flat.check_reduce(output_tensor, input_tensor, group, op, self.ranks)
        self._add(input_tensor.view(self.ranks, -1))

    @torch.no_grad()
    def hook(self, reduced: Tensor) -> None:
        """Handle FSDP2's all-reduce hook, the only one that FSDP2 calls if it shards over one rank."""
        self.flat.check_row(reduced)
        if reduced.is_cuda:
            # `reduced` was allocated on another stream. FSDP2 relies on the gradients, which are views of it, to keep
            # it alive until the end of the backward pass, but they are dropped here.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._add(reduced.view(1, -1))

    def across_nodes(self, nodes: RankGroup) -> Tensor:
        """Return the sum over nodes, in node order, FP32 (slice_size,). Collective."""
        if nodes.size == 1:
            return self.buffer[0]
        coded, raw = self.layout.parts(self.buffer)
        result = hop((coded[:, None], raw[:, None]), nodes, self._node_codec, self.ledger)
        if dist.get_backend() == "fake":
            return self.buffer[nodes.group_rank]  # The received bytes are not valid messages.
        return torch.cat(result, -1)[0]

    def _add(self, flat: Tensor) -> None:
        layout = self.layout
        coded, raw = layout.sections(flat.split(layout.sizes, 1))
        if self._hadamard is not None:
            self._hadamard.hadamard_(coded)
        # The sections are freed before messages are allocated.
        coded, raw = _by_rank(coded, self.rank_group)[:, None], _by_rank(raw, self.rank_group)[:, None]
        coded, raw = hop((coded, raw), self.rank_group, self._codec, self.ledger)
        if dist.get_backend() == "fake":
            return  # The received bytes are not valid messages.
        if self._hadamard is not None:
            self._hadamard.hadamard_(coded)
        for target, values in zip(layout.parts(self.buffer), (coded, raw), strict=True):
            target += values.reshape(target.shape)


def _by_rank(rows: Tensor, rank_group: RankGroup) -> Tensor:
    """Split rows (w, m) into equal parts and return (group size, n), ordered by receiving rank.

    Part p of row q is for rank p * w + q of the group.
    """
    parts = rank_group.size // len(rows)
    parts_by_row = rows.view(len(rows), parts, rows.shape[1] // parts)
    return parts_by_row.transpose(0, 1).reshape(rank_group.size, parts_by_row.shape[2])


@dataclass(eq=False)
class WeightAllGather:
    """Update of the weights, which all ranks hold, from the masters, one slice per rank (Section V-C).

    Each rank sends its updated slice to the other ranks of its row, between nodes and then over the pairs of a node.
    With a code it sends the difference between its master and the weights of all peers. All ranks add the same numbers
    to the same numbers, so weights stay bitwise equal. The rounding error is part of the next difference, which is
    error feedback without memory. Norms and biases are sent as FP32 values. Without a code the new values of all
    parameters are sent. The paper gathers new weights in FP16.

    Attributes:
        layout: Layout of the row.
        rank_groups: Rank groups: between nodes, if every node owns a slice, then over the pairs.
        code: Code of the differences; None sends values.
        dtype: Dtype of the values.
        ledger: Byte ledger.
    """

    layout: RowLayout
    rank_groups: Sequence[RankGroup]
    code: BlockCode | None
    dtype: torch.dtype
    ledger: ShardLedger

    @torch.no_grad()
    def __call__(
        self,
        master: Tensor,
        slices: Sequence[MasterSlice],
        weights: Sequence[Tensor],
        applied: Tensor | None,
        by_values: bool = False,
    ) -> None:
        """Update all weights of this rank's row. Collective.

        Args:
            master: FP32 (slice_size,), this rank's row slice.
            slices: The tensors' parts of it.
            weights: The tensors, flat.
            applied: bool (), whether the masters have changed; None for yes. If false, the weights stay unchanged.
            by_values: Send values also with a code, whatever the weights contained before.
        """
        code = None if by_values else self.code
        coded, raw = (part[0] for part in self.layout.parts(master[None]))
        if code is not None:
            coded = coded - self.layout.row_slice(weights, slices)[: len(coded)]
            if applied is not None:
                coded = torch.where(applied, coded, 0.0)
        gathered = self._gather((coded, raw), code)
        if dist.get_backend() == "fake":
            return  # The received bytes are not valid messages.
        for number, (weight, values) in enumerate(zip(weights, self.layout.tensors(*gathered), strict=True)):
            values = values[: len(weight)]
            if code is not None and number in self.layout.coded.tensors:
                weight.add_(values)
            else:
                weight.copy_(values)

    def _gather(self, parts: Parts, code: BlockCode | None) -> Parts:
        """All-gather the encoded slices. Return FP32 (coded.entries,) and (raw.entries,) of the row."""
        codec = SliceCodec(self.layout, 1, code)
        message = torch.empty(codec.message_bytes(self.dtype), dtype=torch.uint8, device=parts[1].device)
        codec.encode((parts[0].to(self.dtype), parts[1].to(self.dtype)), message)
        for rank_group in self.rank_groups:
            output = torch.empty(rank_group.size * message.numel(), dtype=torch.uint8, device=message.device)
            shard_collectives.all_gather(output, message, rank_group, self.ledger, UPDATE)
            message = output
        coded, raw = codec.decode(message.view(self.layout.slice_count, -1), self.dtype)
        return coded.reshape(-1).float(), raw.reshape(-1).float()

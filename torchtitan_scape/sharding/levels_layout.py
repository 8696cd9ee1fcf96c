"""Layout of three-level sharding: the entries of an FSDP2 group in rows and slices. Arithmetic and views, no
collectives.

Weights are sharded over w ranks, gradients over g, optimizer states over R = g * N. The parameters of a group form a
row on each of the w ranks. A row has two sections, the quantized one and the raw one, each divided into K = (g / w) * N
equal parts. Part k of both sections forms *slice* k of the row. A *node slice* consists of N consecutive slices: a rank
sums its gradients within the node. One rank among all updates each slice. In a buffer or a master, a slice is
contiguous, its quantized part first.

Source: arXiv 2501.04266, Section V, for the three degrees; the slices are this project's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
        self.node_slice_size = self.slice_size * nodes

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

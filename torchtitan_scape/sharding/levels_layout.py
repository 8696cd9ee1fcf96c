"""Three levels: where the entries of an FSDP group lie in rows, pieces and cuts. Arithmetic and views, no collective.

Weights are sharded over w ranks, gradients over g, the optimizer's states over R = g * N. A group's parameters make a
row on each of the w ranks. A row has two sections, what is coded and what goes raw, each of K = (g / w) * N equal
parts; part k of both is the row's *cut* k. A *piece* is N cuts that follow each other, of which a rank of a node sums
up the gradients; a *sub-piece* is one cut, which one rank of all updates. Where a rank keeps cuts, in a buffer or a
master, each lies in one stretch, its coded part first.

Source: arXiv 2501.04266, Section V, has the three degrees; the cuts are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class MasterSlice(NamedTuple):
    """Entries [start, stop) of a tensor's part of a row, which begin at `at` in a cut. Empty: three zeros."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Section:
    """tensors: their numbers. firsts: where each begins, at a multiple of the block. entries: with all padding."""

    tensors: tuple[int, ...]
    firsts: tuple[int, ...]
    entries: int

    @classmethod
    def of(cls, numbers: Sequence[int], sizes: Sequence[int], block: int, cuts: int) -> "Section":
        firsts, end = [], 0
        for number in numbers:
            firsts.append(end)
            end += -(-sizes[number] // block) * block
        return cls(tuple(numbers), tuple(firsts), -(-end // (cuts * block)) * cuts * block)


class RowLayout:
    """How a row lies in its sections and cuts.

    Args:
        sizes: entries that each tensor has in a row, FSDP's padding included.
        coded: whether each is coded.
        block: entries that may share a scale; every coded tensor begins a block, and no cut divides one.
        pairs: ranks of a node that hold the same row, g / w.
        nodes: cuts of a piece, N; 1 where a method of the replicate axis is given whole pieces.
    """

    def __init__(self, sizes: Sequence[int], coded: Sequence[bool], block: int, pairs: int, nodes: int) -> None:
        self.sizes, self.block, self.pairs, self.nodes = tuple(sizes), block, pairs, nodes
        self.cuts = pairs * nodes
        numbers = range(len(sizes))
        self.coded = Section.of([i for i in numbers if coded[i]], sizes, block, self.cuts)
        self.raw = Section.of([i for i in numbers if not coded[i]], sizes, 1, self.cuts)
        # Entries of a cut: coded, raw, and both.
        self.cut_coded, self.cut_raw = self.coded.entries // self.cuts, self.raw.entries // self.cuts
        self.sub_piece = self.cut_coded + self.cut_raw
        self.piece = self.sub_piece * nodes

    def sections(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """FP32 (rows, coded.entries) and (rows, raw.entries), of (rows, n) of each tensor; the padding is zeros."""
        rows = len(tensors[0])
        found = []
        for section in (self.coded, self.raw):
            values = torch.zeros(rows, section.entries, dtype=torch.float32, device=tensors[0].device)
            for number, first in zip(section.tensors, section.firsts, strict=True):
                values[:, first : first + tensors[number].shape[1]] = tensors[number]
            found.append(values)
        return found[0], found[1]

    def tensors(self, coded: Tensor, raw: Tensor) -> list[Tensor]:
        """Each tensor's (size,) of a row's sections, views of (coded.entries,) and (raw.entries,)."""
        found: dict[int, Tensor] = {}
        for section, values in ((self.coded, coded), (self.raw, raw)):
            for number, first in zip(section.tensors, section.firsts, strict=True):
                found[number] = values[first : first + self.sizes[number]]
        return [found[number] for number in range(len(self.sizes))]

    def parts(self, cuts: Tensor) -> tuple[Tensor, Tensor]:
        """Of (n, sub_piece) the coded parts (n, cut_coded) and the raw ones (n, cut_raw), as views."""
        return cuts[:, : self.cut_coded], cuts[:, self.cut_coded :]

    def slices(self, cut: int, sizes: Sequence[int]) -> list[MasterSlice]:
        """What each tensor has in a cut. sizes: its entries on this rank, which may be fewer than in other rows."""
        found = [MasterSlice(0, 0, 0)] * len(self.sizes)
        for section, length, at in ((self.coded, self.cut_coded, 0), (self.raw, self.cut_raw, self.cut_coded)):
            begin, end = cut * length, (cut + 1) * length
            for number, first in zip(section.tensors, section.firsts, strict=True):
                start, stop = max(begin, first), min(end, first + sizes[number])
                if start < stop:
                    found[number] = MasterSlice(start - first, stop - first, at + start - begin)
        return found

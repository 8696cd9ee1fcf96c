"""Who owns which entries in the sharded form of SCAPE. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kernels.common.wire import ALIGNED
from kernels.scape.blocks import BlockLayout

# FP32 entries: buffers and their parts begin aligned.
_ALIGNED = ALIGNED // 4
# So do rows on the wire, whose values may be BF16.
_ROW = ALIGNED // 2


@dataclass(frozen=True)
class OwnedSlice:
    """Entries [start, end) of a tensor; they all belong to one replica."""

    tensor: int
    start: int
    end: int
    owner: int


def slice_by_owner(tensors: BlockLayout) -> list[OwnedSlice]:
    """The sparsified tensors, cut where the replicas' runs end; in order."""
    return [OwnedSlice(i, *tensors.owned(i, r), r) for i in range(len(tensors.sizes)) for r in tensors.owners(i)]


def assign_owners(sizes: Sequence[int], replicas: int) -> list[OwnedSlice]:
    """Tensors that are sent whole, cut so that every replica owns as many entries (but the last); in order."""
    share = max(1, -(-sum(sizes) // (replicas * _ALIGNED)) * _ALIGNED)
    pieces, before = [], 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            owner = (before + start) // share
            end = min(size, (owner + 1) * share - before)
            pieces.append(OwnedSlice(tensor, start, end, owner))
            start = end
        before += size
    return pieces


@dataclass(frozen=True)
class Ownership:
    """Pieces as the passes see them: tensors of one owner each.

    tensors: the sparsified ones before they were cut; the pieces' blocks are numbered as theirs.
    sparse: pieces of these. whole: pieces of what is sent whole, numbers of tensors starting anew.
    """

    tensors: BlockLayout
    sparse: tuple[OwnedSlice, ...]
    whole: tuple[OwnedSlice, ...]

    @staticmethod
    def of(tensors: BlockLayout, whole_sizes: Sequence[int]) -> "Ownership":
        whole = assign_owners(whole_sizes, tensors.replicas)
        return Ownership(tensors, tuple(slice_by_owner(tensors)), tuple(whole))

    @cached_property
    def layout(self) -> BlockLayout:
        """The pieces' blocks; runs are those of the tensors."""
        sizes = tuple(piece.end - piece.start for piece in self.sparse)
        return BlockLayout(sizes, self.tensors.block_size, self.tensors.replicas)

    @cached_property
    def pieces(self) -> tuple[OwnedSlice, ...]:
        return self.sparse + self.whole

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each piece lies in its owner's buffers: blocks as in the run, then whole tensors, aligned."""
        size, run = self.tensors.block_size, self.tensors.run_blocks
        places = [(self.layout.first_block[i] - piece.owner * run) * size for i, piece in enumerate(self.sparse)]
        ends = [run * size] * self.tensors.replicas
        for piece in self.whole:
            places.append(ends[piece.owner])
            ends[piece.owner] += _aligned(piece.end - piece.start)
        return tuple(places)

    @cached_property
    def share(self) -> int:
        """Entries of the buffers that hold what a replica owns."""
        whole = [0] * self.tensors.replicas
        for piece in self.whole:
            whole[piece.owner] += _aligned(piece.end - piece.start)
        return self.tensors.run_blocks * self.tensors.block_size + max(whole)

    def rows(self, counts: Sequence[int], unit: int = 1) -> tuple[int, list[int]]:
        """The length of a payload's row, one an owner, and where each piece's entries start in the payload.

        unit: rows, and in them what is sent whole, begin at multiples of it.
        """
        ends = [0] * self.tensors.replicas
        places = []
        for i, (piece, count) in enumerate(zip(self.pieces, counts, strict=True)):
            if i == len(self.sparse):
                ends = [_aligned(end, unit) for end in ends]
            places.append(ends[piece.owner])
            ends[piece.owner] += count
        length = _aligned(_aligned(max(ends), _ROW), unit)
        return length, [piece.owner * length + at for piece, at in zip(self.pieces, places, strict=True)]


def _aligned(entries: int, unit: int = _ALIGNED) -> int:
    return -(-entries // unit) * unit

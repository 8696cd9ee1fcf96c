"""Assignment of entries to owners in SCAPE with sharded updates. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan_scape.kernels.common.alignment import ALIGNED_BYTES
from torchtitan_scape.kernels.scape.blocks import BlockLayout

# FP32 entries to which slices of a buffer are aligned.
_ALIGNED = ALIGNED_BYTES // 4
# Entries to which rows of a payload are aligned; its values may be BF16.
_ROW = ALIGNED_BYTES // 2


@dataclass(frozen=True)
class OwnedSlice:
    """Entries [start, end) of a tensor that one replica owns."""

    tensor: int
    start: int
    end: int
    owner: int


def slice_by_owner(tensors: BlockLayout) -> list[OwnedSlice]:
    """Split the sparsified tensors where the runs of the replicas end. Returns the slices in order."""
    return [OwnedSlice(i, *tensors.owned(i, r), r) for i in range(len(tensors.sizes)) for r in tensors.owners(i)]


def assign_owners(sizes: Sequence[int], replicas: int) -> list[OwnedSlice]:
    """Split the tensors that are not sparsified into equal shares, one per replica; the last may be shorter."""
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
    """Slices of tensors with one owner each, which the passes process as separate tensors.

    Attributes:
        tensors: Layout of the sparsified tensors before they were split. Slices have the same block numbers.
        sparse: Slices of the sparsified tensors.
        whole: Slices of the other tensors, whose indices start at zero.
    """

    tensors: BlockLayout
    sparse: tuple[OwnedSlice, ...]
    whole: tuple[OwnedSlice, ...]

    @staticmethod
    def of(tensors: BlockLayout, dense_sizes: Sequence[int]) -> "Ownership":
        whole = assign_owners(dense_sizes, tensors.replicas)
        return Ownership(tensors, tuple(slice_by_owner(tensors)), tuple(whole))

    @cached_property
    def layout(self) -> BlockLayout:
        """Blocks of the sparsified slices; the runs are those of the tensors."""
        sizes = tuple(piece.end - piece.start for piece in self.sparse)
        return BlockLayout(sizes, self.tensors.block_size, self.tensors.replicas)

    @cached_property
    def pieces(self) -> tuple[OwnedSlice, ...]:
        """All slices, the sparsified ones first."""
        return self.sparse + self.whole

    @cached_property
    def buffer_offsets(self) -> tuple[int, ...]:
        """First entry of each slice in its owner's buffers: blocks as in the run, then the other slices, aligned."""
        size, run = self.tensors.block_size, self.tensors.run_blocks
        offsets = [(self.layout.first_block[i] - piece.owner * run) * size for i, piece in enumerate(self.sparse)]
        ends = [run * size] * self.tensors.replicas
        for piece in self.whole:
            offsets.append(ends[piece.owner])
            ends[piece.owner] += _aligned(piece.end - piece.start)
        return tuple(offsets)

    @cached_property
    def share(self) -> int:
        """Entries of a buffer of a replica's owned entries."""
        whole = [0] * self.tensors.replicas
        for piece in self.whole:
            whole[piece.owner] += _aligned(piece.end - piece.start)
        return self.tensors.run_blocks * self.tensors.block_size + max(whole)

    def rows(self, counts: Sequence[int], multiple: int = 1) -> tuple[int, list[int]]:
        """Lay out a payload with one row per owner.

        Args:
            counts: Payload entries of each slice.
            multiple: Rows, and the slices that are not sparsified in them, begin at multiples of it.

        Returns:
            The length of a row, and the first payload entry of each slice.
        """
        ends = [0] * self.tensors.replicas
        offsets = []
        for i, (piece, count) in enumerate(zip(self.pieces, counts, strict=True)):
            if i == len(self.sparse):
                ends = [_aligned(end, multiple) for end in ends]
            offsets.append(ends[piece.owner])
            ends[piece.owner] += count
        length = _aligned(_aligned(max(ends), _ROW), multiple)
        return length, [piece.owner * length + at for piece, at in zip(self.pieces, offsets, strict=True)]


def _aligned(entries: int, multiple: int = _ALIGNED) -> int:
    return -(-entries // multiple) * multiple

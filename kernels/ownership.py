"""Who owns which entries in the sharded form of SCAPE ("gather"), and where their payload lies. Plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kernels.blocks import BlockLayout

# Buffers and their parts begin at multiples of 16 bytes.
_ALIGNED = 4


@dataclass(frozen=True)
class Piece:
    """Entries [start, end) of a tensor that one replica owns.

    at: where they lie in their owner's buffers of the size of its share.
    first, count: the mask's entries among them, as part of all of the tensor's.
    place: where these lie in the owner's row of the payload.
    """

    tensor: int
    start: int
    end: int
    at: int
    first: int
    count: int
    place: int


def deal(sizes: Sequence[int], replicas: int) -> list[tuple[int, int, int, int]]:
    """Tensors sent whole, cut so that every replica owns as many entries: (tensor, start, end, owner), in order."""
    share = max(1, -(-sum(sizes) // (replicas * _ALIGNED)) * _ALIGNED)
    cuts, before = [], 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size or size == start == 0:
            owner = min((before + start) // share, replicas - 1)
            end = min(size, (owner + 1) * share - before)
            cuts.append((tensor, start, end, owner))
            if size == 0:
                break
            start = end
        before += size
    return cuts


@dataclass(frozen=True)
class Ownership:
    """The runs of the sparsified tensors, and whole tensors that belong to one replica each.

    whole_sizes, owners: of the tensors behind the sparsified ones; owners ascend.
    """

    layout: BlockLayout
    selection: str
    whole_sizes: tuple[int, ...]
    owners: tuple[int, ...]

    @cached_property
    def share(self) -> int:
        """Entries of the buffers that hold a replica's share: its run, then its whole tensors, each aligned."""
        whole = [0] * self.layout.replicas
        for size, owner in zip(self.whole_sizes, self.owners, strict=True):
            whole[owner] += -(-size // _ALIGNED) * _ALIGNED
        return self.layout.run_blocks * self.layout.block_size + max(whole)

    def pieces(self, density: float) -> tuple[tuple[Piece, ...], ...]:
        """Of every replica, in the order of the tensors, for a mask of this density."""
        layout, size = self.layout, self.layout.block_size
        found: list[list[Piece]] = [[] for _ in range(layout.replicas)]
        places = [0] * layout.replicas
        for tensor in range(len(layout.sizes)):
            first = 0
            for owner in layout.owners(tensor):
                start, end = layout.owned(tensor, owner)
                count = layout.nnz_between(start, end, density, self.selection)
                at = (layout.first_block[tensor] - owner * layout.run_blocks) * size + start
                found[owner].append(Piece(tensor, start, end, at, first, count, places[owner]))
                first += count
                places[owner] += count
        ends = [layout.run_blocks * size] * layout.replicas
        for i, (whole, owner) in enumerate(zip(self.whole_sizes, self.owners, strict=True)):
            found[owner].append(Piece(len(layout.sizes) + i, 0, whole, ends[owner], 0, whole, places[owner]))
            ends[owner] += -(-whole // _ALIGNED) * _ALIGNED
            places[owner] += whole
        return tuple(tuple(own) for own in found)

    def segment(self, density: float) -> int:
        """Entries of a row of the payload: those of the replica that has most, aligned."""
        return -(-max(sum(piece.count for piece in own) for own in self.pieces(density)) // _ALIGNED) * _ALIGNED

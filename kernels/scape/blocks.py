"""Division of sparsified tensors into blocks, and of blocks into the runs that replicas own. Plain arithmetic.

With the sharded update, the owner of a run also owns its entries; `Ownership` divides the other tensors too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from torchtitan_scape.kernels.codec.formats import ALIGNED_BYTES, padded_bytes

if TYPE_CHECKING:
    from torch import Tensor

# FP32 entries to which slices of a buffer are aligned.
_ALIGNED = ALIGNED_BYTES // 4
# Entries to which rows of a payload are aligned; its values may be BF16.
_ROW = ALIGNED_BYTES // 2


def density_at(step: int, density: float, warmup_steps: int) -> float:
    """Return the density of a step: max(d, d^min(1, step / warmup_steps)) (SCAPE paper, Section V-B1).

    It decreases exponentially from 1 to d. `step` counts attempted steps from 1. `warmup_steps` = 0: no warm-up.
    """
    if warmup_steps == 0:
        return density
    return max(density, density ** min(1.0, step / warmup_steps))


def entries_per_block(density: float, block_size: int) -> int:
    """Return k = max(1, round(density * block_size)), rounded half to even in float64."""
    return max(1, round(density * block_size))


@dataclass(frozen=True)
class OffsetCode:
    """Elias-Fano code of the k ascending offsets of a block.

    References: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, "On the
    number of bits required to implement an associative memory", 1971. The low bits of all offsets are concatenated;
    the high parts are coded in unary: offset i sets bit (offset >> low) + i. There is no unary part if `low` covers all
    bits of an offset. All blocks have codes of the same whole number of bytes, so that each is decoded independently.
    At density 0.05 (51 of 1024) a code has 40 bytes (318 bits). There are 2^288.3 such sets, so that a code of fixed
    length needs at least 37 bytes; if 51 is only the mean, the entropy is 293 bits.

    Attributes:
        low: Low bits per offset.
        unary: Bits of the unary part, which comes first.
        nbytes: Bytes of a code, zero padding included.
    """

    low: int
    unary: int
    nbytes: int


@cache
def offset_code(k: int, block_size: int) -> OffsetCode:
    """Return the shortest code of k offsets in a block; among equally short ones, that with the fewest low bits."""

    def code(low: int) -> OffsetCode:
        highest = (block_size - 1) >> low
        unary = k + highest if highest else 0
        return OffsetCode(low, unary, -(-(unary + k * low) // 8))

    return min(map(code, range((block_size - 1).bit_length() + 1)), key=lambda c: c.nbytes)


def offset_bytes(blocks: int, k: int, block_size: int) -> int:
    """Return the bytes of the encoded in-block offsets of `blocks` blocks with k entries each."""
    return blocks * offset_code(k, block_size).nbytes


@dataclass
class Mask:
    """Packed mask of all sparsified tensors.

    Attributes:
        bits: uint8 (replicas * run_blocks * block_size / 8,).
        density: Density of the selection, which determines the number of set bits. At 1.0 all bits are set, and `bits`
            is not read.
    """

    bits: "Tensor"
    density: float = 1.0

    @property
    def dense(self) -> bool:
        return self.density >= 1.0


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of the sparsified tensors' local shards, which are concatenated, each padded to whole blocks.

    A run is ceil(blocks / replicas) consecutive blocks. Replica i owns run i; the last run may be shorter, and trailing
    runs may be empty. All replicas of a shard compute the same layout.

    Attributes:
        sizes: Entries of each shard.
        block_size: Entries of a block.
        replicas: Number of replicas.
    """

    sizes: tuple[int, ...]
    block_size: int
    replicas: int

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks of each tensor."""
        return tuple(-(-n // self.block_size) for n in self.sizes)

    @cached_property
    def first_block(self) -> tuple[int, ...]:
        """First block of each tensor."""
        return (0, *accumulate(self.blocks))[:-1]

    @cached_property
    def total_blocks(self) -> int:
        return sum(self.blocks)

    @cached_property
    def run_blocks(self) -> int:
        """Number of blocks of a full run. Exchanged masks are padded to it on every replica."""
        return -(-self.total_blocks // self.replicas)

    def owned(self, tensor: int, replica: int) -> tuple[int, int]:
        """Return the entries [start, end) of `tensor` in the run of `replica`; start == end if there are none."""
        first = self.first_block[tensor]
        start = max(first, replica * self.run_blocks)
        end = min(first + self.blocks[tensor], (replica + 1) * self.run_blocks)
        if end <= start:
            return 0, 0
        return (start - first) * self.block_size, min((end - first) * self.block_size, self.sizes[tensor])

    def owners(self, tensor: int) -> range:
        """Return the replicas that own entries of `tensor`."""
        first, blocks = self.first_block[tensor], self.blocks[tensor]
        return range(first // self.run_blocks, (first + blocks - 1) // self.run_blocks + 1) if blocks else range(0)

    def nnz(self, tensor: int, density: float, selection: str) -> int:
        """Return the exact number of entries of `tensor` in a mask of this density, without communication."""
        n = self.sizes[tensor]
        if density >= 1.0:
            return n
        if selection == "block":
            k = entries_per_block(density, self.block_size)
            full, tail = divmod(n, self.block_size)
            return full * k + min(k, tail)
        total = 0
        for replica in range(self.replicas):
            start, end = self.owned(tensor, replica)
            if end > start:
                total += max(1, round(density * (end - start)))
        return total

    def share(self, density: float) -> float:
        """Return the actual density of a mask that was selected in blocks."""
        tensors = range(len(self.sizes))
        return sum(self.nnz(i, density, "block") for i in tensors) / max(1, sum(self.sizes))

    def bits(self, mask: Mask, tensor: int) -> "Tensor | None":
        """Return the packed bits of one tensor's blocks; None if all are set."""
        if mask.dense:
            return None
        block_bytes = self.block_size // 8
        first = self.first_block[tensor] * block_bytes
        return mask.bits[first : first + self.blocks[tensor] * block_bytes]

    def entering(self, in_use: Mask, previous: Mask, tensor: int) -> "Tensor":
        """Return the packed bits of the entries of a tensor in A and not in P, two masks without all bits set."""
        used, held = self.bits(in_use, tensor), self.bits(previous, tensor)
        assert used is not None and held is not None
        return used & ~held

    def mask_bytes(self) -> int:
        """Return the bytes of a packed mask, including the padding of the last run."""
        return self.replicas * self.run_bytes

    def sends_offsets(self, density: float, selection: str) -> bool:
        """Return True if in-block offsets are shorter than the bitmap. The selection "tensor" supports only the bitmap.

        A single replica sends nothing, and uses the bitmap.
        """
        if selection != "block" or density >= 1.0 or self.replicas == 1:
            return False
        return self._offset_bytes(density) < self.run_bytes

    @property
    def run_bytes(self) -> int:
        """Bytes of a run in a packed mask."""
        return self.run_blocks * self.block_size // 8

    def selection_bytes(self, density: float, selection: str) -> int:
        """Return the bytes of one replica's encoded selection, without padding."""
        if density >= 1.0:
            return 0
        return self._offset_bytes(density) if self.sends_offsets(density, selection) else self.run_bytes

    def wire_bytes(self, density: float, selection: str) -> int:
        """Return the bytes of one replica's selection as it is sent, including zero padding."""
        return padded_bytes(self.selection_bytes(density, selection))

    def _offset_bytes(self, density: float) -> int:
        return offset_bytes(self.run_blocks, entries_per_block(density, self.block_size), self.block_size)


# -------------------------------------------------------------------------------------- sharded update


@dataclass(frozen=True)
class OwnedSlice:
    """Entries [start, end) of a tensor that one replica owns."""

    tensor: int
    start: int
    end: int
    owner: int


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
        """Split the sparsified tensors where the runs of the replicas end, and the others into equal shares."""
        owners = [(i, r) for i in range(len(tensors.sizes)) for r in tensors.owners(i)]
        sparse = [OwnedSlice(i, *tensors.owned(i, r), r) for i, r in owners]
        return Ownership(tensors, tuple(sparse), tuple(assign_owners(dense_sizes, tensors.replicas)))

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

    def row_entries(self, density: float, selection: str, multiple: int) -> int:
        """Return the entries, padding included, of the part of a payload that each owner receives; see `rows`."""
        counts = [self.layout.nnz(i, density, selection) for i in range(len(self.sparse))]
        return self.rows([*counts, *(piece.end - piece.start for piece in self.whole)], multiple)[0]

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

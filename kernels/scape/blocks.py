"""Division of sparsified tensors into blocks, and of blocks into the runs that replicas own. Plain arithmetic."""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from torchtitan_scape.kernels.common.alignment import padded_bytes

if TYPE_CHECKING:
    from torch import Tensor


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

"""How sparsified tensors are cut into blocks, and blocks into the runs that replicas own. Plain arithmetic."""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from kernels.common.wire import padded_bytes

if TYPE_CHECKING:
    from torch import Tensor


def density_at(step: int, density: float, warmup_steps: int) -> float:
    """d(step) = max(d, d^min(1, step / warmup_steps)): exponential from 1 to d (SCAPE paper, Section V-B1).

    `step` counts attempted steps from 1. No warm-up when `warmup_steps` is 0.
    """
    if warmup_steps == 0:
        return density
    return max(density, density ** min(1.0, step / warmup_steps))


def entries_per_block(density: float, block_size: int) -> int:
    """k = max(1, round(density * block_size)), rounded half to even in float64."""
    return max(1, round(density * block_size))


@dataclass(frozen=True)
class OffsetCode:
    """Where the parts of a block's code lie: `unary` bits, then `low` bits of each offset, zeros up to `nbytes` bytes.

    The code of Elias ("Efficient storage and retrieval by content and address of static files", 1974) and Fano ("On the
    number of bits required to implement an associative memory", 1971), of k ascending offsets: the low bits of each lie
    end to end, its high part in unary: the i-th sets bit (offset >> low) + i. Where the low bits are all of an offset,
    nothing is unary. A block's code has a whole number of bytes, the same for all, so that each is decoded on its own.
    At density 0.05 (51 of 1024) it takes 40 bytes (318 bits). There are 2^288.3 such sets, so no code of one length
    takes less than 37; where 51 is a mean only, the entropy is 293 bits.
    """

    low: int
    unary: int
    nbytes: int


@cache
def offset_code(k: int, block_size: int) -> OffsetCode:
    """The code of k offsets in a block in the fewest bytes; of those with the fewest low bits."""

    def code(low: int) -> OffsetCode:
        highest = (block_size - 1) >> low
        unary = k + highest if highest else 0
        return OffsetCode(low, unary, -(-(unary + k * low) // 8))

    return min(map(code, range((block_size - 1).bit_length() + 1)), key=lambda c: c.nbytes)


def offset_bytes(blocks: int, k: int, block_size: int) -> int:
    """Bytes of the coded in-block offsets of `blocks` blocks with k entries each."""
    return blocks * offset_code(k, block_size).nbytes


@dataclass
class Mask:
    """Packed bits over all blocks, uint8 (replicas * run_blocks * block_size / 8,).

    density: what it was selected at, so that its count is known; at 1.0 it is all ones and `bits` not read.
    """

    bits: "Tensor"
    density: float = 1.0

    @property
    def dense(self) -> bool:
        return self.density >= 1.0


@dataclass(frozen=True)
class BlockLayout:
    """The sparsified tensors' local shards stand end to end, each padded to whole blocks.

    sizes: entries of each shard. A run is ceil(blocks / replicas) blocks; replica i owns the i-th, the last
    may be shorter and trailing ones empty. Every replica of a shard computes the same layout.
    """

    sizes: tuple[int, ...]
    block_size: int
    replicas: int

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each tensor."""
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
        """Blocks of a full run, the same for every replica: exchanged masks are padded to it."""
        return -(-self.total_blocks // self.replicas)

    def owned(self, tensor: int, replica: int) -> tuple[int, int]:
        """The entries [start, end) of `tensor` that lie in the run of `replica`; start == end for none."""
        first = self.first_block[tensor]
        start = max(first, replica * self.run_blocks)
        end = min(first + self.blocks[tensor], (replica + 1) * self.run_blocks)
        if end <= start:
            return 0, 0
        return (start - first) * self.block_size, min((end - first) * self.block_size, self.sizes[tensor])

    def owners(self, tensor: int) -> range:
        """The replicas in whose runs entries of `tensor` lie."""
        first, blocks = self.first_block[tensor], self.blocks[tensor]
        return range(first // self.run_blocks, (first + blocks - 1) // self.run_blocks + 1) if blocks else range(0)

    def nnz(self, tensor: int, density: float, selection: str) -> int:
        """Entries of `tensor` that a mask of this density holds; exact, known without any communication."""
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
        """The density that a mask has in fact, selected in blocks."""
        tensors = range(len(self.sizes))
        return sum(self.nnz(i, density, "block") for i in tensors) / max(1, sum(self.sizes))

    def bits(self, mask: Mask, tensor: int) -> "Tensor | None":
        """The packed bits of one tensor's blocks; None for all ones."""
        if mask.dense:
            return None
        block_bytes = self.block_size // 8
        first = self.first_block[tensor] * block_bytes
        return mask.bits[first : first + self.blocks[tensor] * block_bytes]

    def mask_bytes(self) -> int:
        """Bytes of a packed mask, the padding behind the last run included."""
        return self.replicas * self.run_bytes

    def sends_offsets(self, density: float, selection: str) -> bool:
        """Whether in-block offsets take fewer bytes on the wire than the bitmap; "tensor" knows the bitmap only.

        A single replica sends nothing, and keeps to the bitmap.
        """
        if selection != "block" or density >= 1.0 or self.replicas == 1:
            return False
        return self._offset_bytes(density) < self.run_bytes

    @property
    def run_bytes(self) -> int:
        """Bytes of a run in a packed mask."""
        return self.run_blocks * self.block_size // 8

    def selection_bytes(self, density: float, selection: str) -> int:
        """Bytes that tell of one replica's selection."""
        if density >= 1.0:
            return 0
        return self._offset_bytes(density) if self.sends_offsets(density, selection) else self.run_bytes

    def wire_bytes(self, density: float, selection: str) -> int:
        """What they take on the wire: zeros come after them."""
        return padded_bytes(self.selection_bytes(density, selection))

    def _offset_bytes(self, density: float) -> int:
        return offset_bytes(self.run_blocks, entries_per_block(density, self.block_size), self.block_size)

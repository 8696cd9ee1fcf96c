"""How sparsified tensors are cut into blocks, and blocks into the runs that replicas own. Plain arithmetic."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


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

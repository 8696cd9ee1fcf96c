"""Sizes of SCAPE's payload and masks, computed by the kernels' size functions. Imports no torch.

`shapes` are the shapes of a rank's shards. Tensors of one dimension have no mask: all their entries are sent.
"""

import math

from torchtitan_scape.core.workloads import Shapes
from torchtitan_scape.kernels.scape.blocks import BlockLayout

SECTOR = 32  # bytes that a GPU's memory moves at least


def dense_sizes(shapes: Shapes) -> list[int]:
    """Return the number of entries of each tensor without a mask."""
    return [math.prod(shape) for shape in shapes if len(shape) < 2]


def block_layout(shapes: Shapes, replicas: int, block: int) -> BlockLayout:
    """Return the blocks of the tensors that have a mask."""
    return BlockLayout(tuple(math.prod(shape) for shape in shapes if len(shape) > 1), block, replicas)


def payload_entries(
    shapes: Shapes,
    density: float,
    block: int = 1024,
    size_multiple: int = 1,
    selection: str = "block",
    replicas: int = 1,
) -> int:
    """Return the number of entries that a step sends.

    Args:
        size_multiple: Tensors without a mask start at a multiple of this number of entries.
        replicas: Number of replicas; matters only if selection is "tensor".
    """
    layout = block_layout(shapes, replicas, block)
    masked = sum(layout.nnz(i, density, selection) for i in range(len(layout.sizes)))
    return -(-masked // size_multiple) * size_multiple + sum(dense_sizes(shapes))


def sector_bytes(shapes: Shapes, density: float, nbytes: int = 4, block: int = 1024) -> float:
    """Return the bytes that move if a pass reads, or writes, the entries of a mask in tensors of `nbytes` per entry.

    Memory moves whole sectors. A sector of s entries moves unless the mask contains none of them: with probability
    1 - (1 - d)^s, if entries of a mask of density d are independent. Tensors without a mask move completely.
    """
    layout = block_layout(shapes, 1, block)
    masked = 0.0
    for tensor, size in enumerate(layout.sizes):
        share = layout.nnz(tensor, density, "block") / max(1, size)
        masked += size * (1.0 - (1.0 - share) ** (SECTOR // nbytes))
    return nbytes * (masked + sum(dense_sizes(shapes)))

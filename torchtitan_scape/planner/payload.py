"""What is sent of a model where a mask selects it in blocks, by the kernels' own arithmetic. No torch.

`shapes` are those of a rank's shards; tensors of one dimension are sent whole.
"""

import math
from collections.abc import Sequence

from kernels.codec.formats import BLOCK, FORMATS, message_bytes
from kernels.scape.blocks import BlockLayout, entries_per_block, offset_bytes
from kernels.scape.ownership import Ownership
from topology.ring_bytes import MessageBytes
from torchtitan_scape.planner.workloads import Shape

Shapes = Sequence[Shape]

WIRE_BYTES = {"float32": 4, "bfloat16": 2}  # of an entry


def width(dtype: str) -> int:
    """Bytes of an entry. Raises ValueError for a dtype that nothing travels or is kept in."""
    if dtype not in WIRE_BYTES:
        raise ValueError(f"the dtype is {dtype!r}; it must be one of {', '.join(WIRE_BYTES)}")
    return WIRE_BYTES[dtype]


def coded_by(wire: str) -> MessageBytes | None:
    """Bytes of a message of so many entries on this wire; None for FP32, which no codec touches.

    Raises ValueError for a wire that there is none of.
    """
    if wire in FORMATS:
        return lambda entries: message_bytes(wire, -(-entries // BLOCK) * BLOCK)
    if wire not in WIRE_BYTES:
        raise ValueError(f"the wire is {wire!r}; it must be one of {', '.join((*WIRE_BYTES, *FORMATS))}")
    return None if wire == "float32" else lambda entries: WIRE_BYTES[wire] * entries


def entries_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def whole_sizes(shapes: Shapes) -> list[int]:
    """Entries of the tensors that are sent whole."""
    return [math.prod(shape) for shape in shapes if len(shape) < 2]


def block_layout(shapes: Shapes, replicas: int, block: int) -> BlockLayout:
    return BlockLayout(tuple(math.prod(shape) for shape in shapes if len(shape) > 1), block, replicas)


def payload_entries(shapes: Shapes, density: float, block: int = 1024, unit: int = 1) -> int:
    """Entries that SCAPE sends in a step. unit: tensors that are sent whole begin at a multiple of it."""
    layout = block_layout(shapes, 1, block)
    masked = sum(layout.nnz(i, density, "block") for i in range(len(layout.sizes)))
    return -(-masked // unit) * unit + sum(whole_sizes(shapes))


def payload_bytes(shapes: Shapes, density: float, wire: str = "float32", block: int = 1024) -> int:
    """The payload on the wire, one way."""
    entries, coded = payload_entries(shapes, density, block), coded_by(wire)
    return 4 * entries if coded is None else coded(entries)


def mask_bytes(shapes: Shapes, density: float, replicas: int, block: int = 1024) -> int:
    """One replica's own run on the wire."""
    return block_layout(shapes, replicas, block).wire_bytes(density, "block")


def owned_entries(shapes: Shapes, replicas: int, block: int) -> int:
    """Entries of the buffers that hold what a replica owns."""
    return Ownership.of(block_layout(shapes, replicas, block), whole_sizes(shapes)).share


def topk_count(entries: int, density: float, block: int) -> int:
    """Entries of a tensor in a top-k message: k of each block, a short last one too; of the tensor where block is 0."""
    if not block:
        return max(1, round(density * entries))
    return -(-entries // block) * entries_per_block(density, block)


def topk_offset_bytes(entries: int, density: float, block: int) -> int:
    """Bytes that say where they are: coded offsets in their blocks, or 32 bits each."""
    if not block:
        return 4 * topk_count(entries, density, block)
    return offset_bytes(-(-entries // block), entries_per_block(density, block), block)


def topk_message_bytes(sizes: Sequence[int], density: float, block: int) -> int:
    """One replica's message about tensors of these sizes: FP32 values, offsets, and zeros up to 16 bytes."""
    size = sum(4 * topk_count(n, density, block) + topk_offset_bytes(n, density, block) for n in sizes if n)
    return -(-size // 16) * 16

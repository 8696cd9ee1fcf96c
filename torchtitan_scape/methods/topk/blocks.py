"""What is sent of a model where a mask or top-k selects it, by the kernels' own arithmetic. No torch.

`shapes` are those of a rank's shards; tensors of one dimension are sent whole, but for top-k by tiles.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kernels.codec.formats import BLOCK, FORMATS, message_bytes
from kernels.common.wire import padded_bytes
from kernels.scape.blocks import BlockLayout, entries_per_block, offset_bytes
from kernels.scape.ownership import Ownership
from kernels.tagc.formats import BLOCK as TAGC_BLOCK
from kernels.tagc.formats import bitmap_bytes, capacity, index_bytes, sends_offsets
from topology.partition import chunk_sizes
from topology.ring_bytes import MessageBytes
from torchtitan_scape.core.workloads import Shape

Shapes = Sequence[Shape]

WIRE_BYTES = {"float32": 4, "bfloat16": 2}  # of an entry


def width(dtype: str) -> int:
    """Bytes of an entry. Raises ValueError for a dtype that nothing travels or is kept in."""
    if dtype not in WIRE_BYTES:
        raise ValueError(f"the dtype is {dtype!r}; it must be one of {', '.join(WIRE_BYTES)}")
    return WIRE_BYTES[dtype]


def coded_by(wire: str, block: int = BLOCK) -> MessageBytes | None:
    """Bytes of a message of so many entries on this wire; None for FP32, which no codec touches.

    block: entries that share scales, where it is a block code. Raises ValueError for a wire that there is none of.
    """
    if wire in FORMATS:
        return lambda entries: message_bytes(wire, -(-entries // block) * block, block)
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


def chunks_by_size(shapes: Shapes, replicas: int, unit: int) -> dict[int, int]:
    """How often chunks of so many entries are exchanged, every replica's part of them being whole units."""
    step = replicas * unit
    return dict(Counter(-(-n // step) * step for n in chunk_sizes([math.prod(shape) for shape in shapes], block=unit)))


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


def mask_counts(sizes: Sequence[int], density: float, selection: str, block: int) -> list[int]:
    """Entries that a mask has of each tensor. selection: "block", k of every block, at most what a short one has; or
    "tensor"."""
    layout = BlockLayout(tuple(sizes), block, 1)
    return [layout.nnz(i, density, selection) for i in range(len(sizes))]


# ----------------------------------------------------------------------------------------------- top-k

TILE = 64  # the side of a tile; what is no matrix is cut into runs of as many entries
MEANS = 4  # FP32 numbers by which the code of two bits tells a tensor's values


@dataclass(frozen=True)
class BlockGrid:
    """A tensor seen as a matrix and cut into tiles of one size, of which the last of a row or column may be short.

    coded: whether places in a tile go in the code of offsets, else in 32 bits each.
    """

    rows: int
    columns: int
    height: int
    width: int
    coded: bool = True

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        return self.down * self.across

    @property
    def size(self) -> int:
        """Entries of a tile."""
        return self.height * self.width

    def count(self, k: int) -> int:
        """Entries in a message with k of each tile: as many of a short one as of any."""
        return self.tiles * k

    def offset_bytes(self, k: int) -> int:
        """Bytes that say where they are."""
        return offset_bytes(self.tiles, k, self.size) if self.coded else 4 * self.count(k)


def block_grid(shape: Shape, selection: str, block: int) -> BlockGrid:
    """How top-k cuts a tensor that has entries.

    selection: "block", runs of `block` entries; "tensor", one run; "tile", tiles of at most `TILE` x `TILE` entries
        where there are two dimensions or more, else runs of at most as many. These are as even as can be: a side that
        is no multiple of 64 leaves no narrow tile, which would send more of itself than others.
    """
    entries = math.prod(shape)
    if selection == "tensor":
        return BlockGrid(1, entries, 1, entries, coded=False)
    if selection == "block":
        return BlockGrid(1, entries, 1, block)
    if len(shape) < 2:
        return BlockGrid(1, entries, 1, _even(entries, TILE * TILE))
    rows, columns = shape[0], entries // shape[0]
    return BlockGrid(rows, columns, _even(rows, TILE), _even(columns, TILE))


def divided(shape: Shape, most: int) -> BlockGrid:
    """How DeMo cuts a tensor that has entries: sides are the largest divisors up to `most`, so that no tile is short;
    what has one dimension is one row."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    height, width = (max(n for n in range(1, most + 1) if side % n == 0) for side in (rows, columns))
    return BlockGrid(rows, columns, height, width)


def selected_per_block(cuts: Sequence[BlockGrid], density: float) -> list[int]:
    """Entries that are sent of each tile, by tensor."""
    return [entries_per_block(density, cut.size) for cut in cuts]


def _even(length: int, most: int) -> int:
    """The length of a part where there are no more of them than parts of `most` would be."""
    return -(-length // -(-length // most))


def topk_value_bytes(counts: Sequence[int], values: str) -> int:
    """Bytes of so many values of every tensor. values: "float32", "2bit" (codes and means), "1bit" (signs and one
    mean), or a block code."""
    if values == "float32":
        return 4 * sum(counts)
    if values == "2bit":
        return sum(4 * MEANS + -(-count // 4) for count in counts)
    if values == "1bit":
        return sum(4 + -(-count // 8) for count in counts)
    return message_bytes(values, -(-sum(counts) // BLOCK) * BLOCK)


def topk_message_bytes(cuts: Sequence[BlockGrid], chosen: Sequence[int], values: str = "float32") -> int:
    """One replica's message about these tensors: values, offsets, and zeros as `padded_bytes` adds them.

    chosen: entries that are sent of each tile, by tensor.
    """
    size = topk_value_bytes([one.count(k) for one, k in zip(cuts, chosen, strict=True)], values)
    size += sum(one.offset_bytes(k) for one, k in zip(cuts, chosen, strict=True))
    return padded_bytes(size)


# ------------------------------------------------------------------------------------------------ TAGC


def tagc_packed(shapes: Shapes, density: float, replicas: int) -> int:
    """Entries that travel of what is compressed; none where all are sent whole."""
    return 0 if density >= 1.0 else _tagc_blocks(shapes) * capacity(density, replicas)


def tagc_index(shapes: Shapes, density: float, replicas: int) -> tuple[Literal["reduce", "gather"], int]:
    """How their places travel, and own bytes of it."""
    blocks = _tagc_blocks(shapes)
    if sends_offsets(density, replicas):
        return "gather", index_bytes(density, blocks)
    return "reduce", bitmap_bytes(blocks, replicas)


def _tagc_blocks(shapes: Shapes) -> int:
    return sum(-(-math.prod(shape) // TAGC_BLOCK) for shape in shapes if len(shape) > 1)


def demo_message_bytes(shapes: Shapes, k: int, chunk: int, values: str) -> int:
    """One replica's message of DeMo: k components of every tile, all of one that has fewer."""
    cuts = [divided(shape, chunk) for shape in shapes if math.prod(shape)]
    return topk_message_bytes(cuts, [min(k, cut.size) for cut in cuts], values)

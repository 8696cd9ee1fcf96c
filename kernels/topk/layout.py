"""Tiles of a tensor, and messages with the selected entries of several tensors. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torchtitan_scape.kernels.codec.formats import MessageSize
from torchtitan_scape.kernels.common.alignment import padded_bytes
from torchtitan_scape.kernels.scape.blocks import offset_bytes

MEANS = {"2bit": 4, "1bit": 1}  # FP32 means of each tensor, at the head of a message
PER_BYTE = {"2bit": 4, "1bit": 8}  # values


@dataclass(frozen=True)
class BlockGrid:
    """A tensor viewed as a matrix and divided into tiles of equal size; those at the end may be shorter.

    Attributes:
        rows, columns: Sides of the matrix.
        height, width: Sides of a tile.
        coded: Offsets within a tile are encoded; otherwise they take 32 bits each.
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
        """Number of entries of a tile."""
        return self.height * self.width

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def padded(self) -> bool:
        """Whether tiles at the end are shorter."""
        return self.tiles * self.size != self.entries

    @property
    def fewest(self) -> int:
        """Number of entries of the last tile, the shortest one."""
        return (self.rows - (self.down - 1) * self.height) * (self.columns - (self.across - 1) * self.width)

    def count(self, k: int) -> int:
        """Return the number of entries of a message with k per tile, including the padding of shorter tiles."""
        return self.tiles * k

    def offset_bytes(self, k: int) -> int:
        """Return the bytes of the offsets of k entries per tile."""
        return offset_bytes(self.tiles, k, self.size) if self.coded else 4 * self.count(k)


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """Positions in a message with the selected entries of several tensors: all values, then all offsets.

    Attributes:
        grids: Division of each tensor into tiles.
        selected: Number of entries per tile, for each tensor.
        code: "float32"; "2bit", four means per tensor; "1bit", signs and one mean magnitude per tensor; or a block code
            of the concatenated values of all tensors.
    """

    grids: Sequence[BlockGrid]
    selected: Sequence[int]
    code: str = "float32"

    @property
    def form(self) -> str:
        """The form of the values that a mean reads: those of a block code are decoded to FP32 before."""
        return self.code if self.code in MEANS else "float32"

    @cached_property
    def counts(self) -> list[int]:
        """Number of values of each tensor."""
        return [grid.count(k) for grid, k in zip(self.grids, self.selected, strict=True)]

    @cached_property
    def first_values(self) -> list[int]:
        """Position of each tensor's first value among all values, and their number."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def first_codes(self) -> list[int]:
        """Position of each tensor's first byte of packed values, and their end. Empty if they are not packed."""
        if self.code not in MEANS:
            return []
        sizes = (-(-count // PER_BYTE[self.code]) for count in self.counts)
        return list(accumulate(sizes, initial=4 * MEANS[self.code] * len(self.grids)))

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of the encoded values, means included."""
        if self.code in MEANS:
            return self.first_codes[-1]
        total = sum(self.counts)
        return 4 * total if self.code == "float32" else MessageSize(self.code)(total)

    @cached_property
    def first_offsets(self) -> list[int]:
        """Position of each tensor's first byte of offsets, and their end."""
        sizes = (grid.offset_bytes(k) for grid, k in zip(self.grids, self.selected, strict=True))
        return list(accumulate(sizes, initial=self.value_bytes))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message, padded by `padded_bytes`."""
        return padded_bytes(self.first_offsets[-1])

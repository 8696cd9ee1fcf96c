"""Tiles of a tensor, and the parts of a received message that belong to it."""

from typing import NamedTuple, Protocol

from torch import Tensor


class TileGrid(Protocol):
    """A tensor viewed as a matrix and divided into tiles of equal size; those at the end may be shorter."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def down(self) -> int: ...
    @property
    def across(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def coded(self) -> bool: ...


class Received(NamedTuple):
    """The entries of one tensor in the messages of N replicas. All tensors are views with one row per replica.

    Attributes:
        k: Entries of each tile.
        form: "float32", "2bit" or "1bit".
        values: FP32 (N, tiles * k), or the packed codes, uint8 (N, bytes).
        means: FP32 (N, 4) of the 2-bit code, (N, 1) of the 1-bit code; otherwise `values`.
        offsets: uint8 (N, bytes), encoded offsets within a tile; or of 32 bits if the grid is not coded.
    """

    k: int
    form: str
    values: Tensor
    means: Tensor
    offsets: Tensor

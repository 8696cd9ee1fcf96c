"""Launches over the tiles of many tensors: tables of positions and addresses, and the entries of a tile.

A program processes ROWS tiles of one tensor as [ROWS, COLUMNS]; COLUMNS is the number of entries of a tile, rounded up
to a power of two. Tensors with tiles of the same height, width and number of selected entries share a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common.launching import DeviceTable, addresses, aligned, to_device
from torchtitan_scape.kernels.topk.layout import MEANS, PER_BYTE, MessageLayout

# Columns of the table of tensors, int64.
TILES = tl.constexpr(0)
ACROSS = tl.constexpr(1)  # tiles
TENSOR_ROWS = tl.constexpr(2)
TENSOR_COLUMNS = tl.constexpr(3)
STRIDE = tl.constexpr(4)  # entries of a row; 0 if there is only one
VALUE = tl.constexpr(5)  # position of its first value among all values
PACKED = tl.constexpr(6)  # position of its first value among the packed ones of a message
MEAN = tl.constexpr(7)  # position of its first mean
OFFSETS = tl.constexpr(8)  # first byte of its offsets in a message
WIDTH_OF_TABLE = tl.constexpr(9)


@triton.jit
def column(table, tensor, COLUMN: tl.constexpr):
    return tl.load(table + tensor * WIDTH_OF_TABLE + COLUMN)


@triton.jit
def tiles_of(programs, program, table, ROWS: tl.constexpr):
    """Return the tensor of a program, its tiles, int64 [ROWS, 1], and whether they exist."""
    tensor = tl.load(programs + 2 * program)
    tile = (tl.load(programs + 2 * program + 1) + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    return tensor, tile, tile < column(table, tensor, TILES)


@triton.jit
def tile_starts(table, tensor, tile, height, width, ALIGNED: tl.constexpr):
    """Return the first entry of every tile, int64 [ROWS, 1], the stride of its rows, and the rows and columns left."""
    across, stride = column(table, tensor, ACROSS), column(table, tensor, STRIDE)
    rows, columns = column(table, tensor, TENSOR_ROWS), column(table, tensor, TENSOR_COLUMNS)
    if ALIGNED:
        stride, columns = tl.multiple_of(stride, 4), tl.multiple_of(columns, 4)
    row, first = (tile // across) * height, (tile % across) * width
    columns_left = tl.minimum(columns - first, width).to(tl.int32)
    return row * stride + first, stride.to(tl.int32), (rows - row).to(tl.int32), columns_left


@triton.jit
def entry_of(offset, stride, rows_left, columns_left, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the entries at offsets within tiles, int32 relative to `tile_starts`, and whether they are not padding."""
    valid = (offset < HEIGHT * WIDTH) & (rows_left > 0)
    if HEIGHT == 1:
        if PADDED:
            valid = valid & (offset < columns_left)
        return offset + tl.zeros_like(rows_left), valid
    row, column_in_tile = offset // WIDTH, offset % WIDTH
    if PADDED:
        valid = valid & (row < rows_left) & (column_in_tile < columns_left)
    return row * stride + column_in_tile + tl.zeros_like(rows_left), valid


@triton.jit
def tensor_at(addresses, tensor, ALIGNED: tl.constexpr):
    """Return the FP32 tensor with this number."""
    address = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@dataclass(frozen=True, eq=False)
class Form:
    """Tiles of the same sides and number of selected entries, which share a launch.

    Attributes:
        programs: int32 (programs, 2): tensor and first tile of each.
        k: Number of selected entries of a tile.
        size: Entries of a tile.
        padded: Entries of a program, with those that round up a tile.
        entries: Entries of all tiles, without padding.
        share: Part of them in the entries of all forms.
        constants: Those of the kernels.
    """

    programs: Tensor
    k: int
    size: int
    padded: int
    entries: int
    share: float
    constants: dict[str, Any]


class TiledTensors:
    """Tables of the tensors of a message, and lists of tiles, which are built once for a size of the programs."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout = layout
        self._numbers: dict[Any, list[int]] = {}  # of the tensors of a form
        for i, (grid, k) in enumerate(zip(layout.grids, layout.selected, strict=True)):
            self._numbers.setdefault((grid.height, grid.width, k, grid.padded), []).append(i)
        self._forms: dict[tuple[int, bool], list[Form]] = {}
        self._table: Tensor | None = None
        self._addresses: dict[str, DeviceTable] = {}

    def launches(self, entries: int, **lists: Sequence[Tensor]) -> list[tuple[Form, tuple[Tensor, ...]]]:
        """Return the launches that cover all tiles, with the first arguments of a kernel.

        These are the programs, the table of tensors, int64 (tensors, columns), and the addresses of each list of
        tensors, int64 (tensors, 1), which are copied if they have changed since the last list of that name.

        Args:
            entries: Those of a program, unless a tile has more.
            lists: Tensors by the name of the list.
        """
        device, is_aligned = next(iter(lists.values()))[0].device, True
        if self._table is None:
            self._table = to_device(self._rows(), device)
        arguments = [self._table]
        for name, tensors in lists.items():
            if name not in self._addresses:
                self._addresses[name] = DeviceTable(len(tensors), 1, torch.int64, device)
            arguments.append(self._addresses[name].set(addresses(tensors)))
            is_aligned = is_aligned and aligned(*tensors)
        if (entries, is_aligned) not in self._forms:
            self._forms[entries, is_aligned] = [
                self._form(numbers, entries, is_aligned, device) for numbers in self._numbers.values()
            ]
        return [(form, (form.programs, *arguments)) for form in self._forms[entries, is_aligned]]

    def _rows(self) -> Tensor:
        layout, rows = self.layout, []
        for i, grid in enumerate(layout.grids):
            sides = grid.tiles, grid.across, grid.rows, grid.columns, grid.columns if grid.rows > 1 else 0
            packed = PER_BYTE[layout.code] * layout.first_codes[i] if layout.first_codes else 0
            values = layout.first_values[i], packed, MEANS.get(layout.code, 0) * i
            rows.append((*sides, *values, layout.first_offsets[i]))
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def _form(self, numbers: list[int], entries: int, is_aligned: bool, device: torch.device) -> Form:
        grids, parts = [self.layout.grids[i] for i in numbers], []
        one, k = grids[0], self.layout.selected[numbers[0]]
        columns = power(one.size)
        rows = max(1, entries // columns)
        for i, grid in zip(numbers, grids, strict=True):
            first = torch.arange(0, grid.tiles, rows, dtype=torch.int32, device="cpu")
            parts.append(torch.stack([torch.full_like(first, i), first], 1))
        count = sum(grid.entries for grid in grids)
        is_aligned = is_aligned and one.width % 4 == 0 and all(grid.columns % 4 == 0 for grid in grids)
        sides = dict(HEIGHT=one.height, WIDTH=one.width)
        constants = dict(**sides, PADDED=one.padded, ALIGNED=is_aligned, ROWS=rows, COLUMNS=columns)
        share = count / sum(grid.entries for grid in self.layout.grids)
        return Form(to_device(torch.cat(parts), device), k, one.size, rows * columns, count, share, constants)


def power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()

"""The passes of `reference.TorchTopk` on Triton kernels, bitwise equal, one launch for each form of tiles.

A program processes ROWS tiles of one tensor as [ROWS, COLUMNS]; COLUMNS is the number of entries of a tile, rounded up
to a power of two. Tensors with tiles of the same height, width and number of selected entries share a launch. Values
are added in the order of the replicas, one message after the other, with a barrier in between: the entries of one
message are distinct, so that no atomics are needed.

Memory traffic per entry: selection reads the gradient and reads and writes the residual, 12 bytes. If values are
encoded, error feedback writes the selected entries once more. The mean writes 4 bytes and reads them from the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import DeviceTable, addresses, aligned, to_device
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.scape.triton_tiles import select_in_blocks, store_code
from torchtitan_scape.kernels.topk.layout import MEANS, PER_BYTE, BlockGrid, MessageLayout

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


@triton.jit
def store_selected(message, values, table, tensor, tile, x, offset, chosen, k, code_bytes, unary, low):
    """Store the chosen entries of tiles: their values, and the bits of their offsets in a message of zeros.

    Args:
        x, offset, chosen: FP32, int32 and bool [ROWS, n]. tile: int64 [ROWS, 1].
    """
    rank = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(values + column(table, tensor, VALUE) + tile * k + rank, x, mask=chosen)
    byte = column(table, tensor, OFFSETS) + tile * code_bytes
    words = message.to(tl.pointer_type(tl.int32)) + (byte >> 2)
    start = ((byte & 3) * 8).to(tl.int32)
    store_code(words, start, offset, rank, chosen, unary, low)


@triton.jit
def decode_offsets(code, exists, k, LOW: tl.constexpr, UNARY: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return the ranks of the offsets in the codes of tiles, the offsets, and which exist, [ROWS, LANES].

    Args:
        code: Address of the code of every tile, [ROWS, 1].
    """
    lane = tl.arange(0, LANES)[None, :]
    if UNARY > 0:
        used = exists & (lane < UNARY)
        bit = (tl.load(code + (lane >> 3), mask=used, other=0).to(tl.int32) >> (lane & 7)) & 1
        rank = tl.cumsum(bit, 1) - bit
        active = used & (bit != 0)
        offset = (lane - rank) << LOW
    else:
        active = exists & (lane < k)
        rank = lane + tl.zeros((ROWS, LANES), tl.int32)
        offset = tl.zeros((ROWS, LANES), tl.int32)
    for i in tl.static_range(LOW):
        at = UNARY + rank * LOW + i
        low = (tl.load(code + (at >> 3), mask=active, other=0).to(tl.int32) >> (at & 7)) & 1
        offset = offset | (low << i)
    return rank, offset, active


@triton.jit(do_not_specialize=["decay", "factor", "k", "code_bytes", "unary", "low"])
def select_kernel(
    programs,
    table,
    residuals,
    gradients,
    message,
    values,
    applied,
    decay,
    factor,
    k,
    code_bytes,
    unary,
    low,
    CLEARS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the gradient to the residual if `applied`, and store the k largest entries of each tile, by ascending offset.

    The sum is rounded once, as PyTorch does on a GPU. CLEARS: the stored entries of the residual become zero.
    """
    tensor, tile, exists = tiles_of(programs, tl.program_id(0), table, ROWS)
    start, stride, rows_left, columns_left = tile_starts(table, tensor, tile, HEIGHT, WIDTH, ALIGNED)
    # An exclusive or with zero at run time prevents loads of several entries in one thread: their layout would be
    # converted, through shared memory, in every one of the scattered accesses below.
    offset = tl.arange(0, COLUMNS)[None, :] ^ tl.minimum(k, 0)
    entry, valid = entry_of(offset, stride, rows_left, columns_left, HEIGHT, WIDTH, PADDED)
    residual = tensor_at(residuals, tensor, ALIGNED) + start
    before = tl.load(residual + entry, mask=valid, other=0.0)
    added = tl.load(tensor_at(gradients, tensor, ALIGNED) + start + entry, mask=valid, other=0.0) * factor
    is_applied = tl.load(applied).to(tl.int32) + tl.zeros_like(entry) != 0
    x = tl.where(is_applied, tl.fma(before, tl.zeros_like(before) + decay, added), before)
    # The bits of magnitudes are ordered as the numbers. The largest key is excluded, as the search needs one above all.
    keys = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    chosen = select_in_blocks(tl.where(valid, keys, -1), k)
    tl.store(residual + entry, tl.where(chosen, 0.0, x) if CLEARS else x, mask=valid & is_applied)
    if PADDED:
        padding = exists & (offset < HEIGHT * WIDTH) & ~valid
        missing = k - tl.sum(chosen.to(tl.int32), 1)[:, None]
        chosen = chosen | (padding & (tl.cumsum(padding.to(tl.int32), 1) <= missing))
    store_selected(message, values, table, tensor, tile, x, offset, chosen, k, code_bytes, unary, low)


@triton.jit(do_not_specialize=["k"])
def keep_kernel(
    programs,
    table,
    residuals,
    message,
    errors,
    applied,
    k,
    LOW: tl.constexpr,
    UNARY: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the errors of the selected entries in the residual, if `applied`."""
    if tl.load(applied) != 0:
        tensor, tile, exists = tiles_of(programs, tl.program_id(0), table, ROWS)
        start, stride, rows_left, columns_left = tile_starts(table, tensor, tile, HEIGHT, WIDTH, ALIGNED)
        code = message + column(table, tensor, OFFSETS) + tile * CODE_BYTES
        rank, offset, active = decode_offsets(code, exists, k, LOW, UNARY, ROWS, LANES)
        entry, valid = entry_of(offset, stride, rows_left, columns_left, HEIGHT, WIDTH, PADDED)
        error = tl.load(errors + column(table, tensor, VALUE) + tile * k + rank, mask=active, other=0.0)
        tl.store(tensor_at(residuals, tensor, ALIGNED) + start + entry, error, mask=active & valid)


@triton.jit
def value_of(values, means, first, index, active, CODE: tl.constexpr):
    """Return the values with these indices in one message, FP32. first: index of the first one, int64 [ROWS, 1]."""
    if CODE == "float32":
        return tl.load(values + first + index, mask=active, other=0.0)
    index = first + index
    if CODE == "2bit":
        byte = tl.load(values + (index >> 2), mask=active, other=0).to(tl.int32)
        code = (byte >> ((index & 3) * 2).to(tl.int32)) & 3
        return tl.load(means + code, mask=active, other=0.0)
    else:
        byte = tl.load(values + (index >> 3), mask=active, other=0).to(tl.int32)
        sign = ((byte >> (index & 7).to(tl.int32)) & 1) * 2 - 1
        return tl.load(means) * sign.to(tl.float32)


@triton.jit(do_not_specialize=["value_stride", "mean_stride", "code_stride", "replicas", "divisor", "count", "k"])
def mean_kernel(
    programs,
    table,
    outputs,
    counts,
    values,
    means,
    messages,
    value_stride,
    mean_stride,
    code_stride,
    replicas,
    divisor,
    count,
    k,
    CODE: tl.constexpr,
    OVER_SENDERS: tl.constexpr,
    LOW: tl.constexpr,
    UNARY: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the mean of all messages.

    A program of the grid takes every n-th of the `count` programs of the list, one after the other.

    counts: int16, number of senders of each entry, used inside the kernel: ROWS * COLUMNS of each program of the grid.
    LOW, UNARY, CODE_BYTES: the code of the offsets, `kernels.scape.blocks.OffsetCode`.
    """
    # Few entries at a time need few registers, so that many programs run at once and wait for memory together.
    PIECE: tl.constexpr = min(COLUMNS, 128)
    row = tl.arange(0, ROWS)[:, None] * COLUMNS
    counts += tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    for program in range(tl.program_id(0), count, tl.num_programs(0)):
        tensor, tile, exists = tiles_of(programs, program, table, ROWS)
        start, stride, rows_left, columns_left = tile_starts(table, tensor, tile, HEIGHT, WIDTH, ALIGNED)
        x = tensor_at(outputs, tensor, ALIGNED) + start
        for first in range(0, COLUMNS, PIECE):
            offset = first + tl.arange(0, PIECE)[None, :]
            entry, valid = entry_of(offset, stride, rows_left, columns_left, HEIGHT, WIDTH, PADDED)
            tl.store(x + entry, tl.zeros((ROWS, PIECE), tl.float32), mask=valid & exists)
            if OVER_SENDERS:
                tl.store(counts + row + offset, tl.zeros((ROWS, PIECE), tl.int16))
        tl.debug_barrier()
        first_value = column(table, tensor, VALUE if CODE == "float32" else PACKED) + tile * k
        code = messages + column(table, tensor, OFFSETS) + tile * CODE_BYTES
        own_values, own_means = values, means + column(table, tensor, MEAN)
        for _ in range(replicas):
            rank, offset, active = decode_offsets(code, exists, k, LOW, UNARY, ROWS, LANES)
            entry, valid = entry_of(offset, stride, rows_left, columns_left, HEIGHT, WIDTH, PADDED)
            valid = valid & active
            value = value_of(own_values, own_means, first_value, rank, valid, CODE)
            tl.store(x + entry, tl.load(x + entry, mask=valid, other=0.0) + value, mask=valid)
            if OVER_SENDERS:
                sent = tl.load(counts + row + offset, mask=valid, other=0)
                tl.store(counts + row + offset, sent + 1, mask=valid)
            tl.debug_barrier()
            code += code_stride
            own_values += value_stride
            own_means += mean_stride
        for first in range(0, COLUMNS, PIECE):
            offset = first + tl.arange(0, PIECE)[None, :]
            entry, valid = entry_of(offset, stride, rows_left, columns_left, HEIGHT, WIDTH, PADDED)
            total = tl.load(x + entry, mask=valid & exists, other=0.0)
            if OVER_SENDERS:
                senders = tl.load(counts + row + offset).to(tl.float32)
                total = tl.math.div_rn(total, tl.maximum(senders, 1.0))
            else:
                total = tl.math.div_rn(total, tl.zeros_like(total) + divisor)
            tl.store(x + entry, total, mask=valid & exists)
        tl.debug_barrier()


_LARGEST = 1 << 15  # entries of a tile; larger ones, of a whole tensor, use PyTorch
_ENTRIES = 1 << 13  # of a program
# Entries of a program that selects, and of its warps: its search keeps all in registers.
_SELECTED, _PER_WARP = 1 << 10, 1 << 8
_PROGRAMS = 1 << 11  # of a grid with a memory for each


def fits(grid: BlockGrid) -> bool:
    """Return whether the kernels can process the tiles of a grid."""
    return grid.coded and grid.size <= _LARGEST and grid.height * grid.columns < 1 << 31


class TritonTopk:
    """The passes of `reference.TorchTopk`. None synchronizes with the device."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout, self._tiled = layout, TiledTensors(layout)

    def select(
        self,
        residuals: Sequence[Tensor],
        gradients: Sequence[Tensor],
        decay: float,
        factor: float,
        applied: Tensor,
        message: Tensor,
        values: Tensor,
    ) -> None:
        """Select as `TorchTopk.select`."""
        for form, tables in self._tiled.launches(_SELECTED, residuals=residuals, gradients=gradients):
            code = offset_code(form.k, form.size)
            launching.launch(
                select_kernel,
                (len(form.programs),),
                *(*tables, message, values, applied),
                *(decay, factor, form.k, code.nbytes, code.unary, code.low),
                warps=max(1, min(16, form.padded // _PER_WARP)),
                moved=12 * form.entries - (1 - form.share) * (message.nbytes + values.nbytes),
                CLEARS=self.layout.code == "float32",
                **form.constants,
            )

    def keep_(self, residuals: Sequence[Tensor], message: Tensor, errors: Tensor, applied: Tensor) -> None:
        """Set the residuals as `TorchTopk.keep_`."""
        for form, tables in self._tiled.launches(_ENTRIES, residuals=residuals):
            touched = min(4 * form.entries, 32 * form.share * errors.numel())  # a sector for each entry
            launching.launch(
                keep_kernel,
                (len(form.programs),),
                *(*tables, message, errors, applied, form.k),
                warps=_warps(form),
                moved=touched - (1 - form.share) * (message.nbytes + errors.nbytes),
                **_code(form),
                **form.constants,
            )

    def mean_(self, outputs: Sequence[Tensor], messages: Tensor, over_senders: bool) -> None:
        """Compute the mean as `TorchTopk.mean_`."""
        numbers = messages.view(torch.float32)
        values = numbers if self.layout.code == "float32" else messages
        for form, tables in self._tiled.launches(_ENTRIES, gradients=outputs):
            grid = min(len(form.programs), _PROGRAMS) if over_senders else len(form.programs)
            size = grid * form.padded if over_senders else 1
            counts = torch.empty(size, dtype=torch.int16, device=messages.device)
            launching.launch(
                mean_kernel,
                (grid,),
                *(*tables, counts, values, numbers, messages),
                *(values.stride(0), numbers.stride(0), messages.stride(0)),
                *(len(messages), float(len(messages)), len(form.programs), form.k),
                warps=_warps(form),
                moved=4 * form.entries - (1 - form.share) * messages.nbytes,
                CODE=self.layout.code,
                OVER_SENDERS=over_senders,
                **_code(form),
                **form.constants,
            )


def _code(form: Form) -> dict[str, int]:
    """Return the constants of the code of the offsets."""
    code = offset_code(form.k, form.size)
    return dict(LOW=code.low, UNARY=code.unary, CODE_BYTES=code.nbytes, LANES=power(max(code.unary, form.k)))


def _warps(form: Form) -> int:
    return 4 if form.padded <= 1 << 11 else 8 if form.padded <= _ENTRIES else 16

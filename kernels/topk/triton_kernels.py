"""Top-k's passes as Triton kernels, bitwise equal to `reference.py`.

A program processes ROWS tiles of a tensor as [ROWS, COLUMNS]; COLUMNS is the number of entries of a tile, rounded up to
a power of two. Values are added in the order of the replicas, one message after the other, with a barrier in between:
the entries of one message are distinct, so that no atomics are needed.

Memory traffic per entry: adding x to the residual reads 8 bytes and writes 4, selection reads 4, error feedback writes
the selected entries, and the mean writes and reads what stays in the cache of a program, 4 bytes and 2 for the number
of senders.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.scape.triton_select import select_in_blocks

FLOAT, TWO_BITS, ONE_BIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tiles_of(tiles, ROWS: tl.constexpr):
    """Return the tiles of this program, int64 [ROWS, 1], and whether they exist."""
    tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return tile, tile < tiles


@triton.jit
def address_of(tile, offset, rows, columns, across, height, width, ONE_ROW: tl.constexpr):
    """Return the entries of a tensor at offsets within tiles, int64, and whether they are not padding.

    ONE_ROW: tensor and tiles have one row. There are no divisions then, and accesses are wide if width and columns are
    multiples of 16, for which Triton compiles a variant.
    """
    if ONE_ROW:
        at = tile * width + offset
        return at, (offset < width) & (at < columns)
    row = (tile // across) * height + offset // width
    column = (tile % across) * width + offset % width
    return row * columns + column, (offset < height * width) & (row < rows) & (column < columns)


@triton.jit(do_not_specialize=["tiles", "k", "rows", "across", "height"])
def select_kernel(
    x,
    values,
    offsets,
    tiles,
    k,
    rows,
    columns,
    across,
    height,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Store values and offsets of the k largest |x| of each tile, in ascending order of the offsets."""
    tile, exists = tiles_of(tiles, ROWS)
    offset = tl.arange(0, COLUMNS)[None, :]
    at, valid = address_of(tile, offset, rows, columns, across, height, width, ONE_ROW)
    valid = valid & exists
    loaded = tl.load(x + at, mask=valid, other=0.0)
    # The bits of magnitudes are ordered as the numbers. The largest key is excluded, as the search needs one above all.
    keys = tl.minimum(loaded.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    chosen = select_in_blocks(tl.where(valid, keys, -1), k)
    padding = exists & (offset < height * width) & ~valid
    missing = k - tl.sum(chosen.to(tl.int32), 1)[:, None]
    chosen = chosen | (padding & (tl.cumsum(padding.to(tl.int32), 1) <= missing))
    slot = tile * k + tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(offsets + slot, (offset + tl.zeros_like(slot)).to(tl.int64), mask=chosen)
    tl.store(values + slot, loaded, mask=chosen)


@triton.jit(do_not_specialize=["decay", "factor"])
def accumulate_kernel(residual, x, applied, n, decay, factor, TILE: tl.constexpr):
    """Set residual = factor * x + decay * residual if `applied`; the sum is rounded once, as PyTorch does on a GPU."""
    if tl.load(applied) != 0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = at < n
        before = tl.load(residual + at, mask=inside, other=0.0)
        added = tl.load(x + at, mask=inside, other=0.0) * factor
        after = tl.fma(before, tl.zeros_like(before) + decay, added)
        tl.store(residual + at, after, mask=inside)


@triton.jit(do_not_specialize=["tiles", "k", "rows", "across", "height"])
def keep_kernel(
    residual,
    offsets,
    errors,
    applied,
    tiles,
    k,
    rows,
    columns,
    across,
    height,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Store the errors of the selected entries in the residual, if `applied`."""
    if tl.load(applied) != 0:
        tile, exists = tiles_of(tiles, ROWS)
        number = tl.arange(0, ENTRIES)[None, :]
        selected = exists & (number < k)
        offset = tl.load(offsets + tile * k + number, mask=selected, other=0)
        error = tl.load(errors + tile * k + number, mask=selected, other=0.0)
        at, valid = address_of(tile, offset, rows, columns, across, height, width, ONE_ROW)
        tl.store(residual + at, error, mask=selected & valid)


@triton.jit
def value_of(values, means, index, active, FORM: tl.constexpr):
    """Return the values with these indices in one message, FP32."""
    if FORM == FLOAT:
        return tl.load(values + index, mask=active, other=0.0)
    elif FORM == TWO_BITS:
        byte = tl.load(values + (index >> 2), mask=active, other=0).to(tl.int32)
        code = (byte >> ((index & 3) * 2).to(tl.int32)) & 3
        return tl.load(means + code, mask=active, other=0.0)
    else:
        byte = tl.load(values + (index >> 3), mask=active, other=0).to(tl.int32)
        sign = ((byte >> (index & 7).to(tl.int32)) & 1) * 2 - 1
        return tl.load(means) * sign.to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "value_stride",
        "mean_stride",
        "offset_stride",
        "replicas",
        "divisor",
        "tiles",
        "k",
        "rows",
        "across",
        "height",
    ]
)
def mean_kernel(
    x,
    counts,
    values,
    means,
    codes,
    value_stride,
    mean_stride,
    offset_stride,
    replicas,
    divisor,
    tiles,
    k,
    rows,
    columns,
    across,
    height,
    width,
    FORM: tl.constexpr,
    OVER_SENDERS: tl.constexpr,
    LOW: tl.constexpr,
    UNARY: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the mean of all messages. `counts`: number of senders of each entry, int16, used inside the kernel.

    LOW, UNARY, CODE_BYTES: the code of the offsets, `kernels.scape.blocks.OffsetCode`.
    """
    tile, exists = tiles_of(tiles, ROWS)
    # Few entries at a time need few registers, so that many programs run at once and wait for memory together.
    PIECE: tl.constexpr = min(COLUMNS, 128)
    for first in range(0, COLUMNS, PIECE):
        offset = first + tl.arange(0, PIECE)[None, :]
        entry, inside = address_of(tile, offset, rows, columns, across, height, width, ONE_ROW)
        inside = inside & exists
        tl.store(x + entry, tl.zeros((ROWS, PIECE), tl.float32), mask=inside)
        if OVER_SENDERS:
            tl.store(counts + entry, tl.zeros((ROWS, PIECE), tl.int16), mask=inside)
    tl.debug_barrier()
    lane = tl.arange(0, LANES)[None, :]
    code = codes + tile * CODE_BYTES
    for _ in range(replicas):
        if UNARY > 0:
            used = exists & (lane < UNARY)
            bit = (tl.load(code + (lane >> 3), mask=used, other=0).to(tl.int32) >> (lane & 7)) & 1
            number = tl.cumsum(bit, 1) - bit
            active = used & (bit != 0)
            offset = (lane - number) << LOW
        else:
            active = exists & (lane < k)
            number = lane + tl.zeros((ROWS, LANES), tl.int32)
            offset = tl.zeros((ROWS, LANES), tl.int32)
        for i in tl.static_range(LOW):
            at = UNARY + number * LOW + i
            low = (tl.load(code + (at >> 3), mask=active, other=0).to(tl.int32) >> (at & 7)) & 1
            offset = offset | (low << i)
        to, valid = address_of(tile, offset, rows, columns, across, height, width, ONE_ROW)
        valid = valid & active
        value = value_of(values, means, tile * k + number, valid, FORM)
        tl.store(x + to, tl.load(x + to, mask=valid, other=0.0) + value, mask=valid)
        if OVER_SENDERS:
            tl.store(counts + to, tl.load(counts + to, mask=valid, other=0) + 1, mask=valid)
        tl.debug_barrier()
        code += offset_stride
        values += value_stride
        means += mean_stride
    for first in range(0, COLUMNS, PIECE):
        offset = first + tl.arange(0, PIECE)[None, :]
        entry, inside = address_of(tile, offset, rows, columns, across, height, width, ONE_ROW)
        inside = inside & exists
        total = tl.load(x + entry, mask=inside, other=0.0)
        if OVER_SENDERS:
            count = tl.load(counts + entry, mask=inside, other=1).to(tl.float32)
            total = tl.math.div_rn(total, tl.maximum(count, 1.0))
        else:
            total = tl.math.div_rn(total, tl.zeros_like(total) + divisor)
        tl.store(x + entry, total, mask=inside)

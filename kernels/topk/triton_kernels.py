"""Top-k's passes as Triton kernels, bitwise equal to `reference.py`.

A launch covers the tiles of many tensors, see `triton_tiles`. Values are added in the order of the replicas, one
message after the other, with a barrier in between: the entries of one message are distinct, so that no atomics are
needed.

Memory traffic per entry: selection reads the gradient and reads and writes the residual, 12 bytes. If values are
encoded, error feedback writes the selected entries once more. The mean writes 4 bytes and reads them from the cache.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.scape.triton_tiles import select_in_blocks, store_code
from torchtitan_scape.kernels.topk.triton_tiles import (
    MEAN,
    OFFSETS,
    PACKED,
    VALUE,
    column,
    entry_of,
    tensor_at,
    tile_starts,
    tiles_of,
)


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

"""First and last pass of a coded exchange as Triton kernels: from the tensors to messages, and back.

A program processes a tile: up to ROWS blocks of one slice, which lie in one message. A tile has four int32: slice, its
first block in the slice and in the chunk, and number of blocks. `slices` has a row of int64 per slice: tensor, first
entry, entries between the first entries of two blocks, and number of entries. `addresses` has the lists of `layout`,
int64, of `tensors` addresses each. With FULL all entries of a tile exist, and its storage is aligned to 16 bytes.

Memory traffic per entry of b bits: `encode_kernel` reads two tensors (8 bytes) and writes b / 8; `apply_kernel` reads
them again with two messages and writes both (16 bytes). The quantization error is computed again from the message that
was sent. If `encode_kernel` stores it (4 bytes more), `apply_kernel` reads one message and writes one tensor (4 bytes).
The first pass reads an owner's error and the second one writes it, 4
bytes each, in the message of this replica, and with `elsewhere` in all. `decode_kernel` writes a tensor (4 bytes), and
reads it if it adds to it (4 more). `move_kernel` reads two tensors and writes one (12 bytes). `error_kernel` reads two
tensors and a message and writes one (12 + b / 8 bytes). Values are bitwise those of the PyTorch operators of the
methods.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.codec.triton_passes import (
    bits_of,
    codes_of,
    decoded_sum,
    decoded_tile,
    round_nearest,
    scales_of,
    store_codes,
    values_of,
)
from torchtitan_scape.kernels.exchange import layout

_FIRST, _SECOND = tl.constexpr(layout.FIRST), tl.constexpr(layout.SECOND)
_OWNER_ERROR = tl.constexpr(layout.OWNER_ERROR)


@triton.jit
def tile_of(tiles, blocks):
    """Return slice, first block in the slice, message and first block in the message, int64, and number of blocks."""
    at = tiles + 4 * tl.program_id(0)
    slot = tl.load(at + 2)
    message = slot // blocks
    return (
        tl.load(at),
        tl.load(at + 1).to(tl.int64),
        message.to(tl.int64),
        (slot % blocks).to(tl.int64),
        tl.load(at + 3),
    )


@triton.jit
def pointer(address, tensors, first, LIST: tl.constexpr, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Return the pointer to an entry of a tensor in a list. address: that of the tensor in the first list."""
    data = tl.load(address + LIST * tensors).to(tl.pointer_type(DTYPE)) + first
    if FULL:
        data = tl.multiple_of(data, 16)
    return data


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Convert FP32 to a dtype, to nearest; the interpreter alone would round to BF16 toward zero."""
    # All bits of a NaN that an NVIDIA GPU computes are set: the addition that rounds would make it a zero.
    return tl.where(x == x, round_nearest(x, tl.bfloat16 == DTYPE), x).to(DTYPE)


@triton.jit
def everywhere(flag, at):
    """Broadcast a flag to a mask; the interpreter cannot combine a mask and a scalar."""
    return flag.to(tl.int32) + tl.zeros_like(at) > 0


@triton.jit
def first_entry(slices, number, row):
    """Return the position in its tensor, int64, of the first entry of a block of a slice."""
    return tl.load(slices + number * 4 + 1) + row * tl.load(slices + number * 4 + 2)


@triton.jit
def entries_of(
    slices, number, row, count, block, offset, BLOCK: tl.constexpr, FULL: tl.constexpr, REPEATS: tl.constexpr
):
    """Return the positions of entries after the first one of their tile, int32, and a mask of those that exist.

    block, offset: block in the tile and offset in the block of every entry, of shapes that can be combined.
    """
    stride = tl.load(slices + number * 4 + 2).to(tl.int32)
    if FULL:
        stride = tl.multiple_of(stride, 16)
        inside = (block < count) & (offset >= 0)
    else:
        left = (tl.minimum(tl.load(slices + number * 4 + 3) - row * BLOCK, count * BLOCK)).to(tl.int32)
        inside = block * BLOCK + offset < left
        if REPEATS:
            present = tl.minimum(left - block * BLOCK, BLOCK)
            inside = (block < count) & (offset >= 0)
            offset = offset % tl.maximum(present, 1)
    return block * stride + offset, inside


@triton.jit
def words_of(tiles, slices, addresses, blocks, CODE: tl.constexpr, FULL: tl.constexpr):
    """Return this program's entries as [WORDS, EACH], as messages are decoded.

    Returns:
        Address of the tensor, first entry of the tile in it, message, first block in the message, position of each word
        in the tile, position of each entry after the first one, and whether it exists.
    """
    BLOCK: tl.constexpr = CODE[2]
    EACH: tl.constexpr = 32 // bits_of(CODE[0])
    number, row, message, start, count = tile_of(tiles, blocks)
    address, first_at = addresses + tl.load(slices + number * 4), first_entry(slices, number, row)
    word = tl.arange(0, CODE[3] * BLOCK // EACH)[:, None]
    block, offset = word // (BLOCK // EACH), word % (BLOCK // EACH) * EACH + tl.arange(0, EACH)[None, :]
    at, inside = entries_of(slices, number, row, count, block, offset, BLOCK, FULL, False)
    return address, first_at, message, start, word * EACH, at, inside


@triton.jit(do_not_specialize=["tensors", "blocks", "size", "replica", "replicas", "factor", "elsewhere"])
def encode_kernel(
    tiles,
    slices,
    addresses,
    tensors,
    encoded,
    owned_error,
    applied,
    blocks,
    size,
    replica,
    replicas,
    factor,
    elsewhere,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    FULL: tl.constexpr,
    REPEATS: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_OWNER_ERROR: tl.constexpr,
    STORES_ERROR: tl.constexpr,
):
    """Encode first - second (SUBTRACTS), or first * factor + second, as messages of `blocks` blocks.

    HAS_OWNER_ERROR: add the owner's error; without `elsewhere` it is zero in the messages of other owners. In that of
    this replica it is divided by `replicas` and written to `owned_error` instead. STORES_ERROR: if `applied`, second =
    quantization error. With SUBTRACTS as well: encode second - first, or zeros unless `applied`, and then second =
    first + decoded value, rounded to the dtype of first, - second.
    """
    EACH: tl.constexpr = 32 // bits_of(FORM)
    number, row, message, start, count = tile_of(tiles, blocks)
    address, first_at = addresses + tl.load(slices + number * 4), first_entry(slices, number, row)
    block = tl.arange(0, ROWS)
    offset = tl.arange(0, BLOCK // EACH)[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    at, inside = entries_of(slices, number, row, count, block[:, None, None], offset, BLOCK, FULL, REPEATS)
    first = tl.load(pointer(address, tensors, first_at, _FIRST, DTYPE, FULL) + at, mask=inside, other=0.0).to(
        tl.float32
    )
    if HAS_SECOND:
        second = tl.load(
            pointer(address, tensors, first_at, _SECOND, SECOND_DTYPE, FULL) + at, mask=inside, other=0.0
        ).to(tl.float32)
    if SUBTRACTS and STORES_ERROR:
        value = tl.where(everywhere(tl.load(applied) != 0, at), second - first, 0.0)
    elif SUBTRACTS:
        value = first - second
    else:
        value = first * factor
        if HAS_SECOND:
            value += second
    if HAS_OWNER_ERROR:
        owned = everywhere(message == replica, at)
        read = inside & everywhere((message == replica) | (elsewhere != 0), at)
        error = tl.load(pointer(address, tensors, first_at, _OWNER_ERROR, tl.float32, FULL) + at, mask=read, other=0.0)
        divided = tl.div_rn(error, tl.zeros_like(error) + replicas.to(tl.float32))
        owned_at = (start + block[:, None, None]) * BLOCK + offset
        tl.store(owned_error + owned_at, divided, mask=inside & owned)
        value += tl.where(owned, 0.0, error)
    low, high = scales_of(value, FORM, tl.int16 == SCALE)
    codes = codes_of(value, low, high, FORM)
    if STORES_ERROR:
        sent = values_of(codes, low[:, None, None], high[:, None, None], FORM)
        error = rounded(first + sent, DTYPE).to(tl.float32) - second if SUBTRACTS else value - sent
        _, exists = entries_of(slices, number, row, count, block[:, None, None], offset, BLOCK, FULL, False)
        kept = exists & everywhere(tl.load(applied) != 0, at)
        seconds = pointer(address, tensors, first_at, _SECOND, SECOND_DTYPE, FULL) + at
        tl.store(seconds, rounded(error, SECOND_DTYPE), mask=kept)
    tile = message, start, blocks, size
    store_codes(encoded, tile, codes, low, high, block < count, (FORM, SCALE, BLOCK, ROWS))


@triton.jit(do_not_specialize=["tensors", "blocks", "size", "replica", "replicas", "factor", "elsewhere"])
def apply_kernel(
    tiles,
    slices,
    addresses,
    tensors,
    sent,
    encoded,
    owned_error,
    applied,
    blocks,
    size,
    replica,
    replicas,
    factor,
    elsewhere,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    FULL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    HAS_OWNER_ERROR: tl.constexpr,
    ERRORS_STORED: tl.constexpr,
):
    """Decode the means, and keep the quantization error of what was sent, if it is not stored yet (ERRORS_STORED).

    SUBTRACTS: if `applied`, first -= mean and second = first - error. Otherwise first = mean, and if `applied`,
    second = error. The owner's error of a mean, times `replicas`, is part of the error, or the new owner's error.
    """
    is_applied = tl.load(applied) != 0
    if SUBTRACTS:  # noqa: SIM102  # a constant and a tensor
        if not is_applied:
            return
    CODE: tl.constexpr = (FORM, SCALE, BLOCK, ROWS)
    address, first_at, message, start, word, at, inside = words_of(tiles, slices, addresses, blocks, CODE, FULL)
    tile = message, start, blocks, size
    mean = decoded_tile(encoded, tile, CODE)
    firsts = pointer(address, tensors, first_at, _FIRST, DTYPE, FULL) + at
    if HAS_SECOND:
        owned = everywhere(message == replica, at)
        kept = inside if SUBTRACTS else inside & everywhere(is_applied, at)
        owned_at = owned_error + start * BLOCK + word + tl.arange(0, 32 // bits_of(FORM))[None, :]
        rounding = tl.load(owned_at, mask=inside & owned, other=0.0) * replicas.to(tl.float32)
        errors = pointer(address, tensors, first_at, _OWNER_ERROR, tl.float32, FULL) + at
        seconds = pointer(address, tensors, first_at, _SECOND, SECOND_DTYPE, FULL) + at
        if not ERRORS_STORED:
            encoded_value = decoded_tile(sent, tile, CODE)
            first = tl.load(firsts, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(seconds, mask=inside, other=0.0).to(tl.float32)
            if SUBTRACTS:
                value = first - second
                first -= mean
            else:
                value = first * factor + second
            if HAS_OWNER_ERROR:
                added = inside & everywhere((message != replica) & (elsewhere != 0), at)
                value += tl.load(errors, mask=added, other=0.0)
            error = value - encoded_value
            if not HAS_OWNER_ERROR:
                error = tl.where(owned, error + rounding, error)
            if SUBTRACTS:
                error = first - error
                tl.store(firsts, first.to(DTYPE), mask=inside)
            tl.store(seconds, error.to(SECOND_DTYPE), mask=kept)
        elif not HAS_OWNER_ERROR:
            error = tl.load(seconds, mask=kept & owned, other=0.0).to(tl.float32)
            tl.store(seconds, (error + rounding).to(SECOND_DTYPE), mask=kept & owned)
        if HAS_OWNER_ERROR:
            written = kept & everywhere((message == replica) | (elsewhere != 0), at)
            tl.store(errors, tl.where(owned, rounding + 0.0, 0.0), mask=written)
    if not SUBTRACTS:
        tl.store(firsts, mean.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["tensors", "blocks", "size", "messages", "steps"])
def decode_kernel(
    tiles,
    slices,
    addresses,
    tensors,
    encoded,
    blocks,
    size,
    messages,
    steps,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    FULL: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Decode: first += message (ADDS), or first = mean of `messages` messages / `steps`."""
    CODE: tl.constexpr = (FORM, SCALE, BLOCK, ROWS)
    address, first_at, message, start, _, at, inside = words_of(tiles, slices, addresses, blocks, CODE, FULL)
    tile = message, start, blocks, size
    firsts = pointer(address, tensors, first_at, _FIRST, DTYPE, FULL) + at
    if ADDS:
        message_values = decoded_tile(encoded, tile, CODE)
        value = tl.load(firsts, mask=inside, other=0.0).to(tl.float32) + message_values
    else:
        total = decoded_sum(encoded, tile, 1, messages, CODE)
        none = tl.zeros_like(total)
        value = tl.div_rn(tl.div_rn(total, none + messages.to(tl.float32)), none + steps.to(tl.float32))
    tl.store(firsts, rounded(value, DTYPE), mask=inside)


@triton.jit(do_not_specialize=["tensors", "blocks", "factor"])
def move_kernel(
    tiles,
    slices,
    addresses,
    tensors,
    applied,
    blocks,
    factor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    FULL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
):
    """If `applied`, second = first - second (SUBTRACTS), or second += first * factor."""
    if tl.load(applied) == 0:
        return
    number, row, _, _, count = tile_of(tiles, blocks)
    address, first_at = addresses + tl.load(slices + number * 4), first_entry(slices, number, row)
    block, offset = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = entries_of(slices, number, row, count, block, offset, BLOCK, FULL, False)
    first = tl.load(pointer(address, tensors, first_at, _FIRST, DTYPE, FULL) + at, mask=inside, other=0.0)
    seconds = pointer(address, tensors, first_at, _SECOND, SECOND_DTYPE, FULL) + at
    first, second = first.to(tl.float32), tl.load(seconds, mask=inside, other=0.0).to(tl.float32)
    if SUBTRACTS:
        second = first - second
    else:
        second += first * factor
    tl.store(seconds, rounded(second, SECOND_DTYPE), mask=inside)


@triton.jit(do_not_specialize=["tensors", "blocks", "size", "factor"])
def error_kernel(
    tiles,
    slices,
    addresses,
    tensors,
    sent,
    applied,
    blocks,
    size,
    factor,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    SECOND_DTYPE: tl.constexpr,
    FULL: tl.constexpr,
):
    """If `applied`, second = first * factor + second - message: the quantization error of a message that was sent."""
    if tl.load(applied) == 0:
        return
    CODE: tl.constexpr = (FORM, SCALE, BLOCK, ROWS)
    address, first_at, message, start, _, at, inside = words_of(tiles, slices, addresses, blocks, CODE, FULL)
    tile = message, start, blocks, size
    firsts = pointer(address, tensors, first_at, _FIRST, DTYPE, FULL) + at
    seconds = pointer(address, tensors, first_at, _SECOND, SECOND_DTYPE, FULL) + at
    value = tl.load(firsts, mask=inside, other=0.0).to(tl.float32) * factor
    value += tl.load(seconds, mask=inside, other=0.0).to(tl.float32)
    tl.store(seconds, rounded(value - decoded_tile(sent, tile, CODE), SECOND_DTYPE), mask=inside)

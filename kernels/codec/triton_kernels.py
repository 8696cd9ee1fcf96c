"""Block codes as Triton kernels; `reference.py` specifies them, to the last bit.

A program works on a tile: ROWS blocks of BLOCK entries of one message, whose codes are words of 32 bits, EACH entries
to a word. Messages are read and written as words, and as scales, which are int16 (BF16) or int32 by their bits.
Divisions are IEEE's, sums of a block go by pairs, rounding is done on bits, and nothing depends on the width of a
warp. `enable_fp_fusion` is off at every launch.

Bytes an entry, of codes of b bits: encoding reads 4 and writes b / 8, and 4 with errors; decoding reads b / 8 and
writes 4; adding up n messages reads n b / 8 and writes 4. Scales come on top, 2 to 8 bytes a block.
"""

import struct

import triton
import triton.language as tl

from kernels.codec.reference import MIN_SCALE, SPLIT

_LEAST = tl.constexpr(struct.unpack("<i", struct.pack("<f", MIN_SCALE))[0])
_SPLIT = tl.constexpr(SPLIT)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# FP32 beyond it are whole numbers: what is added to it is rounded, half to even, and stands in the low bits.
_ROUNDS = tl.constexpr(1.5 * 2.0**23)
_ROUNDS_BITS = tl.constexpr(0x4B400000)


@triton.jit
def tile_of(blocks, ROWS: tl.constexpr):
    """The program's message, and its first block in it, int64."""
    tiles = tl.cdiv(blocks, ROWS)
    return (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles * ROWS).to(tl.int64)


@triton.jit
def scales_at(scales, message, first, blocks, size, BLOCK: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Where the scales of a tile begin."""
    EACH: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    message_at = scales + message * size * (16 // EACH)
    return message_at + tl.cast(blocks, tl.int64) * (BLOCK * BITS // 8 // EACH) + first * SCALES


@triton.jit
def sum_pairs(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """FP32 [ROWS] of [ROWS, BLOCK]: neighbours first. A sum of two has one order on every device."""
    for i in tl.static_range(10):
        if BLOCK >> i > 1:
            x = tl.sum(tl.reshape(x, (ROWS, BLOCK >> (i + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def round_up(x, BFLOAT16: tl.constexpr):
    """As `reference.round_up`; of what is not finite anything may come."""
    if BFLOAT16:
        x = ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def round_nearest(x, BFLOAT16: tl.constexpr):
    """Half to even, x not negative; of NaN anything may come."""
    if BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def settle(scales, largest):
    """Zero for blocks that are too small, NaN for those with an entry that is not finite; largest: as bits."""
    bits = tl.where(largest >= _LEAST, scales.to(tl.int32, bitcast=True), 0)
    return tl.where(largest >= _INFINITY, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(x, FORM: tl.constexpr, LARGEST: tl.constexpr, BFLOAT16: tl.constexpr):
    """FP32 [ROWS], two: of the smaller and of the larger magnitudes; the same twice where a block has one scale."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1] * x.shape[2]
    # As bits, magnitudes have the order of their numbers, and NaN is above all.
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 2), 1)
    if LARGEST is not None:
        most = largest.to(tl.float32, bitcast=True)
        low = settle(round_up(tl.div_rn(most, tl.full((ROWS,), LARGEST, tl.float32)), BFLOAT16), largest)
        high = low
    else:
        magnitudes = tl.reshape(tl.abs(x), (ROWS, BLOCK))
        mean = sum_pairs(magnitudes, ROWS, BLOCK) * (1.0 / BLOCK)
        if FORM == "1bit":
            low = settle(round_nearest(mean, BFLOAT16), largest)
            high = low
        else:
            large = magnitudes > (mean * _SPLIT)[:, None]
            count = tl.sum(large.to(tl.int32), 1)
            below = sum_pairs(tl.where(large, 0.0, magnitudes), ROWS, BLOCK)
            above = sum_pairs(tl.where(large, magnitudes, 0.0), ROWS, BLOCK)
            below = tl.div_rn(below, tl.maximum(BLOCK - count, 1).to(tl.float32))
            above = tl.where(count > 0, tl.div_rn(above, tl.maximum(count, 1).to(tl.float32)), below)
            low = settle(round_nearest(below, BFLOAT16), largest)
            high = settle(round_nearest(above, BFLOAT16), largest)
    return low, high


@triton.jit
def codes_of(x, low, high, shift, FORM: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr):
    """int32 [ROWS, WORDS, EACH]: the code of every entry. shift: as x, of the rounding; None rounds to nearest."""
    negative = (x < 0).to(tl.int32)
    if FORM == "1bit":
        codes = negative
    elif FORM == "2bit":
        large = tl.abs(x) > ((low + high) * 0.5)[:, None, None]
        codes = (large.to(tl.int32) << 1) | negative
    else:
        scale = low[:, None, None]
        told = scale > 0
        ratio = tl.where(told, tl.div_rn(x, tl.where(told, scale, 1.0)), 0.0)
        if FORM == "e2m1":
            y = tl.abs(ratio)
            codes = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32)
            codes += (y >= 1.75).to(tl.int32) + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32)
            codes = (codes + (y > 5.0).to(tl.int32)) | (negative << 3)
        elif FORM == "e3m0":
            y = tl.abs(ratio)
            codes = (y > 0.125).to(tl.int32) + (y >= 0.375).to(tl.int32) + (y > 0.75).to(tl.int32)
            codes += (y >= 1.5).to(tl.int32) + (y > 3.0).to(tl.int32) + (y >= 6.0).to(tl.int32)
            codes = (codes + (y > 12.0).to(tl.int32)) | (negative << 3)
        elif shift is not None:
            level = tl.minimum(tl.maximum(tl.floor(ratio + shift), -LARGEST), LARGEST)
            codes = level.to(tl.int32) & ((1 << BITS) - 1)
        else:
            # The scale is no less than the largest magnitude's share: no level is beyond the largest.
            codes = ((ratio + _ROUNDS).to(tl.int32, bitcast=True) - _ROUNDS_BITS) & ((1 << BITS) - 1)
    return codes


@triton.jit
def negated(x, sign):
    """x with the other sign where `sign`, int32, is 1, as it is where that is 0.

    By its bit: Triton 3.6 takes -x for 0 - x, which makes 0 of 0 and not -0.
    """
    return (x.to(tl.int32, bitcast=True) ^ (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def values_of(codes, low, high, FORM: tl.constexpr, BITS: tl.constexpr):
    """FP32 that codes, int32, stand for; the scales are of the same shape, or spread to it."""
    if FORM == "1bit":
        values = negated(low, codes & 1)
    elif FORM == "2bit":
        scale = tl.where(codes > 1, high, low)
        values = negated(scale, codes & 1)
    else:
        if FORM == "e2m1":
            code = codes & 7
            # In halves.
            level = tl.where(code < 2, code, (2 + (code & 1)) << (tl.maximum(code >> 1, 1) - 1)).to(tl.float32) * 0.5
            level = negated(level, codes >> 3)
        elif FORM == "e3m0":
            code = codes & 7
            # In eighths.
            level = tl.where(code > 0, 1 << code, 0).to(tl.float32) * 0.125
            level = negated(level, codes >> 3)
        else:
            level = ((codes << (32 - BITS)) >> (32 - BITS)).to(
                tl.float32
            )  # shifted back, the sign fills the upper bits
        values = level * low
    return values


@triton.jit
def load_scale(at, inside):
    bits = tl.load(at, mask=inside, other=0)
    if at.dtype.element_ty == tl.int16:
        bits = bits.to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_scale(at, scales, inside):
    bits = scales.to(tl.int32, bitcast=True)
    if at.dtype.element_ty == tl.int16:
        bits = (bits >> 16).to(tl.int16)
    tl.store(at, bits, mask=inside)


@triton.jit
def fill_up(scales, message, blocks, size, BLOCK: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Zeros from the last scale to the end of the message."""
    EACH: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    used = tl.cast(blocks, tl.int64) * (BLOCK * BITS // 8 // EACH + SCALES) + tl.arange(0, 8)
    end = tl.cast(size, tl.int64) * (16 // EACH)
    tl.store(scales + message * end + used, tl.zeros((8,), scales.dtype.element_ty), mask=used < end)


@triton.jit
def spread(x, SHIFT: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr):
    """[WORDS, EACH]: x [WORDS] in every column, column i shifted right by i * SHIFT where that is not 0.

    By joining x with itself, which keeps it all in the thread that has x: nothing goes through shared memory.
    """
    x = tl.reshape(x, (WORDS, 1))
    for i in tl.static_range(5):
        if EACH >> i > 1:
            other = x
            if SHIFT > 0:
                other = x >> (SHIFT * (EACH >> (i + 1)))
            x = tl.reshape(tl.join(x, other), (WORDS, 2 << i))
    return x


@triton.jit
def decoded(
    words,
    scales,
    message,
    first,
    blocks,
    size,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """FP32 [words of the tile, EACH]: what a message says of the tile's entries. Every word has its block's scales."""
    EACH: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = ROWS * BLOCK // EACH
    word, inside = inside_of(first, blocks, BLOCK // EACH, WORDS)
    packed = tl.load(words + message * size * 4 + first * (BLOCK // EACH) + word, mask=inside, other=0)
    codes = spread(packed, BITS, WORDS, EACH) & ((1 << BITS) - 1)
    at = scales_at(scales, message, first, blocks, size, BLOCK, BITS, SCALES) + word // (BLOCK // EACH) * SCALES
    low = spread(load_scale(at, inside), 0, WORDS, EACH)
    high = low
    if SCALES == 2:
        high = spread(load_scale(at + 1, inside), 0, WORDS, EACH)
    return values_of(codes, low, high, FORM, BITS)


@triton.jit
def inside_of(first, blocks, EACH: tl.constexpr, TILE: tl.constexpr):
    """Numbers of what a tile has, EACH to a block, from its first block on; and which of them exist."""
    number = tl.arange(0, TILE)
    return number, number < (blocks - first) * EACH


@triton.jit
def store_values(out, message, first, blocks, values, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[WORDS, EACH] to the tile of a row of `out`."""
    WORDS: tl.constexpr = values.shape[0]
    EACH: tl.constexpr = values.shape[1]
    word, inside = inside_of(first, blocks, BLOCK // EACH, WORDS)
    at = out + (message * blocks + first) * BLOCK + word[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tl.store(at, values, mask=inside[:, None])


@triton.jit
def uniform(key, first, ROWS: tl.constexpr, WORDS: tl.constexpr, EACH: tl.constexpr):
    """FP32 [ROWS, WORDS, EACH] of the entries from `first`, int64, on; as `rounding.uniform`."""
    FOURS: tl.constexpr = EACH // 4
    row, word = tl.arange(0, ROWS)[:, None, None], tl.arange(0, WORDS)[None, :, None]
    counter = first // 4 + (row * WORDS + word) * FOURS + tl.arange(0, FOURS)[None, None, :]
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    first_word, second, third, fourth = tl.philox(key, low, high, zero, zero)
    words = tl.join(tl.join(first_word, third), tl.join(second, fourth))
    return (tl.reshape(words, (ROWS, WORDS, EACH)) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["blocks", "size", "key"])
def encode_kernel(
    x,
    words,
    scales,
    error,
    blocks,
    size,
    key,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Rows of x to messages of `size` times 16 bytes, of `blocks` blocks each.

    HAS_ERROR: x minus what is decoded goes to `error`. STOCHASTIC: rounds by `key`.
    """
    EACH: tl.constexpr = 32 // BITS
    message, first = tile_of(blocks, ROWS)
    block, inside = inside_of(first, blocks, 1, ROWS)
    word = block[:, None] * (BLOCK // EACH) + tl.arange(0, BLOCK // EACH)[None, :]
    entry = word[:, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    start = (message * blocks + first) * BLOCK
    value = tl.load(x + start + entry, mask=inside[:, None, None], other=0.0)
    low, high = scales_of(value, FORM, LARGEST, scales.dtype.element_ty == tl.int16)
    shift = None
    if STOCHASTIC:
        shift = uniform(key, start, ROWS, BLOCK // EACH, EACH)
    codes = codes_of(value, low, high, shift, FORM, BITS, LARGEST)
    if HAS_ERROR:
        left = value - values_of(codes, low[:, None, None], high[:, None, None], FORM, BITS)
        tl.store(error + start + entry, left, mask=inside[:, None, None])

    packed = tl.sum(codes << (tl.arange(0, EACH) * BITS)[None, None, :], 2)
    tl.store(words + message * size * 4 + first * (BLOCK // EACH) + word, packed, mask=inside[:, None])
    at = scales_at(scales, message, first, blocks, size, BLOCK, BITS, SCALES)
    store_scale(at + block * SCALES, low, inside)
    if SCALES == 2:
        store_scale(at + block * SCALES + 1, high, inside)
    if first + ROWS >= blocks:
        fill_up(scales, message, blocks, size, BLOCK, BITS, SCALES)


@triton.jit(do_not_specialize=["blocks", "size"])
def decode_kernel(
    words,
    scales,
    out,
    blocks,
    size,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Messages of `size` times 16 bytes, of `blocks` blocks each, to as many rows of `out`."""
    message, first = tile_of(blocks, ROWS)
    values = decoded(words, scales, message, first, blocks, size, FORM, BITS, SCALES, BLOCK, ROWS)
    store_values(out, message, first, blocks, values, BLOCK, ROWS)


@triton.jit(do_not_specialize=["messages", "blocks", "size"])
def add_up_kernel(
    words,
    scales,
    out,
    messages,
    blocks,
    size,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sum of `messages` messages, in their order, in registers: `out` is written once."""
    message, first = tile_of(blocks, ROWS)
    total = tl.zeros((ROWS * BLOCK * BITS // 32, 32 // BITS), tl.float32)
    for i in range(messages):
        total += decoded(words, scales, message + i, first, blocks, size, FORM, BITS, SCALES, BLOCK, ROWS)
    store_values(out, message, first, blocks, total, BLOCK, ROWS)


@triton.jit(do_not_specialize=["turns"])
def turn_kernel(x, turns, FACTOR: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr):
    """Apply `rounding.hadamard_` to blocks of TURN entries, ROWS to a program. A stage is neighbours' sums, then their
    differences, so that after all five every entry is back in its place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = x + row[:, None] * TURN + tl.arange(0, TURN)[None, :]
    values = tl.load(at, mask=(row < turns)[:, None], other=0.0)
    for _ in tl.static_range(5):
        even, odd = tl.split(tl.reshape(values, (ROWS, TURN // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, TURN))
    tl.store(at, values * FACTOR, mask=(row < turns)[:, None])

"""Decoding of block codes, sums and encoded means as Triton kernels, bitwise equal to `reference.py`.

See `triton_kernels.py`.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.codec.triton_kernels import (
    bits_of,
    encode_tile,
    entries_of,
    inside_of,
    scales_at,
    scales_per_block,
    tile_of,
    values_of,
    words_at,
)


@triton.jit
def load_scale(at, inside):
    bits = tl.load(at, mask=inside, other=0)
    if at.dtype.element_ty == tl.int16:
        bits = bits.to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decoded(
    messages,
    message,
    first,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode a tile of a message to four vectors, FP32 [entries of the tile / 4]: every fourth entry, from the i-th on.

    A thread decodes four entries that follow each other, and loads their word and scales itself: the other threads of
    the word load them from the same cache line. One load for each word would be followed by an exchange between
    threads through shared memory. An exclusive or with zero at run time prevents loads of several words in one thread.
    """
    BITS: tl.constexpr = bits_of(FORM)
    EACH: tl.constexpr = 32 // BITS
    SCALES: tl.constexpr = scales_per_block(FORM)
    MASK: tl.constexpr = (1 << BITS) - 1
    four = tl.arange(0, ROWS * BLOCK // 4) ^ tl.minimum(blocks, 0)
    word = four // (EACH // 4)
    inside = word < (blocks - first) * (BLOCK // EACH)
    packed = tl.load(words_at(messages, message, first, size, BLOCK, FORM) + word, mask=inside, other=0)
    packed = packed >> (four % (EACH // 4) * (4 * BITS))
    at = scales_at(messages, message, first, blocks, size, BLOCK, FORM, SCALE) + word // (BLOCK // EACH) * SCALES
    low = load_scale(at, inside)
    high = low
    if SCALES == 2:
        high = load_scale(at + 1, inside)
    return (
        values_of(packed & MASK, low, high, FORM),
        values_of((packed >> BITS) & MASK, low, high, FORM),
        values_of((packed >> (2 * BITS)) & MASK, low, high, FORM),
        values_of((packed >> (3 * BITS)) & MASK, low, high, FORM),
    )


@triton.jit
def joined(a, b, c, d, EACH: tl.constexpr):
    """Return the entries of `decoded` in their order, [WORDS, EACH]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0] * 4 // EACH, EACH))


@triton.jit
def store_values(out, message, first, blocks, values, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Store [WORDS, EACH] to the tile of a row of `out`."""
    WORDS: tl.constexpr = values.shape[0]
    EACH: tl.constexpr = values.shape[1]
    word, inside = inside_of(first, blocks, BLOCK // EACH, WORDS)
    at = out + (message * blocks + first) * BLOCK + word[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tl.store(at, values, mask=inside[:, None])


@triton.jit
def decoded_sum(
    messages,
    message,
    step,
    count,
    first,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the sum of a tile of `count` messages from `message` on, every `step`-th, in their order."""
    a = tl.zeros((ROWS * BLOCK // 4,), tl.float32)
    b, c, d = a, a, a
    for i in range(count):
        e, f, g, h = decoded(messages, message + i * step, first, blocks, size, FORM, SCALE, BLOCK, ROWS)
        a, b, c, d = a + e, b + f, c + g, d + h
    return joined(a, b, c, d, 32 // bits_of(FORM))


@triton.jit(do_not_specialize=["blocks", "size"])
def decode_kernel(
    encoded,
    out,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode messages of `blocks` blocks and `size` * 16 bytes to rows of `out`."""
    message, first = tile_of(blocks, ROWS)
    a, b, c, d = decoded(encoded, message, first, blocks, size, FORM, SCALE, BLOCK, ROWS)
    store_values(out, message, first, blocks, joined(a, b, c, d, 32 // bits_of(FORM)), BLOCK, ROWS)


@triton.jit(do_not_specialize=["messages", "sums", "blocks", "size"])
def decode_and_sum_kernel(
    encoded,
    out,
    messages,
    sums,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode `messages` messages of every sum and add them in their order, in registers; `out` is written once."""
    message, first = tile_of(blocks, ROWS)
    total = decoded_sum(encoded, message, sums, messages, first, blocks, size, FORM, SCALE, BLOCK, ROWS)
    store_values(out, message, first, blocks, total, BLOCK, ROWS)


@triton.jit(do_not_specialize=["divisor", "messages", "blocks", "size"])
def encode_mean_kernel(
    encoded,
    out,
    error,
    divisor,
    messages,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    ADDS_ERROR: tl.constexpr,
):
    """Sum messages in their order, divide by `divisor`, and encode the result as one message, all in registers.

    HAS_ERROR: write the quantization error. ADDS_ERROR: add its value before to the result.
    """
    message, first = tile_of(blocks, ROWS)
    total = decoded_sum(encoded, message, 1, messages, first, blocks, size, FORM, SCALE, BLOCK, ROWS)
    total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    entry, inside = entries_of(first, blocks, BLOCK, ROWS, FORM)
    value, errors = tl.reshape(total, entry.shape), error + first * BLOCK + entry
    if ADDS_ERROR:
        value += tl.load(errors, mask=inside[:, None, None], other=0.0)
    encode_tile(value, None, errors, out, message, first, blocks, size, inside, FORM, SCALE, HAS_ERROR)

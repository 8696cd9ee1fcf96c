"""The functions of `reference.py` on Triton kernels, bitwise equal, one launch each. None synchronizes with the device.

A program processes a tile: ROWS blocks of BLOCK entries of one message. Its codes are 32-bit words with EACH entries
per word. Messages are accessed as words and as scales, whose bits are int16 (BF16) or int32 (FP32). Divisions follow
IEEE 754, blocks are summed pairwise, rounding works on the bits, and no result depends on the warp size.
`enable_fp_fusion` is off at every launch. CODE is (FORM, SCALE, BLOCK, ROWS), and a tile (message, its first block in
the message, blocks of a message, 16 bytes of a message).

Memory traffic per entry of b bits: encoding reads 4 bytes and writes b / 8, and 4 more with errors. Decoding reads
b / 8 and writes 4. Summing n messages reads n b / 8 and writes 4. The encoded mean of n messages reads n b / 8 and
writes b / 8, and 4 more with errors. Scales add 2 to 8 bytes per block.
"""

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import FORMATS, HADAMARD_SIZE
from torchtitan_scape.kernels.codec.reference import MAGNITUDES, MIN_SCALE, SPLIT, BlockCode
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import aligned

_MIN_SCALE_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", MIN_SCALE))[0])
_SPLIT = tl.constexpr(SPLIT)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Adding this constant rounds a number to an integer, half to even, and puts it in the low bits.
_ROUND_OFFSET = tl.constexpr(1.5 * 2.0**23)
_ROUND_OFFSET_BITS = tl.constexpr(0x4B400000)


@triton.constexpr_function
def bits_of(form):
    return FORMATS[form].bits


@triton.constexpr_function
def scales_per_block(form):
    return FORMATS[form].scales


@triton.constexpr_function
def largest_of(form):
    return FORMATS[form].largest


@triton.constexpr_function
def gain_of(form):
    return FORMATS[form].gain


@triton.constexpr_function
def tie_of(form, code):
    """Return the number between the levels of a code and of the next one."""
    return (MAGNITUDES[form][code] + MAGNITUDES[form][code + 1]) / 2


@triton.jit
def scales_at(messages, tile, CODE: tl.constexpr):
    """Return the pointer to the first scale of a tile, int16 (BF16) or int32 (FP32)."""
    message, first, blocks, size = tile
    FORM: tl.constexpr = CODE[0]
    SCALE: tl.constexpr = CODE[1]
    EACH: tl.constexpr = SCALE.primitive_bitwidth // 8
    scales = messages.to(tl.pointer_type(SCALE), bitcast=True) + message * size * (16 // EACH)
    return scales + tl.cast(blocks, tl.int64) * (CODE[2] * bits_of(FORM) // 8 // EACH) + first * scales_per_block(FORM)


@triton.jit
def words_at(messages, tile, CODE: tl.constexpr):
    """Return the pointer to the first word of codes of a tile, int32."""
    message, first, _, size = tile
    words = messages.to(tl.pointer_type(tl.int32), bitcast=True)
    return words + message * size * 4 + first * (CODE[2] * bits_of(CODE[0]) // 32)


@triton.jit
def tile_of(blocks, size, ROWS: tl.constexpr):
    """Return the tile of this program; its message and first block are int64."""
    tiles = tl.cdiv(blocks, ROWS)
    return (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles * ROWS).to(tl.int64), blocks, size


@triton.jit
def sum_pairs(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum [ROWS, BLOCK] pairwise to FP32 [ROWS], in an order that is the same on every device."""
    for i in tl.static_range(10):
        if BLOCK >> i > 1:
            x = tl.sum(tl.reshape(x, (ROWS, BLOCK >> (i + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def round_up(x, BFLOAT16: tl.constexpr):
    """Round up as `reference.round_up`; undefined for numbers that are not finite."""
    if BFLOAT16:
        x = ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def round_nearest(x, BFLOAT16: tl.constexpr):
    """Round x, not negative, to nearest, half to even; undefined for NaN."""
    if BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def finalize_scales(scales, largest):
    """Set scales of tiny blocks to zero, and of blocks with an entry that is not finite to NaN. largest: as bits."""
    bits = tl.where(largest >= _MIN_SCALE_BITS, scales.to(tl.int32, bitcast=True), 0)
    return tl.where(largest >= _INFINITY, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(x, FORM: tl.constexpr, BFLOAT16: tl.constexpr):
    """Return the scales of the small and of the large magnitudes, FP32 [ROWS] each; equal if a block has one scale."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1] * x.shape[2]
    # The bits of magnitudes are ordered as the numbers, with NaN above all.
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 2), 1)
    if largest_of(FORM) is not None:
        level = tl.full((ROWS,), largest_of(FORM), tl.float32)
        low = finalize_scales(round_up(tl.div_rn(largest.to(tl.float32, bitcast=True), level), BFLOAT16), largest)
        high = low
    else:
        magnitudes = tl.reshape(tl.abs(x), (ROWS, BLOCK))
        mean = sum_pairs(magnitudes, ROWS, BLOCK) * (1.0 / BLOCK)
        if FORM == "2bit":
            large = magnitudes > (mean * _SPLIT)[:, None]
            # In the shape of x: Triton 3.6 reduces a reshaped axis over the wrong threads, see `row_sum`.
            count = tl.sum(tl.sum((tl.abs(x) > (mean * _SPLIT)[:, None, None]).to(tl.int32), 2), 1)
            below = sum_pairs(tl.where(large, 0.0, magnitudes), ROWS, BLOCK)
            above = sum_pairs(tl.where(large, magnitudes, 0.0), ROWS, BLOCK)
            # Not `BLOCK - count`: the interpreter of Triton 3.8 cannot subtract a tensor from a constexpr.
            others = tl.full((ROWS,), BLOCK, tl.int32) - count
            below = tl.div_rn(below, tl.maximum(others, 1).to(tl.float32))
            above = tl.where(count > 0, tl.div_rn(above, tl.maximum(count, 1).to(tl.float32)), below)
            low = finalize_scales(round_nearest(below, BFLOAT16), largest)
            high = finalize_scales(round_nearest(above, BFLOAT16), largest)
        else:
            low = finalize_scales(round_nearest(mean * gain_of(FORM), BFLOAT16), largest)
            high = low
    return low, high


@triton.jit
def codes_of(x, low, high, FORM: tl.constexpr):
    """Return the code of every entry, int32 [ROWS, WORDS, EACH]."""
    MASK: tl.constexpr = (1 << bits_of(FORM)) - 1
    negative = (x < 0).to(tl.int32)
    if largest_of(FORM) is None:
        codes = negative
        if FORM == "2bit":
            codes |= (tl.abs(x) > ((low + high) * 0.5)[:, None, None]).to(tl.int32) << 1
    else:
        scale = low[:, None, None]
        valid = scale > 0
        ratio = tl.where(valid, tl.div_rn(x, tl.where(valid, scale, 1.0)), 0.0)
        if FORM == "e2m1" or FORM == "e3m0":
            codes = negative << 3
            for i in tl.static_range(7):  # ties are rounded to the even code
                above = tl.abs(ratio) > tie_of(FORM, i) if i % 2 == 0 else tl.abs(ratio) >= tie_of(FORM, i)
                codes += above.to(tl.int32)
        else:
            # No clamp: the scale was rounded up.
            codes = ((ratio + _ROUND_OFFSET).to(tl.int32, bitcast=True) - _ROUND_OFFSET_BITS) & MASK
    return codes


@triton.jit
def negated(x, sign):
    """Flip the sign of x where `sign`, int32, is 1.

    By the sign bit, because Triton 3.6 computes -x as 0 - x, which gives 0 instead of -0.
    """
    return (x.to(tl.int32, bitcast=True) ^ (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def values_of(codes, low, high, FORM: tl.constexpr):
    """Decode int32 codes to FP32. The scales have the shape of the codes, or broadcast to it."""
    SHIFT: tl.constexpr = 32 - bits_of(FORM)
    if FORM == "2bit":
        values = negated(tl.where(codes > 1, high, low), codes & 1)
    elif largest_of(FORM) is None:
        values = negated(low, codes & 1)
    elif FORM == "e2m1" or FORM == "e3m0":
        code = codes & 7
        if FORM == "e2m1":  # in units of 0.5
            level = tl.where(code < 2, code, (2 + (code & 1)) << (tl.maximum(code >> 1, 1) - 1)).to(tl.float32) * 0.5
        else:  # in units of 0.125
            level = tl.where(code > 0, 1 << code, 0).to(tl.float32) * 0.125
        values = negated(level, codes >> 3) * low
    else:
        # The arithmetic right shift extends the sign.
        values = ((codes << SHIFT) >> SHIFT).to(tl.float32) * low
    return values


@triton.jit
def store_scale(at, scales, inside):
    bits = scales.to(tl.int32, bitcast=True)
    if at.dtype.element_ty == tl.int16:
        bits = (bits >> 16).to(tl.int16)
    tl.store(at, bits, mask=inside)


@triton.jit
def store_padding(messages, tile, CODE: tl.constexpr):
    """Write zeros from the last scale to the end of the message."""
    message, _, blocks, size = tile
    SCALE: tl.constexpr = CODE[1]
    EACH: tl.constexpr = SCALE.primitive_bitwidth // 8
    SCALES: tl.constexpr = scales_per_block(CODE[0])
    used = tl.cast(blocks, tl.int64) * (CODE[2] * bits_of(CODE[0]) // 8 // EACH + SCALES) + tl.arange(0, 8)
    end = tl.cast(size, tl.int64) * (16 // EACH)
    scales = messages.to(tl.pointer_type(SCALE), bitcast=True) + message * end
    tl.store(scales + used, tl.zeros((8,), SCALE), mask=used < end)


@triton.jit
def inside_of(tile, EACH: tl.constexpr, ITEMS: tl.constexpr):
    """Return the indices of a tile's items, EACH per block, and a mask of those inside the message."""
    _, first, blocks, _ = tile
    number = tl.arange(0, ITEMS)
    return number, number < (blocks - first) * EACH


@triton.jit
def store_codes(messages, tile, codes, low, high, inside, CODE: tl.constexpr):
    """Store codes, int32 [ROWS, WORDS, EACH], and scales, FP32 [ROWS], of the blocks of a message that are `inside`."""
    WORDS: tl.constexpr = codes.shape[1]
    EACH: tl.constexpr = codes.shape[2]
    SCALES: tl.constexpr = scales_per_block(CODE[0])
    block = tl.arange(0, codes.shape[0])
    word = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    packed = tl.sum(codes << (tl.arange(0, EACH) * bits_of(CODE[0]))[None, None, :], 2)
    tl.store(words_at(messages, tile, CODE) + word, packed, mask=inside[:, None])
    at = scales_at(messages, tile, CODE) + block * SCALES
    store_scale(at, low, inside)
    if SCALES == 2:
        store_scale(at + 1, high, inside)


@triton.jit
def encode_tile(value, errors, messages, tile, inside, CODE: tl.constexpr, HAS_ERROR: tl.constexpr):
    """Encode FP32 [ROWS, WORDS, EACH], the blocks of a message that are `inside`, and store codes and scales.

    errors: pointers, for the quantization errors if HAS_ERROR.
    """
    FORM: tl.constexpr = CODE[0]
    low, high = scales_of(value, FORM, tl.int16 == CODE[1])
    codes = codes_of(value, low, high, FORM)
    if HAS_ERROR:
        difference = value - values_of(codes, low[:, None, None], high[:, None, None], FORM)
        tl.store(errors, difference, mask=inside[:, None, None])
    store_codes(messages, tile, codes, low, high, inside, CODE)
    if tile[1] + CODE[3] >= tile[2]:
        store_padding(messages, tile, CODE)


@triton.jit
def entries_of(tile, CODE: tl.constexpr):
    """Return the positions of a tile's entries after its first one, [ROWS, WORDS, EACH], and the blocks that exist."""
    EACH: tl.constexpr = 32 // bits_of(CODE[0])
    WORDS: tl.constexpr = CODE[2] // EACH
    block, inside = inside_of(tile, 1, CODE[3])
    word = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    return word[:, :, None] * EACH + tl.arange(0, EACH)[None, None, :], inside


@triton.jit(do_not_specialize=["blocks", "size"])
def encode_kernel(
    x,
    encoded,
    error,
    blocks,
    size,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ERROR: tl.constexpr,
):
    """Encode rows of x as messages of `blocks` blocks and `size` * 16 bytes.

    HAS_ERROR: write x minus the decoded values to `error`.
    """
    CODE: tl.constexpr = (FORM, SCALE, BLOCK, ROWS)
    tile = tile_of(blocks, size, ROWS)
    message, first, _, _ = tile
    entry, inside = entries_of(tile, CODE)
    start = (message * blocks + first) * BLOCK
    value = tl.load(x + start + entry, mask=inside[:, None, None], other=0.0)
    errors = error + start + entry
    encode_tile(value, errors, encoded, tile, inside, CODE, HAS_ERROR)


@triton.jit
def load_scale(at, inside):
    bits = tl.load(at, mask=inside, other=0)
    if at.dtype.element_ty == tl.int16:
        bits = bits.to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decoded(messages, tile, CODE: tl.constexpr):
    """Decode a tile of a message to four vectors, FP32 [entries of the tile / 4]: every fourth entry, from the i-th on.

    A thread decodes four entries that follow each other, and loads their word and scales itself: the other threads of
    the word load them from the same cache line. One load for each word would be followed by an exchange between
    threads through shared memory. An exclusive or with zero at run time prevents loads of several words in one thread.
    """
    _, first, blocks, _ = tile
    FORM: tl.constexpr = CODE[0]
    BLOCK: tl.constexpr = CODE[2]
    BITS: tl.constexpr = bits_of(FORM)
    EACH: tl.constexpr = 32 // BITS
    SCALES: tl.constexpr = scales_per_block(FORM)
    MASK: tl.constexpr = (1 << BITS) - 1
    four = tl.arange(0, CODE[3] * BLOCK // 4) ^ tl.minimum(blocks, 0)
    word = four // (EACH // 4)
    inside = word < (blocks - first) * (BLOCK // EACH)
    packed = tl.load(words_at(messages, tile, CODE) + word, mask=inside, other=0)
    packed = packed >> (four % (EACH // 4) * (4 * BITS))
    at = scales_at(messages, tile, CODE) + word // (BLOCK // EACH) * SCALES
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
def decoded_tile(messages, tile, CODE: tl.constexpr):
    """Decode a tile of a message to FP32 [WORDS, EACH]."""
    a, b, c, d = decoded(messages, tile, CODE)
    return joined(a, b, c, d, 32 // bits_of(CODE[0]))


@triton.jit
def store_values(out, tile, values, BLOCK: tl.constexpr):
    """Store [WORDS, EACH] to the tile of a row of `out`."""
    message, first, blocks, _ = tile
    WORDS: tl.constexpr = values.shape[0]
    EACH: tl.constexpr = values.shape[1]
    word, inside = inside_of(tile, BLOCK // EACH, WORDS)
    at = out + (message * blocks + first) * BLOCK + word[:, None] * EACH + tl.arange(0, EACH)[None, :]
    tl.store(at, values, mask=inside[:, None])


@triton.jit
def decoded_sum(messages, tile, step, count, CODE: tl.constexpr):
    """Return the sum of a tile of `count` messages from that of the tile on, every `step`-th, in their order."""
    message, first, blocks, size = tile
    a = tl.zeros((CODE[3] * CODE[2] // 4,), tl.float32)
    b, c, d = a, a, a
    for i in range(count):
        e, f, g, h = decoded(messages, (message + i * step, first, blocks, size), CODE)
        a, b, c, d = a + e, b + f, c + g, d + h
    return joined(a, b, c, d, 32 // bits_of(CODE[0]))


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
    tile = tile_of(blocks, size, ROWS)
    store_values(out, tile, decoded_tile(encoded, tile, (FORM, SCALE, BLOCK, ROWS)), BLOCK)


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
    tile = tile_of(blocks, size, ROWS)
    store_values(out, tile, decoded_sum(encoded, tile, sums, messages, (FORM, SCALE, BLOCK, ROWS)), BLOCK)


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
    CODE: tl.constexpr = (FORM, SCALE, BLOCK, ROWS)
    tile = tile_of(blocks, size, ROWS)
    total = decoded_sum(encoded, tile, 1, messages, CODE)
    total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    entry, inside = entries_of(tile, CODE)
    value, errors = tl.reshape(total, entry.shape), error + tile[1] * BLOCK + entry
    if ADDS_ERROR:
        value += tl.load(errors, mask=inside[:, None, None], other=0.0)
    encode_tile(value, errors, out, tile, inside, CODE, HAS_ERROR)


@triton.jit(do_not_specialize=["rows"])
def hadamard_kernel(x, rows, FACTOR: tl.constexpr, HADAMARD_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Apply `reference.hadamard_` to rows of HADAMARD_SIZE entries, ROWS per program.

    Each stage stores the sums of neighbors before their differences, so that the entries are in order after five.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = x + row[:, None] * HADAMARD_SIZE + tl.arange(0, HADAMARD_SIZE)[None, :]
    values = tl.load(at, mask=(row < rows)[:, None], other=0.0)
    for _ in tl.static_range(5):
        even, odd = tl.split(tl.reshape(values, (ROWS, HADAMARD_SIZE // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, HADAMARD_SIZE))
    tl.store(at, values * FACTOR, mask=(row < rows)[:, None])


_TILE = 2048  # entries of a tile; at least one block


class TritonBlockCode(BlockCode):
    """The code on Triton kernels. Tensors are contiguous. No values are stored between decoding and summing."""

    def encode(self, values: Tensor, error: Tensor | None = None) -> Tensor:
        assert values.is_contiguous() and (error is None or error.is_contiguous())
        rows, m = values.shape
        messages = torch.empty(rows, self.message_bytes(m), dtype=torch.uint8, device=values.device)
        tensors = values, messages, values if error is None else error
        sizes = m // self.block_size, messages.shape[1] // 16
        self._launch(encode_kernel, rows, tensors, sizes, HAS_ERROR=error is not None)
        return messages

    def hadamard_(self, x: Tensor) -> None:
        rows, per_tile = len(self.check_hadamard(x)), _TILE // HADAMARD_SIZE
        factor = float(torch.tensor(HADAMARD_SIZE**-0.5, dtype=torch.float32, device="cpu"))
        constants = dict(FACTOR=factor, HADAMARD_SIZE=HADAMARD_SIZE, ROWS=per_tile)
        launching.launch(hadamard_kernel, (-(-rows // per_tile),), x, rows, warps=4, **constants)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        self.check(messages, out.shape[1])
        assert out.is_contiguous()
        rows, m = out.shape
        sizes = m // self.block_size, messages.shape[1] // 16
        self._launch(decode_kernel, rows, (aligned_bytes(messages), out), sizes)

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        self.check(messages, out.shape[-1])
        assert out.is_contiguous()
        rows, sums, size = messages.shape if messages.ndim > 2 else (len(messages), 1, messages.shape[1])
        sizes = rows, sums, out.numel() // sums // self.block_size, size // 16
        self._launch(decode_and_sum_kernel, sums, (aligned_bytes(messages), out), sizes)

    def encode_mean(
        self, messages: Tensor, count: int, divisor: float, error: Tensor | None = None, adds_error: bool = False
    ) -> Tensor:
        self.check(messages, count)
        assert error is None or error.is_contiguous()
        rows, size = messages.shape
        out = torch.empty(1, size, dtype=torch.uint8, device=messages.device)
        tensors = aligned_bytes(messages), out, out if error is None else error
        flags = dict(HAS_ERROR=error is not None, ADDS_ERROR=adds_error and error is not None)
        self._launch(encode_mean_kernel, 1, tensors, (divisor, rows, count // self.block_size, size // 16), **flags)
        return out

    def _launch(
        self, kernel: Any, rows: int, tensors: Sequence[Tensor], sizes: Sequence[float], **constants: bool
    ) -> None:
        """Launch one program per tile and row. sizes[-2]: blocks of a row."""
        per_tile = _TILE // self.block_size
        launching.launch(
            kernel,
            (rows * -(-int(sizes[-2]) // per_tile),),
            *tensors,
            *sizes,
            warps=4,
            FORM=self.name,
            SCALE=scale_type(self.scale),
            BLOCK=self.block_size,
            ROWS=per_tile,
            **constants,
        )


def aligned_bytes(messages: Tensor) -> Tensor:
    """Return contiguous messages at a multiple of 16 bytes, a copy if necessary. Kernels access them as words."""
    messages = messages.contiguous()
    # An empty tensor has no address.
    return messages if aligned(messages) and messages.storage_offset() % 4 == 0 else messages.clone()


def scale_type(scale: torch.dtype) -> Any:
    """Return the constant SCALE of the kernels."""
    return tl.int16 if scale == torch.bfloat16 else tl.int32

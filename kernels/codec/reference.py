"""Block codes in plain PyTorch: the specification, and what runs on a CPU.

A message is the code of whole blocks: the codes of all entries, the first in the lowest bits of the first byte, then
all scales, then zeros up to 16 bytes. Scales are FP32, or BF16: then the product of a level and a scale is exact in
FP32. Everything is exact but the division by a scale and the sums of a mean, which are IEEE operations in a stated
order, so that every device makes the same bits.

A block with a number that is not finite arrives as NaN, all of it: nothing non-finite is rounded away. Where a level
times a scale, or the sum of a mean, is beyond the largest FP32 number, what is told arrives as an infinity.
"""

import torch
from torch import Tensor

from kernels.codec.formats import FORMATS, Format, message_bytes

# Blocks whose largest magnitude is below arrive as zeros (of signs): their scale's inverse would overflow.
LEAST = 2.0**-100
# A magnitude beyond so many times the block's mean is one of its larger ones. Of normal, Laplace and t(3) numbers the
# error is then 0.35, 0.41 and 0.53 of the root mean square, where the best split of each has 0.34, 0.41 and 0.49.
SPLIT = 1.5


def encode(x: Tensor, name: str, block: int, scale: torch.dtype, error: Tensor | None) -> Tensor:
    """uint8 (rows, message_bytes) of FP32 (rows, m). error: FP32 (rows, m), becomes x minus what is decoded."""
    form, (rows, m) = FORMATS[name], x.shape
    codes_end, scales_end = parts(form, m, block, scale)
    blocks = x.reshape(-1, block)
    scales = scales_of(blocks, form, scale)
    levels = codes_of(blocks, scales, form)
    if error is not None:
        torch.sub(x, values_of(levels, scales, form).view_as(x), out=error)
    size = message_bytes(name, m, block, scale.itemsize)
    messages = torch.zeros(rows, size, dtype=torch.uint8, device=x.device)
    messages[:, :codes_end] = pack(levels, form).view(rows, codes_end)
    messages[:, codes_end:scales_end] = bits_of(scales, scale).view(torch.uint8).view(rows, scales_end - codes_end)
    return messages


def decode(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """out, FP32 (rows, m), becomes what the messages, uint8 (rows, message_bytes), say."""
    form, (rows, m) = FORMATS[name], out.shape
    codes_end, scales_end = parts(form, m, block, scale)
    levels = unpack(messages[:, :codes_end].reshape(-1), form).view(-1, block)
    # A copy: a view of bytes as scales must begin at a multiple of their size.
    told = messages[:, codes_end:scales_end].clone(memory_format=torch.contiguous_format)
    scales = told.view(-1).view(scale).float().view(-1, form.scales)
    out.copy_(values_of(levels, scales, form).view(rows, m))


def add_up(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """out, FP32 (m,), becomes the sum of the messages, in FP32 and in the order of the rows."""
    one = torch.empty(1, out.numel(), dtype=torch.float32, device=out.device)
    out.zero_()
    for row in messages:
        decode(row.view(1, -1), name, block, scale, one)
        out += one.view(-1)


def parts(form: Format, m: int, block: int, scale: torch.dtype) -> tuple[int, int]:
    """Where in a message the codes end, and the scales."""
    codes_end = m * form.bits // 8
    return codes_end, codes_end + m // block * form.scales * scale.itemsize


def scales_of(blocks: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """FP32 (blocks, form.scales), of numbers that `dtype` has."""
    magnitudes = blocks.abs()
    largest = magnitudes.amax(1, keepdim=True)
    if form.largest is not None:
        # Upwards, so that no code lies beyond the largest.
        # A GPU divides by a number of the host by multiplying with its inverse; by one of its own it divides.
        scales = round_up(largest / largest.new_full((), form.largest), dtype)
    elif form.scales == 1:
        scales = (sum_pairs(magnitudes) / blocks.shape[1]).to(dtype).float()
    else:
        mean = sum_pairs(magnitudes) / blocks.shape[1]
        large = magnitudes > mean * SPLIT
        count = large.sum(1, keepdim=True)
        below = sum_pairs(torch.where(large, 0.0, magnitudes)) / (blocks.shape[1] - count).clamp(min=1)
        above = sum_pairs(torch.where(large, magnitudes, 0.0)) / count.clamp(min=1)
        above = torch.where(count > 0, above, below)  # not 0, which might be the nearer one
        scales = torch.cat((below, above), 1).to(dtype).float()
    scales = torch.where(largest >= LEAST, scales, 0.0)
    return torch.where(largest.isfinite(), scales, torch.nan)


def codes_of(blocks: Tensor, scales: Tensor, form: Format) -> Tensor:
    """uint8 (blocks, block): the code of every entry."""
    negative = blocks < 0
    if form.name == "1bit":
        return negative.to(torch.uint8)
    if form.name == "2bit":
        # Of the two the nearer one; the smaller of equally near ones.
        large = blocks.abs() > (scales[:, :1] + scales[:, 1:]) * 0.5
        return (large.to(torch.uint8) << 1) | negative.to(torch.uint8)
    ratio = torch.where(scales > 0, blocks / scales, 0.0)
    if form.name == "e2m1":
        # Half to even code, as float formats round.
        y = ratio.abs()
        code = (y > 0.25).to(torch.uint8) + (y >= 0.75) + (y > 1.25) + (y >= 1.75) + (y > 2.5) + (y >= 3.5) + (y > 5.0)
        return code | (negative.to(torch.uint8) << 3)
    if form.name == "e3m0":
        y = ratio.abs()
        code = (
            (y > 0.125).to(torch.uint8) + (y >= 0.375) + (y > 0.75) + (y >= 1.5) + (y > 3.0) + (y >= 6.0) + (y > 12.0)
        )
        return code | (negative.to(torch.uint8) << 3)
    assert form.largest is not None
    level = ratio.round().clamp(-form.largest, form.largest)
    return level.to(torch.int8).view(torch.uint8) & (2**form.bits - 1)


def values_of(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """FP32 (blocks, block) that the codes stand for."""
    if form.largest is None:
        scale = scales if form.name == "1bit" else torch.where(codes > 1, scales[:, 1:], scales[:, :1])
        return torch.where((codes & 1) > 0, -scale, scale)
    if form.name == "e2m1":
        magnitude, mantissa = (codes & 7).int(), (codes & 1).float()
        # Code 2 e + f is (2 + f) 2^e / 4 from e = 1 on, and f / 2 below.
        level = torch.where(magnitude < 2, 0.5 * mantissa, (2.0 + mantissa) * (1 << (magnitude >> 1)) * 0.25)
        level = torch.where(codes > 7, -level, level)
    elif form.name == "e3m0":
        magnitude = (codes & 7).int()
        level = torch.where(magnitude > 0, (1 << magnitude) * 0.125, 0.0)
        level = torch.where(codes > 7, -level, level)
    else:
        spare = 8 - form.bits  # shifted up and back, the sign fills the upper bits
        level = ((codes << spare).view(torch.int8) >> spare).float()
    return level * scales


def pack(codes: Tensor, form: Format) -> Tensor:
    """uint8: the codes, so many to a byte as go in, the first lowest."""
    each = 8 // form.bits
    groups = codes.view(-1, each)
    packed = groups[:, 0].clone()
    for i in range(1, each):
        packed |= groups[:, i] << (i * form.bits)
    return packed


def unpack(packed: Tensor, form: Format) -> Tensor:
    """The inverse of `pack`."""
    each = 8 // form.bits
    if each == 1:
        return packed
    shifts = torch.arange(0, 8, form.bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**form.bits - 1)).view(-1)


def sum_pairs(x: Tensor) -> Tensor:
    """FP32 (rows, 1): the sums of rows, length a power of two: neighbours first, then sums of neighbours, and so on."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number of `dtype`, FP32 or BF16, from x on, FP32 and not negative. Infinity beyond the largest."""
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    # Not of NaN, whose low bits may carry into the sign.
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & -0x10000).view(torch.float32))


def bits_of(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales, FP32 numbers that `dtype` has, one after the other as int16 or int32: their bits in `dtype`.

    A conversion would give NaN other bits on every device.
    """
    bits = scales.reshape(-1).view(torch.int32)
    return bits if dtype == torch.float32 else (bits >> 16).to(torch.int16)

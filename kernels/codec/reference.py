"""Block codes in plain PyTorch: the specification, and what runs on a CPU.

A message is the code of whole blocks: the codes of all entries, the first in the lowest bits of the first byte, then
all scales, then zeros up to 16 bytes. Scales are FP32, or BF16: then the product of a level and a scale is exact in
FP32. Everything is exact but the division by a scale and the sums of a mean, which are IEEE operations in a stated
order, so that every device makes the same bits.

A block with a number that is not finite arrives as NaN, all of it: nothing non-finite is rounded away. Where a level
times a scale, or the sum of a mean, is beyond the largest FP32 number, what is told arrives as an infinity.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.codec.formats import FORMATS, Format, message_bytes
from kernels.codec.rounding import hadamard_ as hadamard_
from kernels.codec.rounding import uniform
from kernels.common.launching import to_device

# Blocks whose largest magnitude is below arrive as zeros (of signs): their scale's inverse would overflow.
MIN_SCALE = 2.0**-100
# A magnitude beyond so many times the block's mean is one of its larger ones. Of normal, Laplace and t(3) numbers the
# error is then 0.35, 0.41 and 0.53 of the root mean square, where the best split of each has 0.34, 0.41 and 0.49.
SPLIT = 1.5
# Levels of codes that are floats, without their sign.
MAGNITUDES = {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "e3m0": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
# As many bytes as codes of so many bits have in a byte. The first of them is the lowest.
WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
CHUNK = 1 << 17  # entries that a CPU has in its cache with what is made of them


def encode(
    x: Tensor, name: str, block: int, scale: torch.dtype, error: Tensor | None, key: int | None = None
) -> Tensor:
    """uint8 (rows, message_bytes) of FP32 (rows, m). error: FP32 (rows, m), becomes x minus what is decoded.

    key: of stochastic rounding, by `rounding.uniform`; None rounds to nearest.
    """
    form, (rows, m) = FORMATS[name], x.shape
    codes_end, scales_end = parts(form, m, block, scale)
    blocks, lost = x.reshape(-1, block), None if error is None else error.view(-1, block)
    packed = torch.empty(rows * codes_end, dtype=torch.uint8, device=x.device).view(-1, block * form.bits // 8)
    scales = torch.empty(blocks.shape[0], form.scales, dtype=torch.float32, device=x.device)
    for part in chunks_of(blocks):
        scales[part] = scales_of(blocks[part], form, scale)
        shift = None if key is None else uniform(key, (part.start or 0) * block, blocks[part])
        packed[part] = pack(codes_of(blocks[part], scales[part], form, shift), form).view(-1, packed.shape[1])
        if lost is not None:
            torch.sub(blocks[part], values_of(packed[part], scales[part], form), out=lost[part])
    size = message_bytes(name, m, block, scale.itemsize)
    messages = torch.zeros(rows, size, dtype=torch.uint8, device=x.device)
    messages[:, :codes_end] = packed.view(rows, codes_end)
    messages[:, codes_end:scales_end] = bits_of(scales, scale).view(torch.uint8).view(rows, scales_end - codes_end)
    return messages


def decode(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """out, FP32 (rows, m), contiguous, becomes what the messages, uint8 (rows, message_bytes), say."""
    packed, scales = split(messages, FORMATS[name], out.shape[1], block, scale)
    values = out.view(-1, block)
    for part in chunks_of(values):
        values_of(packed[part], scales[part], FORMATS[name], values[part])


def decode_and_sum(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """out, FP32 (m,), contiguous, becomes the sum of the messages, in FP32 and in the order of the rows."""
    rows = [split(row.view(1, -1), FORMATS[name], out.numel(), block, scale) for row in messages]
    total = out.zero_().view(-1, block)
    for part in chunks_of(total):
        for packed, scales in rows:
            total[part] += values_of(packed[part], scales[part], FORMATS[name])


def chunks_of(blocks: Tensor) -> list[slice]:
    """Rows of (blocks, block) that go through all operations together: on a CPU so many as stay in its cache."""
    count, block = blocks.shape
    step = max(1, CHUNK // block) if blocks.is_cpu else max(1, count)
    return [slice(first, first + step) for first in range(0, count, step)]


def split(messages: Tensor, form: Format, m: int, block: int, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, uint8 (blocks, bytes), and scales, FP32 (blocks, form.scales), of messages of m entries."""
    codes_end, scales_end = parts(form, m, block, scale)
    codes = messages[:, :codes_end].contiguous().view(-1, block * form.bits // 8)
    # A copy: a view of bytes as scales must begin at a multiple of their size.
    told = messages[:, codes_end:scales_end].clone(memory_format=torch.contiguous_format)
    return codes, told.view(-1).view(scale).float().view(-1, form.scales)


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
    scales = torch.where(largest >= MIN_SCALE, scales, 0.0)
    return torch.where(largest.isfinite(), scales, torch.nan)


def codes_of(blocks: Tensor, scales: Tensor, form: Format, shift: Tensor | None = None) -> Tensor:
    """uint8 (blocks, block): the code of every entry. shift: in [0, 1), of the rounding; None rounds to nearest."""
    if form.largest is None:
        codes = torch.lt(blocks, 0.0, out=torch.empty_like(blocks))  # a CPU takes far longer for bool
        if form.name == "2bit":
            # Of the two the nearer one; the smaller of equally near ones.
            magnitudes = blocks.abs()
            codes += torch.gt(magnitudes, (scales[:, :1] + scales[:, 1:]) * 0.5, out=magnitudes).mul_(2.0)
        return codes.to(torch.int8).view(torch.uint8)
    unit = MAGNITUDES[form.name][1] / 2 if form.name in MAGNITUDES else 1.0
    ratio = blocks / torch.where(scales > 0, scales * unit, torch.inf)
    if shift is not None:
        assert form.largest is not None
        ratio.nan_to_num_(0.0).add_(shift).floor_().clamp_(-form.largest, form.largest)
    if form.name not in MAGNITUDES:  # the scale is no less than the largest magnitude's share
        return ratio.round_().nan_to_num_(0.0).to(torch.int8).view(torch.uint8) & (2**form.bits - 1)
    # Ties are whole multiples of the first one, the unit. The sum is even on a multiple, odd between two.
    place = ratio.floor().add_(ratio.ceil_()).nan_to_num_(0.0)
    place += blocks.sign()  # the ratio of what is negative may be 0
    table = code_table(form, blocks.device)
    index = place.add_(table.numel() // 2).to(torch.int32)
    return table.index_select(0, index.view(-1)).view(blocks.shape)


def values_of(packed: Tensor, scales: Tensor, form: Format, out: Tensor | None = None) -> Tensor:
    """FP32 (blocks, block) that packed codes, uint8 (blocks, bytes), stand for; in `out` where it is given."""
    if form.name == "2bit":
        told = torch.stack((scales, -scales), 2).view(-1)  # of a block in the order of the codes
        first = torch.arange(0, told.numel(), 4, dtype=torch.int32, device=told.device)
        places = unpack(packed.view(-1), form).view(len(packed), -1) + first[:, None]
        values = told.index_select(0, places.view(-1)).view(places.shape)
        return values if out is None else out.copy_(values)
    if form.bits == 8:
        levels = packed.view(torch.int8)
    elif form.bits == 4:
        levels = level_table(form, packed.device).index_select(0, packed.view(-1).int()).view(torch.float32)
    else:
        levels = 1 - 2 * unpack(packed.view(-1), form).view(torch.int8)
    return torch.mul(levels.view(len(packed), -1), scales, out=out)


@cache
def code_table(form: Format, device: torch.device) -> Tensor:
    """uint8 (2 h + 1,): the code of an entry by h + floor + ceil + sign of it, in units of the first tie.

    Ties go to the even code, as float formats round.
    """
    magnitudes = torch.tensor(MAGNITUDES[form.name], dtype=torch.float64)
    ties = (magnitudes[1:] + magnitudes[:-1]) / magnitudes[1]
    half = round(2 * MAGNITUDES[form.name][-1] / MAGNITUDES[form.name][1]) * 2 + 2
    place = torch.arange(-half, half + 1)
    beyond = (place.abs() - 1).clamp(min=0)[:, None] / 2
    up = torch.arange(len(ties)) % 2 == 1
    codes = torch.where(up, beyond >= ties, beyond > ties).sum(1)
    return to_device((codes + 8 * (place < 0)).to(torch.uint8), device)


@cache
def level_table(form: Format, device: torch.device) -> Tensor:
    """int64 (256,): the levels, FP32, of a byte's two codes."""
    if form.name in MAGNITUDES:
        magnitudes = torch.tensor(MAGNITUDES[form.name], dtype=torch.float32)
        levels = torch.cat((magnitudes, -magnitudes))
    else:
        levels = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32)
    codes = unpack(torch.arange(256, dtype=torch.uint8), form)
    return to_device(levels[codes.long()].view(torch.int64), device)


@cache
def byte_table(bits: int, device: torch.device) -> Tensor:
    """int16, int32 or int64 (256,): the codes of a byte, a byte each."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes = (torch.arange(256, dtype=torch.uint8)[:, None] >> shifts) & (2**bits - 1)
    return to_device(codes.view(WORDS[bits]).view(-1), device)


def pack(codes: Tensor, form: Format) -> Tensor:
    """uint8: the codes, so many to a byte as go in, the first lowest."""
    if form.bits == 8:
        return codes.view(-1)
    words = codes.view(-1).view(WORDS[form.bits])
    packed = words.clone()
    for i in range(1, 8 // form.bits):
        packed |= words >> (i * (8 - form.bits))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, form: Format) -> Tensor:
    """The inverse of `pack`."""
    if form.bits == 8:
        return packed
    return byte_table(form.bits, packed.device).index_select(0, packed.int()).view(torch.uint8)


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

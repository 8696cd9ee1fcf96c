"""Block codes in plain PyTorch: the specification, and the CPU implementation.

A message encodes whole blocks: the codes of all entries, the first one in the lowest bits of the first byte, then all
scales, then zeros up to a multiple of 16 bytes. Scales are FP32 or BF16; with BF16 the product of a level and a scale
is exact in FP32. All operations are exact apart from the division by a scale and the sums of a mean. These are IEEE
operations in a specified order, so every device produces the same bits.

A block with a number that is not finite is decoded as NaN in all entries, so that NaN and Inf are never hidden by
rounding. If a level times a scale, or the sum of a mean, exceeds the largest FP32 number, infinity is decoded.
"""

from functools import cache

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import BLOCK, FORMATS, HADAMARD_SIZE, Format, MessageSize
from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.kernels.common.tensors import add_in_order_, divisor_of

# Blocks with a smaller largest magnitude are decoded as (signed) zeros: the inverse of their scale would overflow.
MIN_SCALE = 2.0**-100
# "2bit": magnitudes above this multiple of the block's mean are large ones. For normal, Laplace and t(3) distributions
# the error is 0.35, 0.41 and 0.53 of the root mean square; the best split of each has 0.34, 0.41 and 0.49.
SPLIT = 1.5
# Levels of the floating-point formats, without sign.
MAGNITUDES = {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "e3m0": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
# Integer dtype with one byte per code of a packed byte, by the bits of a code. The first code is the lowest byte.
WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
CHUNK = 1 << 17  # entries that stay in a CPU's cache together with all temporaries


class BlockCode:
    """A `topology.stages.Codec` that quantizes FP32 values in blocks with separate scales.

    Args:
        name: Key of `kernels.codec.formats.FORMATS`: "int8", "int4", "e2m1", "e3m0", "2bit", "1bit" or
            "1bit_unbiased".
        block: Entries that share scales, a power of two from 32 to 1024.
        scale: Dtype of the scales in messages, FP32 or BF16.

    Raises:
        ValueError: An unknown name, or an unsupported block or scale.
    """

    def __init__(self, name: str, block: int = BLOCK, scale: torch.dtype = torch.bfloat16) -> None:
        if name not in FORMATS:
            raise ValueError(f"there is no block code {name!r}; known are {', '.join(FORMATS)}")
        if block not in (32, 64, 128, 256, 512, 1024):
            raise ValueError(f"blocks of {block} entries; they must have a power of two of them, from 32 to 1024")
        if scale not in (torch.float32, torch.bfloat16):
            raise ValueError(f"scales in {scale}; they must be torch.float32 or torch.bfloat16")
        self.name, self.form, self.block_size, self.scale = name, FORMATS[name], block, scale

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes and scales of a block."""
        return self.block_size * self.form.bits // 8 + self.form.scales * self.scale.itemsize

    def message_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` entries. Raises ValueError if blocks are not complete."""
        if count % self.block_size:
            raise ValueError(f"{count} entries in blocks of {self.block_size}; pad them with zeros to whole blocks")
        return MessageSize(self.name, self.block_size, self.scale.itemsize)(count)

    def encode(self, values: Tensor, error: Tensor | None = None) -> Tensor:
        """Encode FP32 (rows, m) as uint8 (rows, message_bytes(m)).

        Args:
            values: FP32 (rows, m); m is a multiple of `block_size`.
            error: FP32 (rows, m), becomes `values` minus the decoded values; it may be `values`.
        """
        form, block, (rows, m) = self.form, self.block_size, values.shape
        size, (codes_end, scales_end) = self.message_bytes(m), self._ends(m)
        blocks, errors = values.reshape(-1, block), None if error is None else error.view(-1, block)
        packed = torch.empty(rows * codes_end, dtype=torch.uint8, device=values.device)
        packed = packed.view(-1, block * form.bits // 8)
        scales = torch.empty(blocks.shape[0], form.scales, dtype=torch.float32, device=values.device)
        for part in chunks_of(blocks):
            scales[part] = scales_of(blocks[part], form, self.scale)
            packed[part] = pack(codes_of(blocks[part], scales[part], form), form).view(-1, packed.shape[1])
            if errors is not None:
                torch.sub(blocks[part], values_of(packed[part], scales[part], form), out=errors[part])
        messages = torch.zeros(rows, size, dtype=torch.uint8, device=values.device)
        messages[:, :codes_end] = packed.view(rows, codes_end)
        bits = bits_of(scales, self.scale).view(torch.uint8)
        messages[:, codes_end:scales_end] = bits.view(rows, scales_end - codes_end)
        return messages

    def hadamard_(self, x: Tensor) -> None:
        """Multiply each 32 entries of x, FP32, contiguous, by the Hadamard matrix H / sqrt(32), in place.

        Each of the five stages replaces the entries by the sums of neighbors, followed by their differences. The
        transform is its own inverse. Raises ValueError if the number of entries is not a multiple of 32.
        """
        values = self.check_hadamard(x)
        for _ in range(5):
            even, odd = values[:, ::2], values[:, 1::2]
            values = torch.cat((even + odd, even - odd), 1)
        torch.mul(values, HADAMARD_SIZE**-0.5, out=x.view(-1, HADAMARD_SIZE))

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Decode uint8 (rows, message_bytes(m)) into `out`, FP32 (rows, m), contiguous."""
        self.check(messages, out.shape[1])
        packed, scales = self._split(messages, out.shape[1])
        values = out.view(-1, self.block_size)
        for part in chunks_of(values):
            values_of(packed[part], scales[part], self.form, values[part])

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of the decoded messages to `out`, FP32 (m,), contiguous. Rows are added in FP32, in row order.

        Messages (rows, k, bytes) have k sums, `out` (k, m).
        """
        self.check(messages, out.shape[-1])
        count, total = len(messages), out.zero_().view(-1, self.block_size)
        if not messages.numel():
            return
        packed, scales = self._split(messages.reshape(-1, messages.shape[-1]), out.shape[-1])
        packed, scales = packed.unflatten(0, (count, -1)), scales.unflatten(0, (count, -1))
        for part in chunks_of(total, count):
            values = values_of(packed[:, part].flatten(0, 1), scales[:, part].flatten(0, 1), self.form)
            add_in_order_(total[part], values.view(count, -1, self.block_size))

    def encode_mean(
        self, messages: Tensor, count: int, divisor: float, error: Tensor | None = None, adds_error: bool = False
    ) -> Tensor:
        """Sum messages as `decode_and_sum`, divide by `divisor`, and encode the result.

        Args:
            messages: uint8 (rows, message_bytes(count)).
            count: Entries of a message.
            divisor: Number of rows for their mean.
            error: FP32 (count,), becomes the quantization error of the result.
            adds_error: Add `error` to the result before it is encoded.

        Returns:
            uint8 (1, message_bytes(count)).
        """
        self.check(messages, count)
        mean = torch.empty(count, dtype=torch.float32, device=messages.device)
        self.decode_and_sum(messages, mean)
        mean.div_(divisor_of(mean, divisor))
        if error is not None and adds_error:
            mean += error
        return self.encode(mean.view(1, -1), None if error is None else error.view(1, -1))

    def check(self, messages: Tensor, m: int) -> None:
        """Raise ValueError for messages of another length; a kernel would read beyond their end."""
        if messages.shape[-1] != self.message_bytes(m):
            raise ValueError(
                f"messages of {messages.shape[-1]} bytes; those of {m} entries have {self.message_bytes(m)}"
            )

    def check_hadamard(self, x: Tensor) -> Tensor:
        """Return x as rows of the Hadamard transform."""
        if x.numel() % HADAMARD_SIZE:
            raise ValueError(f"{x.numel()} entries; a Hadamard transform needs a multiple of {HADAMARD_SIZE}")
        return x.view(-1, HADAMARD_SIZE)

    def _split(self, messages: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """Split messages of m entries into codes, uint8 (blocks, bytes), and scales, FP32 (blocks, scales of one)."""
        codes_end, scales_end = self._ends(m)
        codes = messages[:, :codes_end].contiguous().view(-1, self.block_size * self.form.bits // 8)
        # A copy, because bytes can be viewed as scales only at a multiple of their size.
        scales = messages[:, codes_end:scales_end].clone(memory_format=torch.contiguous_format)
        return codes, scales.view(-1).view(self.scale).float().view(-1, self.form.scales)

    def _ends(self, m: int) -> tuple[int, int]:
        """Return (end of the codes, end of the scales) in a message, in bytes."""
        codes_end = m * self.form.bits // 8
        return codes_end, codes_end + m // self.block_size * self.form.scales * self.scale.itemsize


def fill_last_block(buffer: Tensor, first: int, length: int, block: int) -> None:
    """Repeat the entries of a shorter last block of [first, first + length) in the rest of the block.

    Zeros would reduce the mean magnitude, which codes of one and two bits have as their scale.
    """
    if short := length % block:
        end = first + length
        buffer[end : end + block - short] = buffer[end - short : end].repeat(-(-block // short))[short:block]


def chunks_of(blocks: Tensor, copies: int = 1) -> list[slice]:
    """Return slices of the rows of (blocks, block) that are processed together; on a CPU they fit in its cache.

    copies: of the slice that are in the cache together.
    """
    count, block = blocks.shape
    step = max(1, CHUNK // block // max(1, copies)) if blocks.is_cpu else max(1, count)
    return [slice(first, first + step) for first in range(0, count, step)]


def scales_of(blocks: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Return the scales, FP32 (blocks, form.scales), rounded to numbers of `dtype`."""
    magnitudes = blocks.abs()
    largest = magnitudes.amax(1, keepdim=True)
    if form.largest is not None:
        # Rounded up, so that no entry exceeds the largest code.
        scales = round_up(largest / divisor_of(largest, form.largest), dtype)
    elif form.scales == 1:
        scales = (sum_pairs(magnitudes) / blocks.shape[1] * form.gain).to(dtype).float()
    else:
        mean = sum_pairs(magnitudes) / blocks.shape[1]
        large = magnitudes > mean * SPLIT
        count = large.sum(1, keepdim=True)
        below = sum_pairs(torch.where(large, 0.0, magnitudes)) / (blocks.shape[1] - count).clamp(min=1)
        above = sum_pairs(torch.where(large, magnitudes, 0.0)) / count.clamp(min=1)
        above = torch.where(count > 0, above, below)  # not 0, which could be nearer to an entry
        scales = torch.cat((below, above), 1).to(dtype).float()
    scales = torch.where(largest >= MIN_SCALE, scales, 0.0)
    return torch.where(largest.isfinite(), scales, torch.nan)


def codes_of(blocks: Tensor, scales: Tensor, form: Format) -> Tensor:
    """Return the code of every entry, uint8 (blocks, block)."""
    if form.largest is None:
        codes = torch.lt(blocks, 0.0, out=torch.empty_like(blocks))  # on a CPU far faster than with bool
        if form.name == "2bit":
            # The nearer of the two scales; the smaller one for ties.
            magnitudes = blocks.abs()
            codes += torch.gt(magnitudes, (scales[:, :1] + scales[:, 1:]) * 0.5, out=magnitudes).mul_(2.0)
        return codes.to(torch.int8).view(torch.uint8)
    step = MAGNITUDES[form.name][1] / 2 if form.name in MAGNITUDES else 1.0
    ratio = blocks / torch.where(scales > 0, scales * step, torch.inf)
    if form.name not in MAGNITUDES:  # no clamp: the scale was rounded up
        return ratio.round_().nan_to_num_(0.0).to(torch.int8).view(torch.uint8) & (2**form.bits - 1)
    # Ties are whole multiples of `step`. floor + ceil is even on a multiple, and odd between two.
    position = ratio.floor().add_(ratio.ceil_()).nan_to_num_(0.0)
    position += blocks.sign()  # the ratio of a negative number may underflow to 0
    table = code_table(form, blocks.device)
    index = position.add_(table.numel() // 2).to(torch.int32)
    return table.index_select(0, index.view(-1)).view(blocks.shape)


def values_of(packed: Tensor, scales: Tensor, form: Format, out: Tensor | None = None) -> Tensor:
    """Decode packed codes, uint8 (blocks, bytes), to FP32 (blocks, block), in `out` if it is given."""
    if form.name == "2bit":
        levels = torch.stack((scales, -scales), 2).view(-1)  # the four levels of each block in the order of the codes
        first = torch.arange(0, levels.numel(), 4, dtype=torch.int32, device=levels.device)
        indices = unpack(packed.reshape(-1), form).view(len(packed), -1) + first[:, None]
        values = levels.index_select(0, indices.view(-1)).view(indices.shape)
        return values if out is None else out.copy_(values)
    if form.bits == 8:
        levels = packed.view(torch.int8)
    elif form.bits == 4:
        levels = level_table(form, packed.device).index_select(0, packed.reshape(-1).int()).view(torch.float32)
    else:
        levels = 1 - 2 * unpack(packed.reshape(-1), form).view(torch.int8)
    return torch.mul(levels.view(len(packed), -1), scales, out=out)


@cache
def code_table(form: Format, device: torch.device) -> Tensor:
    """Return the table of `codes_of`, uint8 (2 h + 1,), indexed by h + floor + ceil + sign of an entry.

    Floor and ceil are in units of the first tie. Ties are rounded to the even code, as in floating-point formats.
    """
    magnitudes = torch.tensor(MAGNITUDES[form.name], dtype=torch.float64, device="cpu")
    ties = (magnitudes[1:] + magnitudes[:-1]) / magnitudes[1]
    half = round(2 * MAGNITUDES[form.name][-1] / MAGNITUDES[form.name][1]) * 2 + 2
    position = torch.arange(-half, half + 1, device="cpu")
    magnitude = (position.abs() - 1).clamp(min=0)[:, None] / 2
    up = torch.arange(len(ties), device="cpu") % 2 == 1
    codes = torch.where(up, magnitude >= ties, magnitude > ties).sum(1)
    return to_device((codes + 8 * (position < 0)).to(torch.uint8), device)


@cache
def level_table(form: Format, device: torch.device) -> Tensor:
    """Return int64 (256,): the two FP32 levels of each byte with two codes."""
    if form.name in MAGNITUDES:
        magnitudes = torch.tensor(MAGNITUDES[form.name], dtype=torch.float32, device="cpu")
        levels = torch.cat((magnitudes, -magnitudes))
    else:
        levels = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32, device="cpu")
    codes = unpack(torch.arange(256, dtype=torch.uint8, device="cpu"), form)
    return to_device(levels[codes.long()].view(torch.int64), device)


@cache
def byte_table(bits: int, device: torch.device) -> Tensor:
    """Return int16, int32 or int64 (256,): the codes of each byte, one per byte of the integer."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")
    codes = (torch.arange(256, dtype=torch.uint8, device="cpu")[:, None] >> shifts) & (2**bits - 1)
    return to_device(codes.view(WORDS[bits]).view(-1), device)


def pack(codes: Tensor, form: Format) -> Tensor:
    """Pack codes, one per byte, into uint8 with 8 / bits codes per byte, the first one in the lowest bits."""
    if form.bits == 8:
        return codes.view(-1)
    words = codes.view(-1).view(WORDS[form.bits])
    packed = words.clone()
    for i in range(1, 8 // form.bits):
        packed |= words >> (i * (8 - form.bits))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, form: Format) -> Tensor:
    """Unpack codes to one per byte; the inverse of `pack`."""
    if form.bits == 8:
        return packed
    return byte_table(form.bits, packed.device).index_select(0, packed.int()).view(torch.uint8)


def sum_pairs(x: Tensor) -> Tensor:
    """Return the row sums, FP32 (rows, 1), by pairwise summation of neighbors. The length is a power of two."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x, FP32, not negative, up to a number of `dtype`, FP32 or BF16; to infinity beyond its largest number."""
    if dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    # NaN is excluded, because its low bits may carry into the sign.
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & -0x10000).view(torch.float32))


def bits_of(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of scales in `dtype`, flat int16 or int32. The scales are exact in `dtype`.

    A conversion to `dtype` would produce different NaN bits on different devices.
    """
    bits = scales.reshape(-1).view(torch.int32)
    return bits if dtype == torch.float32 else (bits >> 16).to(torch.int16)

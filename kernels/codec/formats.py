"""Formats of block codes, and the sizes of their messages. Plain arithmetic: no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

# NCCL transfers 16 bytes at a time if a buffer begins and ends at multiples of 16, and less otherwise.
ALIGNED_BYTES = 16
BLOCK = 128  # entries that share scales
HADAMARD_SIZE = 32  # entries of one Hadamard transform


@dataclass(frozen=True)
class Format:
    """Encoding of a block of values.

    Attributes:
        name: Key in `FORMATS`.
        bits: Bits per entry.
        scales: Scales per block.
        largest: Level of the largest code, if the scale is derived from the largest magnitude of the block; None if the
            scales are means of magnitudes.
        gain: Factor of the mean of magnitudes that is the scale of one bit.
    """

    name: str
    bits: int
    scales: int = 1
    largest: float | None = None
    gain: float = 1.0


FORMATS = {
    form.name: form
    for form in (
        Format("int8", 8, largest=127.0),
        Format("int4", 4, largest=7.0),
        # Sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats, FP4).
        Format("e2m1", 4, largest=6.0),
        # Sign, three bits of exponent: 0, 0.25, 0.5, 1, 2, 4, 8, 16 (Streaming DiLoCo, arXiv:2501.18512).
        Format("e3m0", 4, largest=16.0),
        # Sign, and one bit that selects the mean of the block's small or of its large magnitudes.
        Format("2bit", 2, scales=2),
        # Sign, times the mean magnitude of the block (Bernstein et al. 2018; Karimireddy et al. 2019).
        Format("1bit", 1),
        # The same times pi / 2. The scale of "1bit" has the least error and makes decoded values too small: normally
        # distributed x have E[x decoded(x)] = 2 / pi E[x^2]. With error feedback the rest is sent later, and the sum of
        # what was sent lags behind that of steady values. This code has no such bias for them, and a larger error.
        Format("1bit_unbiased", 1, gain=math.pi / 2),
    )
}


@dataclass(frozen=True)
class MessageSize:
    """Bytes of the messages of a block code, as a function of their entries. A partial block counts as a whole one.

    Attributes:
        code: Key in `FORMATS`.
        block: Entries that share scales.
        scale_bytes: Bytes of a scale.
    """

    code: str
    block: int = BLOCK
    scale_bytes: int = 2

    def __call__(self, entries: int) -> int:
        """Return the bytes: the codes of all entries, then all scales, padded by `padded_bytes`."""
        form, blocks = FORMATS[self.code], -(-entries // self.block)
        return padded_bytes(blocks * (self.block * form.bits // 8 + form.scales * self.scale_bytes))


def padded_bytes(nbytes: int) -> int:
    """Return `nbytes`, rounded up so that the data that follows is aligned. The padding is zeros."""
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def encoded_size(code: str, block: int = BLOCK) -> Callable[[int], int] | None:
    """Return the size of a message as a function of its elements; None for FP32, which is not encoded.

    Args:
        code: "float32" or a key of `FORMATS`.
        block: Elements that share scales, for a block code.

    Raises:
        ValueError: The code is unknown.
    """
    if code == "float32":
        return None
    if code not in FORMATS:
        raise ValueError(f"the code is {code!r}; it must be one of float32, {', '.join(FORMATS)}")
    return MessageSize(code, block)

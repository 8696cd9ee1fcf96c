"""What block codes there are, and how many bytes their messages take. Plain arithmetic: no torch."""

from dataclasses import dataclass

from kernels.common.wire import padded_bytes

BLOCK = 128  # entries that share scales
TURN = 32  # entries that a Hadamard matrix turns together
STOCHASTIC = ("int8", "int4")  # what can be rounded so


@dataclass(frozen=True)
class Format:
    """How a block of values is coded.

    bits: of an entry. scales: numbers of a block that its entries are told by. largest: the level of the largest code,
        where there is one scale and it comes from the largest magnitude; else scales are means of magnitudes.
    """

    name: str
    bits: int
    scales: int = 1
    largest: float | None = None


FORMATS = {
    one.name: one
    for one in (
        Format("int8", 8, largest=127.0),
        Format("int4", 4, largest=7.0),
        # Sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats, FP4).
        Format("e2m1", 4, largest=6.0),
        # Sign, three bits of exponent: 0, 0.25, 0.5, 1, 2, 4, 8, 16 (streaming DiLoCo, arXiv:2501.18512, sends these).
        Format("e3m0", 4, largest=16.0),
        # Sign, and which of two means: of the block's smaller, or of its larger magnitudes.
        Format("2bit", 2, scales=2),
        # Sign, times the mean magnitude of the block (Bernstein et al. 2018; Karimireddy et al. 2019).
        Format("1bit", 1),
    )
}


def message_bytes(name: str, entries: int, block: int = BLOCK, scale_bytes: int = 2) -> int:
    """Bytes of a message: the codes of all entries, then all scales, padded as `padded_bytes` says.

    entries: a multiple of `block`.
    """
    form = FORMATS[name]
    return padded_bytes(entries * form.bits // 8 + entries // block * form.scales * scale_bytes)

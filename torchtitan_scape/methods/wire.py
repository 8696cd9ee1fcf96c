"""Size of encoded values in bytes, by the name of the dtype or block code. Imports no torch."""

from dataclasses import dataclass

from torchtitan_scape.kernels.codec.formats import BLOCK, FORMATS, message_bytes
from torchtitan_scape.topology.ring_bytes import MessageBytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class EncodedSize:
    """Size of a message of n elements in bytes.

    Attributes:
        wire: "bfloat16" or a block code of `kernels.codec.formats`.
        block: Elements that share scales, for a block code. A partial block counts as a whole one.
    """

    wire: str
    block: int = BLOCK

    def __call__(self, count: int) -> int:
        if self.wire in DTYPE_BYTES:
            return DTYPE_BYTES[self.wire] * count
        return message_bytes(self.wire, -(-count // self.block) * self.block, self.block)


def encoded_size(wire: str, block: int = BLOCK) -> MessageBytes | None:
    """Return the size of a message as a function of its elements; None for FP32, which is not encoded.

    Raises:
        ValueError: The wire is unknown.
    """
    if wire not in DTYPE_BYTES and wire not in FORMATS:
        raise ValueError(f"the wire is {wire!r}; it must be one of {', '.join((*DTYPE_BYTES, *FORMATS))}")
    return None if wire == "float32" else EncodedSize(wire, block)


def encoded_bytes(wire: str, block: int = BLOCK) -> float:
    """Return the bytes of an element of a long message."""
    encoded = encoded_size(wire, block)
    return 4.0 if encoded is None else encoded(1 << 20) / (1 << 20)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        ValueError: The dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def short_name(wire: str) -> str:
    """Return the name of a dtype or code for tables."""
    return "bf16" if wire == "bfloat16" else wire

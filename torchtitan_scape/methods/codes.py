"""Size of encoded values in bytes, by the name of the dtype or block code. Imports no torch."""

from dataclasses import dataclass

from torchtitan_scape.kernels.codec.formats import BLOCK, FORMATS, message_bytes
from torchtitan_scape.topology.ring_bytes import MessageBytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class EncodedSize:
    """Size of a message of n elements in bytes.

    Attributes:
        code: "bfloat16" or a block code of `kernels.codec.formats`.
        block: Elements that share scales, for a block code. A partial block counts as a whole one.
    """

    code: str
    block: int = BLOCK

    def __call__(self, count: int) -> int:
        if self.code in DTYPE_BYTES:
            return DTYPE_BYTES[self.code] * count
        return message_bytes(self.code, -(-count // self.block) * self.block, self.block)


def encoded_size(code: str, block: int = BLOCK) -> MessageBytes | None:
    """Return the size of a message as a function of its elements; None for FP32, which is not encoded.

    Raises:
        ValueError: The code is unknown.
    """
    if code not in DTYPE_BYTES and code not in FORMATS:
        raise ValueError(f"the code is {code!r}; it must be one of {', '.join((*DTYPE_BYTES, *FORMATS))}")
    return None if code == "float32" else EncodedSize(code, block)


def encoded_bytes(code: str, block: int = BLOCK) -> float:
    """Return the bytes of an element of a long message."""
    encoded = encoded_size(code, block)
    return 4.0 if encoded is None else encoded(1 << 20) / (1 << 20)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        ValueError: The dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"the dtype is {dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def short_name(code: str) -> str:
    """Return the name of a dtype or code for tables."""
    return "bf16" if code == "bfloat16" else code

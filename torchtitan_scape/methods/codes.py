"""Size of encoded values in bytes, by the name of the dtype or block code. Imports no torch."""

from torchtitan_scape.kernels.codec.formats import BLOCK, FORMATS, MessageSize
from torchtitan_scape.topology.ring_bytes import MessageBytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def encoded_size(code: str, block: int = BLOCK) -> MessageBytes | None:
    """Return the size of a message as a function of its elements; None for FP32, which is not encoded.

    Args:
        code: "float32", "bfloat16" or a block code of `kernels.codec.formats`.
        block: Elements that share scales, for a block code.

    Raises:
        ValueError: The code is unknown.
    """
    if code in DTYPE_BYTES:
        return None if code == "float32" else _bfloat16_bytes
    if code not in FORMATS:
        raise ValueError(f"the code is {code!r}; it must be one of {', '.join((*DTYPE_BYTES, *FORMATS))}")
    return MessageSize(code, block)


def _bfloat16_bytes(count: int) -> int:
    return DTYPE_BYTES["bfloat16"] * count


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

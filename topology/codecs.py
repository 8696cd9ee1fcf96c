"""Interface of codecs, which encode values before they cross a link. Block codes are in `kernels.codec`."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from torchtitan_scape.topology.partition import ALIGNED_BYTES


class Codec(Protocol):
    """Encodes FP32 values as bytes. A message is the code of `count` entries; messages are the rows of a matrix.

    Attributes:
        block_size: Entries that are encoded together. `count` is a multiple of it, and the messages of whole blocks
            have a multiple of 16 bytes.
    """

    block_size: int

    def message_bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` entries."""

    def encode(self, values: Tensor, error: Tensor | None = None) -> Tensor:
        """Encode FP32 (rows, count). Returns uint8 (rows, message_bytes(count)).

        error: FP32 (rows, count), becomes `values` minus the decoded values; it may be `values`.
        """

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Decode uint8 (rows, message_bytes(count)) into `out`, FP32 (rows, count)."""

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of the decoded messages to `out`, FP32 (count,). Rows are added in FP32, in row order."""

    def encode_mean(
        self, messages: Tensor, count: int, divisor: float, error: Tensor | None = None, adds_error: bool = False
    ) -> Tensor:
        """Encode (sum of the decoded messages) / divisor as uint8 (1, message_bytes(count)).

        error: FP32 (count,), becomes the quantization error; with `adds_error` its value is first added to the mean.
        """


def entries_together(codec: Codec | None) -> int:
    """Return the number of entries that must not be divided between ranks; None stands for FP32."""
    return ALIGNED_BYTES // 4 if codec is None else codec.block_size


def message_size(codec: Codec | None) -> Callable[[int], int] | None:
    """Return the size of a message as a function of its entries; None for FP32."""
    return None if codec is None else codec.message_bytes

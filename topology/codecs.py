"""Interface of codecs, which encode values before they cross a link, and the simplest codec: rounding to BF16.

Block codes of 8 bits and fewer are in `kernels.codec`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
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


class Bfloat16:
    """`Codec` that rounds every value to the nearest BF16 number, ties to even."""

    block_size = 8  # 16 bytes

    def message_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor, error: Tensor | None = None) -> Tensor:
        rounded = values.to(torch.bfloat16)
        if error is not None:
            torch.sub(values, rounded, out=error)
        return rounded.view(torch.uint8)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        out.copy_(messages.view(torch.bfloat16))

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        out.zero_()
        for row in messages.view(torch.bfloat16):
            out += row

    def encode_mean(
        self, messages: Tensor, count: int, divisor: float, error: Tensor | None = None, adds_error: bool = False
    ) -> Tensor:
        mean = torch.empty(count, dtype=torch.float32, device=messages.device)
        self.decode_and_sum(messages, mean)
        mean.div_(mean.new_full((), divisor))  # a Python number would be inverted first on a GPU
        if error is not None and adds_error:
            mean += error
        return self.encode(mean.view(1, -1), None if error is None else error.view(1, -1))


def entries_together(codec: Codec | None) -> int:
    """Return the number of entries that must not be divided between ranks; None stands for FP32."""
    return ALIGNED_BYTES // 4 if codec is None else codec.block_size


def message_size(codec: Codec | None) -> Callable[[int], int] | None:
    """Return the size of a message as a function of its entries; None for FP32."""
    return None if codec is None else codec.message_bytes

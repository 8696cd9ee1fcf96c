"""How values cross a link: what a codec is asked for, and the plainest one, which rounds to BF16.

Block codes of 8 bits and fewer are in `kernels.codec`; whoever makes an exchange hands its codec in.
"""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """FP32 values as bytes. A message is the code of `m` entries, `m` a multiple of `block_size`; messages are rows.

    unit: entries that are coded together; never divided between messages. Messages of whole units have whole 16 bytes.
    """

    block_size: int

    def message_bytes(self, m: int) -> int:
        """Bytes of a message of m entries."""

    def encode(self, x: Tensor, error: Tensor | None = None) -> Tensor:
        """uint8 (rows, bytes_of(m)) of FP32 (rows, m). error: FP32 (rows, m), becomes x minus what is decoded."""

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """out, FP32 (rows, m), becomes what the messages, uint8 (rows, bytes_of(m)), say."""

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """out, FP32 (m,), becomes the sum of the messages, added in FP32 in the order of the rows."""


class Bfloat16:
    """Every value for itself, rounded to nearest even."""

    block_size = 8  # for the bytes' sake

    def message_bytes(self, m: int) -> int:
        return 2 * m

    def encode(self, x: Tensor, error: Tensor | None = None) -> Tensor:
        sent = x.to(torch.bfloat16)
        if error is not None:
            torch.sub(x, sent, out=error)
        return sent.view(torch.uint8)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        out.copy_(messages.view(torch.bfloat16))

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        out.zero_()
        for row in messages.view(torch.bfloat16):
            out += row

"""A block code as whoever makes an exchange takes it: `topology.codecs.Codec`, in PyTorch or in Triton."""

from importlib import import_module

import torch
from torch import Tensor

from kernels.codec.formats import BLOCK, FORMATS, STOCHASTIC, TURN, message_bytes

_PASSES = {"torch": "reference", "triton": "triton_passes"}


class BlockCode:
    """FP32 values in blocks, each with scales of its own; see `kernels.codec.reference`.

    Args:
        name: of `kernels.codec.formats.FORMATS`: "int8", "int4", "e2m1", "e3m0", "2bit" or "1bit".
        block: entries that share scales, a power of two from 32 to 1024.
        scale: dtype of the scales on the wire, FP32 or BF16.
        backend: "torch" or "triton"; both make the same bits.

    Raises ValueError for an unknown name or backend, or another block.
    """

    def __init__(
        self, name: str, block: int = BLOCK, scale: torch.dtype = torch.bfloat16, backend: str = "torch"
    ) -> None:
        if name not in FORMATS:
            raise ValueError(f"there is no block code {name!r}; known are {', '.join(FORMATS)}")
        if block not in (32, 64, 128, 256, 512, 1024):
            raise ValueError(f"blocks of {block} entries; they must have a power of two of them, from 32 to 1024")
        if scale not in (torch.float32, torch.bfloat16):
            raise ValueError(f"scales in {scale}; they travel in torch.float32 or torch.bfloat16")
        if backend not in _PASSES:
            raise ValueError(f"there is no backend {backend!r}; a block code has {', '.join(map(repr, _PASSES))}")
        self.name, self.block_size, self.scale = name, block, scale
        # Who has no GPU may have no Triton.
        self._passes = import_module(f"kernels.codec.{_PASSES[backend]}")

    def message_bytes(self, m: int) -> int:
        """Bytes of a message of m entries, a multiple of `block_size`; ValueError for another m."""
        if m % self.block_size:
            raise ValueError(f"{m} entries in blocks of {self.block_size}; fill them up with zeros to whole blocks")
        return message_bytes(self.name, m, self.block_size, self.scale.itemsize)

    def encode(self, x: Tensor, error: Tensor | None = None, key: int | None = None) -> Tensor:
        """uint8 (rows, bytes_of(m)) of FP32 (rows, m). error: FP32 (rows, m), becomes x minus what is decoded.

        key: 0 to 2^63 - 1, rounds up or down with a chance that leaves the mean where it is, by this key and an entry's
            place in x; None rounds to nearest. ValueError for a code whose levels are not whole multiples of its scale.
        """
        self.message_bytes(x.shape[1])
        if key is not None and self.name not in STOCHASTIC:
            raise ValueError(f"{self.name!r} is not rounded stochastically; {' and '.join(STOCHASTIC)} are")
        return self._passes.encode(x, self.name, self.block_size, self.scale, error, key)

    def hadamard_(self, x: Tensor) -> None:
        """x, FP32, contiguous, becomes H x / sqrt(32), 32 entries at a time (Hadamard); a second turn takes it back.

        ValueError for a number of entries that is no multiple of 32.
        """
        if x.numel() % TURN:
            raise ValueError(f"{x.numel()} entries to turn; there must be a multiple of {TURN}")
        self._passes.hadamard_(x.view(-1))

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """out, FP32 (rows, m), becomes what the messages, uint8 (rows, bytes_of(m)), say."""
        self._check(messages, out.shape[1])
        self._passes.decode(messages, self.name, self.block_size, self.scale, out)

    def slice_message(self, message: Tensor, m: int, first: int, count: int) -> Tensor:
        """uint8 (1, bytes_of(count)): the message of `count` of m entries from `first` on, both whole blocks, out of
        that of all, uint8 (bytes_of(m),)."""
        form = FORMATS[self.name]
        codes, scales = self.block_size * form.bits // 8, form.scales * self.scale.itemsize  # bytes of a block
        skipped, blocks = first // self.block_size, count // self.block_size
        told = message[skipped * codes :][: blocks * codes]
        scaled = message[m // self.block_size * codes + skipped * scales :][: blocks * scales]
        return torch.cat((told, scaled, message.new_zeros(-(told.numel() + scaled.numel()) % 16))).view(1, -1)

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """out, FP32 (m,), becomes the sum of the messages, added in FP32 in the order of the rows."""
        self._check(messages, out.numel())
        self._passes.decode_and_sum(messages, self.name, self.block_size, self.scale, out)

    def _check(self, messages: Tensor, m: int) -> None:
        """Raises ValueError for messages of another length, which a kernel would read beyond."""
        if messages.shape[1] != self.message_bytes(m):
            raise ValueError(
                f"messages of {messages.shape[1]} bytes; those of {m} entries have {self.message_bytes(m)}"
            )

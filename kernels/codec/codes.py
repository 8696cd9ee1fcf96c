"""Block codes as a `topology.stages.Codec`, in PyTorch or Triton."""

from importlib import import_module

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import BLOCK, FORMATS, HADAMARD_SIZE, MessageSize

_PASSES = {"torch": "reference", "triton": "triton_passes"}


class BlockCode:
    """Quantization of FP32 values in blocks with separate scales; see `kernels.codec.reference`.

    Args:
        name: Key of `kernels.codec.formats.FORMATS`: "int8", "int4", "e2m1", "e3m0", "2bit", "1bit" or
            "1bit_unbiased".
        block: Entries that share scales, a power of two from 32 to 1024.
        scale: Dtype of the scales in messages, FP32 or BF16.
        backend: "torch" or "triton"; both produce the same bits.

    Raises:
        ValueError: An unknown name or backend, or an unsupported block or scale.
    """

    def __init__(
        self, name: str, block: int = BLOCK, scale: torch.dtype = torch.bfloat16, backend: str = "torch"
    ) -> None:
        if name not in FORMATS:
            raise ValueError(f"there is no block code {name!r}; known are {', '.join(FORMATS)}")
        if block not in (32, 64, 128, 256, 512, 1024):
            raise ValueError(f"blocks of {block} entries; they must have a power of two of them, from 32 to 1024")
        if scale not in (torch.float32, torch.bfloat16):
            raise ValueError(f"scales in {scale}; they must be torch.float32 or torch.bfloat16")
        if backend not in _PASSES:
            raise ValueError(f"there is no backend {backend!r}; a block code has {', '.join(map(repr, _PASSES))}")
        self.name, self.form, self.block_size, self.scale = name, FORMATS[name], block, scale
        # Imported here, because Triton may not be installed on a machine without a GPU.
        self._passes = import_module(f".{_PASSES[backend]}", __package__)

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
        self.message_bytes(values.shape[1])
        return self._passes.encode(self, values, error)

    def hadamard_(self, x: Tensor) -> None:
        """Multiply each 32 entries of x, FP32, contiguous, by the Hadamard matrix H / sqrt(32), in place.

        The transform is its own inverse. Raises ValueError if the number of entries is not a multiple of 32.
        """
        if x.numel() % HADAMARD_SIZE:
            raise ValueError(f"{x.numel()} entries; a Hadamard transform needs a multiple of {HADAMARD_SIZE}")
        self._passes.hadamard_(x.view(-1))

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Decode uint8 (rows, message_bytes(m)) into `out`, FP32 (rows, m)."""
        self._check(messages, out.shape[1])
        self._passes.decode(self, messages, out)

    def decode_and_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of the decoded messages to `out`, FP32 (m,). Rows are added in FP32, in row order.

        Messages (rows, k, bytes) have k sums, `out` (k, m).
        """
        self._check(messages, out.shape[-1])
        self._passes.decode_and_sum(self, messages, out)

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
        self._check(messages, count)
        return self._passes.encode_mean(self, messages, count, divisor, error, adds_error)

    def _check(self, messages: Tensor, m: int) -> None:
        """Raise ValueError for messages of another length; a kernel would read beyond their end."""
        if messages.shape[-1] != self.message_bytes(m):
            raise ValueError(
                f"messages of {messages.shape[-1]} bytes; those of {m} entries have {self.message_bytes(m)}"
            )

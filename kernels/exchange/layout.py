"""A chunk of a coded exchange as blocks of several tensors. The kernels read and write them in place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.codes import BlockCode


@dataclass(eq=False)
class BlockSlices:
    """Slices of tensors that are exchanged together, each from the start of a block of the code.

    A slice is a matrix (blocks, block) with any distance between its rows, or a contiguous vector.

    Attributes:
        first: For every slice the tensor that receives the result: the anchor (FP32), or the gradient.
        second: The parameters (any floating-point dtype), or the residuals (FP32); empty without error feedback.
        code: Code of the messages.
        size: Entries of the chunk, padding included: a multiple of the number of messages times the block of the code.
        replicas: Number of messages, one per owner.
        replica: Index of the message of this replica; -1 if it keeps no error of a mean.
        owner_error: Errors of the owner of an entry (FP32), if they are a separate state.
        steps: FP32, receives the sum of the results; None for slices without one.
        starts: The first block of every slice in the chunk; without them slices follow each other.
        repeats: The entries of a shorter last block are repeated in it; otherwise zeros follow.
        errors_elsewhere: Whether `owner_error` may be nonzero outside the message of this replica. None if unknown, for
            example after a load from another layout: the values are then checked.
        fixed: The tensors are the same in every exchange, so that their addresses are read once.
        plan: Lists of tiles of the Triton passes.
    """

    first: Sequence[Tensor]
    second: Sequence[Tensor]
    code: BlockCode
    size: int
    replicas: int
    replica: int
    owner_error: Sequence[Tensor] = ()
    steps: Sequence[Tensor | None] = ()
    starts: Sequence[int] = ()
    repeats: bool = False
    errors_elsewhere: bool | None = False
    fixed: bool = False
    plan: Any = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """Entries of a message."""
        return self.size // self.replicas

    @property
    def blocks(self) -> int:
        """Blocks of a message."""
        return self.count // self.code.block_size

    @cached_property
    def filled_blocks(self) -> int:
        """Blocks of the slices, without padding."""
        return sum(-(-each.numel() // self.code.block_size) for each in self.first)

    def has_errors_elsewhere(self) -> bool:
        """Return `errors_elsewhere`. If it is None, read the errors, which waits for the device.

        An exchange that is applied leaves no error elsewhere, so that this is repeated only until it is False.
        """
        if self.errors_elsewhere is None:
            outside, slot, block = [], 0, self.code.block_size
            for i, error in enumerate(self.owner_error):
                slot, count = self.starts[i] if self.starts else slot, -(-error.numel() // block)
                own = (self.replica * self.blocks - slot, (self.replica + 1) * self.blocks - slot)
                first, end = (min(max(0, row), count) * (1 if error.ndim == 2 else block) for row in own)
                outside += [error[:first].any(), error[end:].any()]
                slot += count
            if not outside or not torch.stack(outside).any():
                self.errors_elsewhere = False
        return self.errors_elsewhere is not False


@dataclass(eq=False)
class SentMessages:
    """Encoded values of a `BlockSlices` between the start and the end of an exchange.

    Attributes:
        messages: uint8 (owners, message bytes).
        means: uint8 (owners, message bytes), received; (0, message bytes) if `BlockSlices.replica` is -1.
        error: FP32 (entries of a message,), quantization error of the mean of the own slice. Before the exchange it is
            the owner's error, if there is one, divided by the number of replicas. None if errors are discarded.
        errors_elsewhere: `BlockSlices.has_errors_elsewhere` in this exchange.
        stores_errors: The quantization errors of the messages are stored already.
    """

    messages: Tensor
    means: Tensor
    error: Tensor | None
    errors_elsewhere: bool = False
    stores_errors: bool = False

    @classmethod
    def allocate(cls, slices: BlockSlices, stores_errors: bool) -> "SentMessages":
        """Allocate messages. Padding is not written by the kernels, and therefore set to zero, the code of zeros."""
        device, code, blocks = slices.first[0].device, slices.code, slices.blocks
        size = code.message_bytes(slices.count)
        messages = torch.empty(slices.replicas, size, dtype=torch.uint8, device=device)
        filled = slices.filled_blocks
        complete = 0 if slices.starts and filled < slices.replicas * blocks else filled // blocks
        if complete < slices.replicas:
            messages[complete:].zero_()
        if blocks * code.block_bytes < size:
            messages[:, blocks * code.block_bytes :].zero_()
        allocate = torch.zeros if slices.owner_error else torch.empty
        has_error = bool(slices.second) and slices.replica >= 0
        error = allocate(slices.count, dtype=torch.float32, device=device) if has_error else None
        means = torch.empty_like(messages[: slices.replicas if slices.replica >= 0 else 0])
        return cls(messages, means, error, slices.has_errors_elsewhere(), stores_errors)

    def record_stream(self) -> None:
        """Mark the memory as used by the current stream, which may differ from that of its allocation."""
        for tensor in (self.messages, self.means, self.error):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

"""A chunk of a coded exchange as blocks of several tensors. The kernels read and write them in place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.codec.codes import BlockCode


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
    plan: Any = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """Entries of a message."""
        return self.size // self.replicas

    @property
    def blocks(self) -> int:
        """Blocks of a message."""
        return self.count // self.code.block_size


@dataclass(eq=False)
class SentMessages:
    """Encoded values of a `BlockSlices` between the start and the end of an exchange.

    Attributes:
        messages: uint8 (owners, message bytes).
        means: uint8 (owners, message bytes), received.
        error: FP32 (entries of a message,), quantization error of the mean of the own slice. Before the exchange it is
            the owner's error, if there is one, divided by the number of replicas. None if errors are discarded.
    """

    messages: Tensor
    means: Tensor
    error: Tensor | None

    @classmethod
    def allocate(cls, slices: BlockSlices, keeps_error: bool) -> "SentMessages":
        """Allocate messages. Padding is not written by the kernels, and therefore set to zero, the code of zeros."""
        device, code, blocks = slices.first[0].device, slices.code, slices.blocks
        size = code.message_bytes(slices.count)
        messages = torch.empty(slices.replicas, size, dtype=torch.uint8, device=device)
        filled = sum(-(-each.numel() // code.block_size) for each in slices.first)
        complete = 0 if slices.starts and filled < slices.replicas * blocks else filled // blocks
        if complete < slices.replicas:
            messages[complete:].zero_()
        if blocks * code.block_bytes < size:
            messages[:, blocks * code.block_bytes :].zero_()
        allocate = torch.zeros if slices.owner_error else torch.empty
        error = allocate(slices.count, dtype=torch.float32, device=device) if keeps_error else None
        return cls(messages, torch.empty_like(messages), error)

    def record_stream(self) -> None:
        """Mark the memory as used by the current stream, which may differ from that of its allocation."""
        for tensor in (self.messages, self.means, self.error):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

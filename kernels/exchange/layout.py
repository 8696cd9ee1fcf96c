"""Static description of the blocks that a coded exchange reads and writes in place, and its messages."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Lists of an exchange's `launching.AddressTable`.
FIRST = 0  # receives the result: the anchors (FP32), or the gradients
SECOND = 1  # the parameters (any floating-point dtype), or the residuals (FP32); absent without error feedback
OWNER_ERROR = 2  # errors of the owner of an entry (FP32), if they are a separate state
LISTS = 3


class BlockSlice(NamedTuple):
    """Blocks of a tensor that are exchanged. The last one may be shorter.

    Attributes:
        tensor: Position of the tensor in the lists.
        first: First entry, a multiple of 16.
        length: Entries.
        stride: Entries between the first entries of two blocks, a multiple of 16.
        start: First block in the chunk.
    """

    tensor: int
    first: int
    length: int
    stride: int
    start: int


@dataclass(eq=False)
class SentMessages:
    """Encoded values between the start and the end of an exchange.

    Attributes:
        messages: uint8 (owners, message bytes).
        means: uint8 (owners, message bytes), received; (0, message bytes) if no replica keeps an error of a mean.
        error: FP32 (entries of a message,), quantization error of the mean of the own slice. Before the exchange it is
            the owner's error, if there is one, divided by the number of replicas. None if errors are discarded.
        adds_error: `error` is added to the mean before it is encoded.
        errors_elsewhere: The owner's errors may be nonzero outside the message of this replica.
        stores_errors: The quantization errors of the messages are stored already.
    """

    messages: Tensor
    means: Tensor
    error: Tensor | None
    adds_error: bool
    errors_elsewhere: bool
    stores_errors: bool

"""Alignment of messages. Plain arithmetic: no torch."""

# NCCL transfers 16 bytes at a time if a buffer begins and ends at multiples of 16, and less otherwise.
ALIGNED_BYTES = 16


def padded_bytes(nbytes: int) -> int:
    """Return `nbytes`, rounded up so that the data that follows is aligned. The padding is zeros."""
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES

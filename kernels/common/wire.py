"""What a stretch of a message takes on the wire. Plain arithmetic: no torch."""

# NCCL moves 16 bytes at a time where a stretch begins and ends at multiples of as many, and less where it does not.
ALIGNED = 16


def padded_bytes(nbytes: int) -> int:
    """Bytes of a stretch on the wire that says so many: filled up with zeros, so that the next one begins aligned."""
    return -(-nbytes // ALIGNED) * ALIGNED

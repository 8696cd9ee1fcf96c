"""Random pairs of ranks that all ranks determine without communication. Plain arithmetic: no torch."""

from hashlib import sha256


def partners(size: int, draw: int) -> list[int | None]:
    """Return the partner of each of `size` ranks; None for a rank that rests.

    If `size` is odd, rank `draw` modulo `size` rests, so that every rank rests once in `size` consecutive draws. The
    others are divided into pairs at random.

    Args:
        size: Number of ranks.
        draw: Number of the draw; the same number gives the same pairs on every machine.
    """
    partner_of: list[int | None] = [None] * size
    ranks = [rank for rank in range(size) if size % 2 == 0 or rank != draw % size]
    ranks.sort(key=lambda rank: sha256(f"{draw} {rank}".encode()).digest())
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        partner_of[first], partner_of[second] = second, first
    return partner_of


def paired_share(size: int) -> float:
    """Return the fraction of draws in which a rank has a partner."""
    return (size - size % 2) / size

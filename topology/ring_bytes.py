"""Bytes that hierarchical collectives send, level by level. Plain arithmetic: no torch.

`topology.stages` executes these collectives, `topology.collectives` counts them and `topology.links` prices them with
the same formulas. `sent` is the number of bytes that one rank sends to its successor in a ring of N ranks: (N-1)/N of
the input of a reduce-scatter, twice that for an all-reduce, and (N-1) times the input of an all-gather. Every known
ring or tree algorithm of optimal volume sends the same number of bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torchtitan_scape.topology.rank_group import RankGroup


class LevelSize(NamedTuple):
    """Number of ranks that communicate on one level, and the name of that level."""

    level: str
    size: int


Levels = Sequence[LevelSize | RankGroup]  # innermost first

# (level, input bytes, sent bytes) of one rank for every stage, in the order of execution.
StageBytes = Iterator[tuple[str, int, float]]

# Maps a number of entries to the bytes of their encoded message.
MessageBytes = Callable[[int], int]


def reduce_bytes(n: int, levels: Levels, coded: MessageBytes | None = None) -> StageBytes:
    """Yield the bytes of an all-reduce of n FP32 entries.

    Its stages are a reduce-scatter on every inner level, an all-reduce on the outermost level, and an all-gather on
    every inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        coded: Message size of the codec of the outermost level. The encoded messages are also what the inner levels
            gather. None for FP32.
    """
    *inner, outermost = levels
    for group in inner:
        yield group.level, 4 * n, (group.size - 1) / group.size * 4 * n
        n //= group.size
    share = (outermost.size - 1) / outermost.size
    if coded is None:
        yield outermost.level, 4 * n, 2 * share * 4 * n
        own = 4 * n
    else:
        # An all-to-all of one message per rank, then an all-gather of this rank's reduced message.
        own = outermost.size * coded(n // outermost.size)
        yield outermost.level, own + own // outermost.size, 2 * share * own
    for group in reversed(inner):
        yield group.level, own, (group.size - 1) * own
        own *= group.size


def scatter_bytes(n: int, levels: Levels, coded: MessageBytes | None = None) -> StageBytes:
    """Yield the bytes of a reduce-scatter of n FP32 entries, innermost level first. Args as in `reduce_bytes`."""
    for group in levels:
        given = 4 * n if coded is None or group is not levels[-1] else group.size * coded(n // group.size)
        yield group.level, given, (group.size - 1) / group.size * given
        n //= group.size


def pair_bytes(n: int, levels: Levels, messages: float) -> StageBytes:
    """Yield the bytes of a mean of n FP32 entries over pairs of units of the outermost level.

    Its stages are a reduce-scatter on every inner level, one message to the partner on the outermost level, and an
    all-gather on every inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        messages: 1 for a rank with a partner, 0 for one that rests; a fraction for the mean over draws.
    """
    *inner, outermost = levels
    for group in inner:
        yield group.level, 4 * n, (group.size - 1) / group.size * 4 * n
        n //= group.size
    yield outermost.level, 4 * n, messages * 4 * n
    for group in reversed(inner):
        yield group.level, 4 * n, (group.size - 1) * 4 * n
        n *= group.size


def gather_bytes(own: int, levels: Levels) -> StageBytes:
    """Yield the bytes of an all-gather of `own` bytes per rank.

    The outermost level comes first, so that every input crosses it only once per group of the inner levels.
    """
    for group in reversed(levels):
        yield group.level, own, (group.size - 1) * own
        own *= group.size

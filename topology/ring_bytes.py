"""Stages of hierarchical collectives: the bytes and the messages of a rank on every level. Plain arithmetic: no torch.

`topology.stages` executes these collectives, `topology.collectives` counts their bytes and `topology.links` prices
them. All sizes are those of a ring of N ranks, in which a rank sends to its successor: (N-1)/N of the input of a
reduce-scatter, twice that for an all-reduce, and (N-1) times the input of an all-gather. Every known ring or tree
algorithm of optimal volume sends the same number of bytes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_scape.topology.layout import Tier
from torchtitan_scape.topology.rank_group import RankGroup


class LevelSize(NamedTuple):
    """Number of ranks that communicate on one level, and the name of that level."""

    level: str
    size: int


Levels = Sequence[LevelSize | RankGroup | Tier]  # innermost first

# Maps a number of entries to the bytes of their encoded message.
MessageBytes = Callable[[int], int]


@dataclass(frozen=True)
class Stage:
    """Part of a collective on one level.

    Attributes:
        level: Name of the link.
        rounds: Number of consecutive messages of one rank.
        sent: Bytes that one rank sends in them.
        input_bytes: Size of the tensor that one rank passes to the stage.
    """

    level: str
    rounds: float
    sent: float
    input_bytes: int = 0


def bytes_by_level(stages: Iterable[Stage]) -> dict[str, float]:
    """Return the bytes that one rank sends, by level."""
    sent: dict[str, float] = defaultdict(float)
    for stage in stages:
        sent[stage.level] += stage.sent
    return dict(sent)


def spanned(levels: Levels, flat: bool = False) -> list[LevelSize]:
    """Return the levels with more than one rank.

    flat: merge them into a single ring, whose speed and bytes are those of the outermost of them.
    """
    several = [LevelSize(one.level, one.size) for one in levels if one.size > 1]
    return [LevelSize(several[-1].level, math.prod(one.size for one in several))] if flat and several else several


def all_reduce_stages(n: int, levels: Levels, coded: MessageBytes | None = None) -> list[Stage]:
    """Return the stages of an all-reduce of n FP32 entries.

    They are a reduce-scatter on every inner level, an all-reduce on the outermost level, and an all-gather on every
    inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        coded: Message size of the codec of the outermost level. The encoded messages are also what the inner levels
            gather. None for FP32.
    """
    if not levels:
        return []
    *inner, outermost = levels
    stages = reduce_scatter_stages(n, inner)
    n //= math.prod(group.size for group in inner)
    others, size = outermost.size - 1, outermost.size
    # With a codec: an all-to-all of one message per rank, then an all-gather of this rank's reduced message.
    own = 4 * n if coded is None else size * coded(n // size)
    given = own if coded is None else own + own // size
    stages.append(Stage(outermost.level, 2 * others, 2 * (others / size) * own, given))
    return stages + all_gather_stages(own, inner)


def reduce_scatter_stages(n: int, levels: Levels, coded: MessageBytes | None = None) -> list[Stage]:
    """Return the stages of a reduce-scatter of n FP32 entries. Args as in `all_reduce_stages`."""
    stages = []
    for group in levels:
        given = 4 * n if coded is None or group is not levels[-1] else group.size * coded(n // group.size)
        stages.append(Stage(group.level, group.size - 1, (group.size - 1) / group.size * given, given))
        n //= group.size
    return stages


def pair_mean_stages(n: int, levels: Levels, messages: float) -> list[Stage]:
    """Return the stages of a mean of n FP32 entries over pairs of units of the outermost level.

    They are a reduce-scatter on every inner level, one message to the partner on the outermost level, and an
    all-gather on every inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        messages: 1 for a rank with a partner, 0 for one that rests; a fraction for the mean over draws.
    """
    *inner, outermost = levels
    own = 4 * n // math.prod(group.size for group in inner)
    middle = Stage(outermost.level, messages, messages * own, own)
    return [*reduce_scatter_stages(n, inner), middle, *all_gather_stages(own, inner)]


def all_gather_stages(own: int, levels: Levels) -> list[Stage]:
    """Return the stages of an all-gather of `own` bytes per rank.

    The outermost level comes first, so that every input crosses it only once per group of the inner levels.
    """
    stages = []
    for group in reversed(levels):
        stages.append(Stage(group.level, group.size - 1, float((group.size - 1) * own), own))
        own *= group.size
    return stages


def scalar_stages(levels: Levels) -> list[Stage]:
    """Return the stages of an all-reduce of a few bytes, as a tree on each level."""
    return [Stage(one.level, 2 * math.ceil(math.log2(one.size)), 0.0) for one in spanned(levels)]

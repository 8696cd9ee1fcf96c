"""Bytes of an exchange that goes level by level, over one ring a level. Plain arithmetic: no torch.

`topology.stages` makes these exchanges, the collectives count by these figures, and `topology.links` prices them.
`sent` is what a rank puts on the wire to its successor in the ring: (N-1)/N of what a reduce-scatter is given, twice
that for an all-reduce, (N-1) times what an all-gather is given. Every known ring and tree of that volume sends as much.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol


class LevelSize(NamedTuple):
    """Ranks that meet at one level: how many, and the level of the link between them."""

    level: str
    size: int


class HasLevel(Protocol):
    """Anything with a link level and a number of ranks: a `LevelSize` or a `topology.groups.Ring`."""

    @property
    def level(self) -> str: ...

    @property
    def size(self) -> int: ...


StageBytes = Iterator[tuple[str, int, float]]
"""(level, bytes that a collective is given, bytes sent) of one rank in every stage, in their order."""


MessageBytes = Callable[[int], int]
"""Of a codec's message of so many entries."""


def reduce_bytes(n: int, rings: Sequence[HasLevel], coded: MessageBytes | None = None) -> StageBytes:
    """An all-reduce of n FP32 entries: reduce-scatters from the inside out, an all-reduce outside, gathers back inside.

    coded: messages of such sizes cross the outermost ring, and come back inside as they are.
    """
    *inner, outermost = rings
    for ring in inner:
        yield ring.level, 4 * n, (ring.size - 1) / ring.size * 4 * n
        n //= ring.size
    share = (outermost.size - 1) / outermost.size
    if coded is None:
        yield outermost.level, 4 * n, 2 * share * 4 * n
        own = 4 * n
    else:
        # An all-to-all of a message a rank, then a gather of this rank's own.
        own = outermost.size * coded(n // outermost.size)
        yield outermost.level, own + own // outermost.size, 2 * share * own
    for ring in reversed(inner):
        yield ring.level, own, (ring.size - 1) * own
        own *= ring.size


def scatter_bytes(n: int, rings: Sequence[HasLevel], coded: MessageBytes | None = None) -> StageBytes:
    """A reduce-scatter of n FP32 entries from the inside out. coded: of what crosses the outermost ring."""
    for ring in rings:
        given = 4 * n if coded is None or ring is not rings[-1] else ring.size * coded(n // ring.size)
        yield ring.level, given, (ring.size - 1) / ring.size * given
        n //= ring.size


def gather_bytes(own: int, rings: Sequence[HasLevel]) -> StageBytes:
    """An all-gather of `own` bytes of every rank: outermost ring first, so that they cross it once a unit."""
    for ring in reversed(rings):
        yield ring.level, own, (ring.size - 1) * own
        own *= ring.size

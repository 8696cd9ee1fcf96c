"""Bytes of an exchange that goes level by level, over one ring a level. Plain arithmetic: no torch.

`topology.stages` makes these exchanges, the collectives count by these figures, and `topology.links` prices them.
`sent` is what a rank puts on the wire to its successor in the ring: (N-1)/N of what a reduce-scatter is given, twice
that for an all-reduce, (N-1) times what an all-gather is given. Every known ring and tree of that volume sends as much.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """Ranks that meet at one level: how many, and the level of the link between them."""

    level: str
    size: int


class _Ring(Protocol):
    """A `Span` or a `topology.groups.Ring`."""

    @property
    def level(self) -> str: ...

    @property
    def size(self) -> int: ...


StageBytes = Iterator[tuple[str, int, float]]
"""(level, bytes that a collective is given, bytes sent) of one rank in every stage, in their order."""


def reduce_bytes(n: int, rings: Sequence[_Ring], rounded: bool) -> StageBytes:
    """An all-reduce of n FP32 entries: reduce-scatters from the inside out, an all-reduce outside, gathers back inside.

    rounded: BF16 crosses the outermost ring, and comes back inside as such.
    """
    ring, outer = rings[0], rings[1:]
    share = (ring.size - 1) / ring.size
    if not outer:
        given = (2 if rounded else 4) * n
        # Rounded: an all-to-all of n entries, then a gather of this rank's part.
        yield ring.level, given + (given // ring.size if rounded else 0), 2 * share * given
        return
    yield ring.level, 4 * n, share * 4 * n
    yield from reduce_bytes(n // ring.size, outer, rounded)
    own = (2 if rounded else 4) * n // ring.size
    yield ring.level, own, (ring.size - 1) * own


def scatter_bytes(n: int, rings: Sequence[_Ring], rounded: bool) -> StageBytes:
    """A reduce-scatter of n FP32 entries from the inside out. rounded: BF16 crosses the outermost ring."""
    for ring in rings:
        given = (2 if rounded and ring is rings[-1] else 4) * n
        yield ring.level, given, (ring.size - 1) / ring.size * given
        n //= ring.size


def gather_bytes(own: int, rings: Sequence[_Ring]) -> StageBytes:
    """An all-gather of `own` bytes of every rank: outermost ring first, so that they cross it once a unit."""
    for ring in reversed(rings):
        yield ring.level, own, (ring.size - 1) * own
        own *= ring.size

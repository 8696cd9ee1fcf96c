"""Position of a rank in a communicator. Imports no torch, so that the planner can use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_scape.topology.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """This rank's position in one communicator, and the link level to each member.

    Attributes:
        level: Level of the link to the next member, which ring algorithms send to.
        size: Number of members.
        group_rank: Index of this rank in the group.
        ranks: Global ranks of the members, in group order; () if they are not known.
        process_group: Communicator. None if the group has one member, or if its bytes are only counted.
        link_levels: Level of the link to each member, "" for this rank itself; () if they are not known.
    """

    level: str
    size: int
    group_rank: int
    ranks: tuple[int, ...] = ()
    process_group: "ProcessGroup | None" = None
    link_levels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ranks: tuple[int, ...], rank: int, layout: Layout, process_group: "ProcessGroup | None" = None
    ) -> "RankGroup":
        """Return the group of `ranks` as `rank`, one of them, sees it."""
        links = tuple("" if other == rank else layout.level(rank, other) for other in ranks)
        return cls(layout.successor_level(rank, ranks), len(ranks), ranks.index(rank), ranks, process_group, links)


def replica_index(levels: Sequence[RankGroup]) -> int:
    """Return the index of a replica among all replicas.

    The position on the innermost level (the first of `levels`) is the most significant digit, so that a hierarchical
    all-gather writes each result to its final position without a copy.
    """
    index = 0
    for group in levels:
        index = index * group.size + group.group_rank
    return index

"""Ranks of a replica that meet in the collectives of the shard axis, and what each of them sends, by link.

A gather goes round: what a rank sends crosses the link to its successor. In an exchange of a part for every one, each
part crosses the link to whom it is for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.layout import Layout
from topology.partition import ALIGNED
from topology.primitives import all_gather_into
from topology.traffic import SHARD, TrafficLedger


class ShardLedger:
    """Files what FSDP2's stand-ins, and an optimizer, send under the shard axis; nothing inside `uncounted`."""

    def __init__(self, traffic: TrafficLedger) -> None:
        self.traffic, self._open = traffic, True

    def add(self, level: str, kind: str, input_bytes: int, sent: float) -> None:
        if self._open:
            self.traffic.add(SHARD, level, kind, input_bytes, sent)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, nothing counts: a validation is no part of a step."""
        before, self._open = self._open, False
        try:
            yield
        finally:
            self._open = before


@dataclass(frozen=True)
class Circle:
    """This rank among those that it meets.

    ranks: all of them, in the order of the group. place: of this one. group: None where it is alone, or where somebody
        else moves the bytes and they are only counted here.
    ring_level: of the link to its successor. links: to each of the ranks, by level; "" to itself.
    """

    ranks: tuple[int, ...]
    group_rank: int
    group: ProcessGroup | None
    ring_level: str
    links: tuple[str, ...]

    @classmethod
    def of(cls, ranks: tuple[int, ...], rank: int, group: ProcessGroup | None, layout: Layout) -> "Circle":
        links = tuple("" if other == rank else layout.level(rank, other) for other in ranks)
        return cls(ranks, ranks.index(rank), group, layout.ring_level(rank, ranks), links)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, own: Tensor, output: Tensor, ledger: ShardLedger, kind: str) -> None:
        """output (size * b,) becomes `own` (b,) of all, in their order. b: so many as have a multiple of 16 bytes."""
        if self.size == 1:
            output.copy_(own)
            return
        assert own.nbytes % (4 * ALIGNED) == 0
        self.count_gather(own.nbytes, ledger, kind)
        all_gather_into(output, own, group=self.group)

    def exchange(self, parts: Tensor, received: Tensor, ledger: ShardLedger, kind: str) -> None:
        """received (size, b) becomes what every one has for this rank in its `parts` (size, b), in their order.

        b: as of `gather`.
        """
        if self.size == 1:
            received.copy_(parts)
            return
        assert parts[0].nbytes % (4 * ALIGNED) == 0
        self.count_exchange(parts.nbytes, ledger, kind)
        dist.all_to_all_single(received, parts, group=self.group)

    def count_gather(self, own_bytes: int, ledger: ShardLedger, kind: str) -> None:
        ledger.add(self.ring_level, kind, own_bytes, float((self.size - 1) * own_bytes))

    def count_scatter(self, input_bytes: int, ledger: ShardLedger, kind: str) -> None:
        """Of a reduce-scatter that somebody else makes, round the ring."""
        ledger.add(self.ring_level, kind, input_bytes, (self.size - 1) / self.size * input_bytes)

    def count_exchange(self, input_bytes: int, ledger: ShardLedger, kind: str) -> None:
        for level, others in sorted(Counter(link for link in self.links if link).items()):
            part = input_bytes * others // self.size
            ledger.add(level, kind, part, float(part))

    def count_parts(self, sizes: Sequence[int], ledger: ShardLedger, kind: str) -> None:
        """Of an exchange that somebody else makes, of parts of so many bytes for each of the ranks."""
        for level in sorted(set(self.links) - {""}):
            sent = sum(size for size, link in zip(sizes, self.links, strict=True) if link == level)
            if sent:
                ledger.add(level, kind, sent, float(sent))

"""Collectives of the shard axis, and the bytes that each rank sends in them, by link level.

An all-gather or reduce-scatter is counted as a ring: this rank sends everything over the link to its successor. In an
all-to-all each part is counted under the link to its receiver.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.partition import ALIGNED_BYTES
from torchtitan_scape.topology.torch_version import all_gather_into
from torchtitan_scape.topology.traffic import SHARD, TrafficLedger


class ShardLedger:
    """Records communication of the shard axis in a `TrafficLedger`, except inside `uncounted`."""

    def __init__(self, ledger: TrafficLedger) -> None:
        self.ledger, self._enabled = ledger, True

    def add(self, level: str, kind: str, input_bytes: int, sent: float) -> None:
        """Record one collective, or its part on one level."""
        if self._enabled:
            self.ledger.add(SHARD, level, kind, input_bytes, sent)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Disable counting, for example during validation, which is no part of a training step."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def count_all_gather(self, group: RankGroup, input_bytes: int, kind: str) -> None:
        """Count an all-gather. input_bytes: size of one rank's input."""
        self.add(group.level, kind, input_bytes, float((group.size - 1) * input_bytes))

    def count_reduce_scatter(self, group: RankGroup, input_bytes: int, kind: str) -> None:
        """Count a ring reduce-scatter. input_bytes: size of one rank's unreduced input."""
        self.add(group.level, kind, input_bytes, (group.size - 1) / group.size * input_bytes)

    def count_all_to_all(self, group: RankGroup, input_bytes: int, kind: str) -> None:
        """Count an all-to-all of equal parts. input_bytes: size of one rank's input, its own part included."""
        for level, others in sorted(Counter(link for link in group.link_levels if link).items()):
            part = input_bytes * others // group.size
            self.add(level, kind, part, float(part))

    def count_all_to_all_uneven(self, group: RankGroup, sizes: Sequence[int], kind: str) -> None:
        """Count an all-to-all. sizes: bytes that this rank sends to each member of the group."""
        for level in sorted(set(group.link_levels) - {""}):
            sent = sum(size for size, link in zip(sizes, group.link_levels, strict=True) if link == level)
            if sent:
                self.add(level, kind, sent, float(sent))


def all_gather(output: Tensor, input: Tensor, group: RankGroup, ledger: ShardLedger, kind: str) -> None:
    """Gather `input` (b,) of all ranks into `output` (size * b,), in group order.

    `input` must have a multiple of 16 bytes.
    """
    if group.size == 1:
        output.copy_(input)
        return
    assert input.nbytes % ALIGNED_BYTES == 0
    ledger.count_all_gather(group, input.nbytes, kind)
    all_gather_into(output, input, group=group.process_group)


def all_to_all(output: Tensor, input: Tensor, group: RankGroup, ledger: ShardLedger, kind: str) -> None:
    """Send row r of `input` (size, b) to rank r of the group; `output` (size, b) receives one row from each rank.

    A row must have a multiple of 16 bytes.
    """
    if group.size == 1:
        output.copy_(input)
        return
    assert input[0].nbytes % ALIGNED_BYTES == 0
    ledger.count_all_to_all(group, input.nbytes, kind)
    dist.all_to_all_single(output, input, group=group.process_group)

"""The endpoint of a run in which nothing moves between replicas: bytes are counted, tensors stay what they are.

A dry run of many ranks in one process has it, and whoever speaks for all the replicas of a process at once: what they
bring has been added up already, or is the same for all of them.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from topology.codecs import Codec
from topology.collectives import ReplicaCollectives, objects_of
from topology.comm_stream import Handle
from topology.groups import ReplicaGroups, Ring
from topology.traffic import REPLICATE


class DryRunCollectives(ReplicaCollectives):
    """`ReplicaCollectives` of this replica among `replicas` that are not there.

    Args:
        groups: the real ones; `model` holds the shards. Its rings and replicate group, fake ones in a dry run, say how
            many replicas there are, unless
        replicas: does: of so many, each on a node of its own, in one ring over the network.
    """

    def __init__(self, groups: ReplicaGroups | None = None, replicas: int = 0) -> None:
        super().__init__(groups or ReplicaGroups(None, None), Ring("network", replicas, 0) if replicas else None)

    def _reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        for lost in (each for each in (error, carried_error) if each is not None):
            lost.zero_()
        return Handle()

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        return self._reduce(tensor, divisor, codec, error, None)

    def _gather(self, output: Tensor, own: Tensor) -> Handle:
        output.view(self.replicas, -1).copy_(own.expand(self.replicas, -1))
        return Handle()

    def _union(self, bits: Tensor) -> Handle:
        return Handle()

    @property
    def peers(self) -> tuple[list[int], int]:
        return list(range(self.replicas)), self.replica

    def gather_from_peers(self, values: Tensor) -> Tensor:
        return values.expand(self.replicas, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing: all have it."""

    def sum_over_replicas(self, values: Tensor) -> None:
        values.mul_(self.replicas)

    def sum_over_all(self, values: Tensor) -> Tensor:
        values = values * self.replicas
        if self.groups.model is not None:
            dist.all_reduce(values, group=self.groups.model)
        return values

    def gather_objects(self, item: Any) -> list[Any]:
        """Of the ranks that are there."""
        return [item] if self.is_fake else objects_of(self.groups.model, [item])

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return [item] * self.replicas

    def all_true(self, flag: Tensor) -> Tensor:
        value = self._true_in_model(flag)
        self._count_flag(value)
        if self.replicas > 1:
            sent = 2.0 * (self.replicas - 1) / self.replicas * value.nbytes
            self.traffic.add(REPLICATE, self.rings[-1].level, "flag", value.nbytes, sent)
        return value > 0

    def sum_over_owners(self, value: Tensor) -> Tensor:
        return self.sum_over_model(value)

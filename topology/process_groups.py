"""The endpoint of a rank among ranks: collectives on process groups, level by level."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.codecs import Codec
from topology.collectives import ReplicaCollectives, gathered_scalars, objects_of
from topology.comm_stream import CommStream, Handle
from topology.dry_run import DryRunCollectives
from topology.groups import ReplicaGroups
from topology.primitives import all_gather_into, reduce_scatter_into
from topology.stages import Group, gather_, reduce_, reduce_coded, scatter_, scatter_coded, unite_
from topology.traffic import REPLICATE


class ProcessGroupCollectives(ReplicaCollectives):
    """`ReplicaCollectives` on the groups it is given.

    `replicas` is None (one replica), a ProcessGroup of the ranks that hold the same parameters, or
    `ReplicaGroups`. With a plain ProcessGroup and parameters sharded by DTensor, `model` names the group of
    the shards.
    """

    def __init__(self, replicas: ProcessGroup | ReplicaGroups | None, model: ProcessGroup | None = None) -> None:
        if not isinstance(replicas, ReplicaGroups):
            replicas = ReplicaGroups(replicate=replicas, model=model)
        _check_disjoint(replicas)
        super().__init__(replicas)
        self._comm_streams = [CommStream() for _ in replicas.comm_streams]
        self._next_stream = 0

    def _reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        if codec is not None:
            return self._start(
                lambda groups: reduce_coded(tensor, groups, divisor, codec, error, carried_error), tensor.device
            )
        if len(self.rings) == 1:
            work = dist.all_reduce(tensor, group=self.groups.replicate, async_op=True)
            # gloo has no mean of its own
            return Handle(work.wait, partial(tensor.div_, divisor))
        return self._start(lambda groups: reduce_(tensor, groups, divisor), tensor.device)

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        if codec is not None:
            return self._start(lambda groups: scatter_coded(tensor, groups, divisor, codec, error), tensor.device)
        if len(self.rings) > 1:
            return self._start(lambda groups: scatter_(tensor, groups, divisor), tensor.device)
        own, group = tensor.view(self.replicas, -1)[self.replica], self.groups.replicate
        if tensor.is_cuda:
            work = reduce_scatter_into(own, tensor, group=group, async_op=True)
            return Handle(work.wait, partial(own.div_, divisor))
        parts = torch.empty_like(tensor)  # as in `topology.stages`
        work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
        return Handle(work.wait, lambda: torch.sum(parts.view(self.replicas, -1), 0, out=own).div_(divisor))

    def _gather(self, output: Tensor, own: Tensor) -> Handle:
        if len(self.rings) == 1:
            return Handle(all_gather_into(output, own, group=self.groups.replicate, async_op=True).wait)
        return self._start(lambda groups: gather_(output, own, groups), output.device)

    def _union(self, bits: Tensor) -> Handle:
        return self._start(lambda groups: unite_(bits, groups), bits.device)

    def _start(self, exchange: Callable[[list[Group]], None], device: torch.device) -> Handle:
        """Runs `exchange(groups)` in the next lane; here and now where there is none."""
        if not self._comm_streams:
            assert len(self.rings) == 1 and self.groups.replicate is not None
            exchange([(self.rings[0], self.groups.replicate)])
            return Handle()
        lane, groups = self._comm_streams[self._next_stream], self.groups.comm_streams[self._next_stream]
        self._next_stream = (self._next_stream + 1) % len(self._comm_streams)
        stages: list[Group] = list(zip(self.rings, groups, strict=True))
        return lane.start(lambda: exchange(stages), device)

    @property
    def peers(self) -> tuple[list[int], int]:
        group = self.groups.replicate
        if group is None:
            return [dist.get_rank() if dist.is_initialized() else 0], 0
        return dist.get_process_group_ranks(group), group.rank()

    def gather_from_peers(self, values: Tensor) -> Tensor:
        if self.groups.replicate is None:
            return values[None]
        gathered = torch.empty(self.replicas * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_into(gathered, values, group=self.groups.replicate)
        return gathered.view(self.replicas, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.groups.replicate is not None:
            dist.broadcast(tensor, dist.get_process_group_ranks(self.groups.replicate)[source], self.groups.replicate)

    def sum_over_replicas(self, values: Tensor) -> None:
        if self.groups.replicate is not None:
            dist.all_reduce(values, group=self.groups.replicate)

    def sum_over_all(self, values: Tensor) -> Tensor:
        values = values.clone()
        for group in (self.groups.model, self.groups.replicate):
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

    def gather_objects(self, item: Any) -> list[Any]:
        return objects_of(self.groups.replicate, objects_of(self.groups.model, [item]))

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return objects_of(self.groups.replicate, [item])

    def all_true(self, flag: Tensor) -> Tensor:
        value, group = self._true_in_model(flag), self.groups.replicate
        self._count_flag(value)
        if group is not None:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=group)
            self._count_scalar(REPLICATE, group, "flag", value.nbytes, 2.0 * (group.size() - 1) / group.size())
        return value > 0

    def sum_over_owners(self, value: Tensor) -> Tensor:
        own, group = self.sum_over_model(value), self.groups.replicate
        if group is None:
            return own
        self._count_scalar(REPLICATE, group, "norm", own.nbytes, float(group.size() - 1))
        return gathered_scalars(own, group).double().sum().to(own.dtype)


def collectives_of(
    replicas: "ProcessGroup | ReplicaGroups | ReplicaCollectives | None", model: ProcessGroup | None = None
) -> ReplicaCollectives:
    """The endpoint for what names the replicas; see `ProcessGroupCollectives`. That of a dry run on fake groups."""
    if isinstance(replicas, ReplicaCollectives):
        return replicas
    if dist.is_initialized() and dist.get_backend() == "fake":
        return DryRunCollectives(replicas if isinstance(replicas, ReplicaGroups) else ReplicaGroups(replicas, model))
    return ProcessGroupCollectives(replicas, model)


def _check_disjoint(groups: ReplicaGroups) -> None:
    """A rank's twins hold the same shard; the ranks it shares a replica with hold others."""
    if groups.replicate is None or groups.model is None:
        return
    common = set(dist.get_process_group_ranks(groups.replicate)) & set(dist.get_process_group_ranks(groups.model))
    if len(common) > 1:
        raise ValueError(
            f"ranks {sorted(common)} are given as replicas of each other, but hold different shards of one replica; "
            "`replicas` must be the ranks that hold the same shard, such as the replicate axis of a 2-D mesh"
        )

"""`ReplicaCollectives` of a rank in a distributed run: collectives on process groups, level by level."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import CommStream, Handle
from torchtitan_scape.topology.dry_run import DryRunCollectives
from torchtitan_scape.topology.groups import ReplicaGroups, gather_lists, gather_scalars
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.stages import divide_, start_pair_mean
from torchtitan_scape.topology.torch_version import all_gather_into, all_reduce_tensors, reduce_scatter_into


class ProcessGroupCollectives(ReplicaCollectives):
    """`ReplicaCollectives` on process groups.

    Args:
        replicas: `ReplicaGroups`, or the process group of the ranks that hold the same parameters, or None for one
            replica.
        model: Group of the shards of one replica, if `replicas` is a process group and parameters are DTensors.

    Raises:
        ValueError: Two ranks of `replicas` hold different shards of one replica.
    """

    def __init__(self, replicas: ProcessGroup | ReplicaGroups | None, model: ProcessGroup | None = None) -> None:
        if not isinstance(replicas, ReplicaGroups):
            replicas = ReplicaGroups(replicate=replicas, model=model)
        _check_disjoint(replicas)
        super().__init__(replicas)
        self._comm_streams = [CommStream() for _ in replicas.comm_streams]
        self._next_stream = 0

    def _start(self, exchange: Callable[[tuple[RankGroup, ...]], None], device: torch.device) -> Handle:
        """Run `exchange(levels)` on the next stream, or in the calling thread if there are no streams."""
        if not self._comm_streams:
            assert self.groups.replicate is not None
            exchange((self._level,))
            return Handle()
        stream, levels = self._comm_streams[self._next_stream], self.groups.comm_streams[self._next_stream]
        self._next_stream = (self._next_stream + 1) % len(self._comm_streams)
        return stream.start(lambda: exchange(levels), device)

    @property
    def _level(self) -> RankGroup:
        """The only level, on the group of the replicas."""
        (level,) = self.levels
        return replace(level, process_group=self.groups.replicate)

    # On one level, FP32 exchanges are single collectives, which need no stream.

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        if codec is not None or len(self.levels) > 1:
            return super()._all_reduce(tensor, divisor, codec, error, carried_error)
        work = dist.all_reduce(tensor, group=self.groups.replicate, async_op=True)
        return Handle(work.wait, partial(divide_, tensor, divisor))  # gloo has no ReduceOp.AVG

    def reduces_together(self, device: torch.device) -> bool:
        # gloo would copy the tensors into a buffer of their size.
        return len(self.levels) == 1 and device.type == "cuda"

    def _all_reduce_together(self, tensors: list[Tensor], mean: bool) -> Handle:
        return Handle(all_reduce_tensors(tensors, mean, self.groups.replicate))

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        if codec is not None or len(self.levels) > 1:
            return super()._reduce_scatter(tensor, divisor, codec, error)
        own, group = tensor.view(self.replicas, -1)[self.replica], self.groups.replicate
        if tensor.is_cuda:
            work = reduce_scatter_into(own, tensor, group=group, async_op=True)
            return Handle(work.wait, partial(divide_, own, divisor))
        parts = torch.empty_like(tensor)  # gloo: an all-to-all moves fewer bytes, see `topology.stages`
        work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
        return Handle(work.wait, lambda: divide_(torch.sum(parts.view(self.replicas, -1), 0, out=own), divisor))

    def _pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        if len(self.levels) > 1:
            return super()._pair_mean(tensor, draw)
        return start_pair_mean(tensor, self._level, self.partner(draw))

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        if len(self.levels) > 1:
            return super()._all_gather(output, input)
        return Handle(all_gather_into(output, input, group=self.groups.replicate, async_op=True).wait)

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
        return gather_lists(self.groups.replicate, gather_lists(self.groups.model, [item]))

    def gather_from_replicas(self, item: Any) -> list[Any]:
        return gather_lists(self.groups.replicate, [item])

    def _minimum(self, values: Tensor) -> Tensor:
        smallest = self._minimum_over_model(values)
        if self._scalars is not None:
            dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._scalars)
        return smallest

    def _gather_scalar(self, value: Tensor) -> Tensor:
        assert self._scalars is not None
        return gather_scalars(value, self._scalars)


def collectives_of(
    replicas: "ProcessGroup | ReplicaGroups | ReplicaCollectives | None", model: ProcessGroup | None = None
) -> ReplicaCollectives:
    """Return the endpoint for `replicas`; see `ProcessGroupCollectives`. With the fake backend, a dry run."""
    if isinstance(replicas, ReplicaCollectives):
        return replicas
    if dist.is_initialized() and dist.get_backend() == "fake":
        return DryRunCollectives(replicas if isinstance(replicas, ReplicaGroups) else ReplicaGroups(replicas, model))
    return ProcessGroupCollectives(replicas, model)


def _check_disjoint(groups: ReplicaGroups) -> None:
    """Check that no other rank is both a peer, which holds the same shard, and a rank of the same replica."""
    if groups.replicate is None or groups.model is None:
        return
    common = set(dist.get_process_group_ranks(groups.replicate)) & set(dist.get_process_group_ranks(groups.model))
    if len(common) > 1:
        raise ValueError(
            f"ranks {sorted(common)} are given as replicas of each other, but hold different shards of one replica; "
            "`replicas` must be the ranks that hold the same shard, such as the replicate axis of a 2-D mesh"
        )

"""What replicas say to each other (and the scalars inside a replica), with its bytes counted.

Counting: `handed` is the size of the tensor a collective was given; `sent` is what this rank puts on the wire to its
successor in the ring (`topology.ring_bytes`), filed under the level of the link to that successor, so that the sum over
ranks is what crosses each kind of link.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.chunks import CHUNK_ENTRIES, Pieces, Source, all_reduce_chunked
from topology.groups import ReplicaGroups, Ring
from topology.lanes import Handle, Lane
from topology.ring_bytes import gather_bytes, reduce_bytes, scatter_bytes
from topology.stages import Group, all_gather_into, gather_, place_of, reduce_, reduce_scatter_into, scatter_


@dataclass
class Traffic:
    """Bytes and calls since the start, by (link level, kind of message)."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    handed: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, level: str, kind: str, handed: int, sent: float) -> None:
        self.calls[level, kind] += 1
        self.handed[level, kind] += handed
        self.sent[level, kind] += sent

    def sent_by_level(self) -> dict[str, float]:
        """Bytes this rank put on the wire, by link level."""
        totals: dict[str, float] = defaultdict(float)
        for (level, _), sent in self.sent.items():
            totals[level] += sent
        return dict(totals)


class ReplicaCollectives:
    """What replicas say to each other, on the groups it is given.

    `replicas` is None (one replica), a ProcessGroup of the ranks that hold the same parameters, or
    `ReplicaGroups`. With a plain ProcessGroup and parameters sharded by DTensor, `model` names the group of
    the shards.
    """

    # Whether this process plays all the replicas: see `topology.simulated`.
    simulated = False
    # Of a chunk that has a row a replica: the host fills each row on its own. With 1,024 replicas it has 256 MiB.
    least_columns = 1 << 16

    def __init__(self, replicas: ProcessGroup | ReplicaGroups | None, model: ProcessGroup | None = None) -> None:
        if not isinstance(replicas, ReplicaGroups):
            replicas = ReplicaGroups(replicate=replicas, model=model)
        _check_disjoint(replicas)
        self.groups = replicas
        self.traffic = Traffic()
        self.replicas, place = _size_and_rank(replicas.replicate)
        self.model_ranks, self.model_rank = _size_and_rank(replicas.model)
        self._levels = {
            group: _own_level(replicas, group) for group in (replicas.replicate, replicas.model) if group is not None
        }
        self.rings = replicas.rings
        if replicas.replicate is not None and not self.rings:
            self.rings = (Ring(self._levels[replicas.replicate], self.replicas, place),)
        self.replica = place_of(self.rings)
        self._lanes = [Lane() for _ in replicas.lanes]
        self._next_lane = 0

    @property
    def is_fake(self) -> bool:
        """True in a dry run, whose collectives move nothing, so that received values mean nothing."""
        return dist.is_initialized() and dist.get_backend() == "fake"

    # ------------------------------------------------------------------------------ the replicate axis

    def granularity(self, rounded: bool = False) -> int:
        """What the entries of an all-reduce must be a multiple of, so that every level can divide them."""
        return 1 if len(self.rings) < 2 and not rounded else self.replicas

    def all_reduce(
        self, tensor: Tensor, mean: bool = True, kind: str = "payload", error: Tensor | None = None
    ) -> Handle:
        """Starts the mean (or sum) over replicas of FP32 (n,), in place, level by level.

        n: a multiple of `granularity`. error: FP32 (n,); makes BF16 cross the outermost level, and receives what
        this replica has to carry over for the rounding: of sum over replicas of (tensor - error) nothing is lost.
        """
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        rounded = error is not None
        assert tensor.numel() % self.granularity(rounded) == 0
        self._count(kind, reduce_bytes(tensor.numel(), self.rings, rounded))
        divisor = float(self.replicas) if mean else 1.0
        if self.is_fake or (len(self.rings) == 1 and not rounded):
            work = dist.all_reduce(tensor, group=self.groups.replicate, async_op=True)
            # gloo has no mean of its own
            return Handle(work.wait, partial(tensor.div_, divisor))
        return self._start(lambda groups: reduce_(tensor, groups, divisor, error), tensor.device)

    def all_reduce_chunked(
        self, source: "Sequence[Tensor] | Source", mean: bool = True, chunk_entries: int = CHUNK_ENTRIES
    ) -> None:
        """The mean (or sum) over replicas of FP32 entries, in place, through two buffers of `chunk_entries`.

        While one chunk is on the wire the next is filled. `source`: flat tensors, or a `Source`.
        """
        pieces = Pieces(source) if isinstance(source, Sequence) else source
        all_reduce_chunked(self, pieces, mean, chunk_entries)

    def reduce_scatter(self, tensor: Tensor, kind: str = "payload", error: Tensor | None = None) -> Handle:
        """Starts the mean over replicas of FP32 (n,) for the owners of its parts: of `replicas` equal ones each
        replica receives the `replica`-th, in place. The others are undefined behind it.

        n: a multiple of `replicas`. error: FP32 (n,); makes BF16 cross the outermost level, and receives what this
        replica has to carry over for the rounding.
        """
        if self.replicas == 1 or tensor.numel() == 0:
            return Handle()
        rounded, divisor = error is not None, float(self.replicas)
        self._count(kind, scatter_bytes(tensor.numel(), self.rings, rounded))
        if self.is_fake or (len(self.rings) == 1 and not rounded):
            own, group = tensor.view(self.replicas, -1)[self.replica], self.groups.replicate
            if tensor.is_cuda or self.is_fake:
                work = reduce_scatter_into(own, tensor, group=group, async_op=True)
                return Handle(work.wait, partial(own.div_, divisor))
            parts = torch.empty_like(tensor)  # as in `topology.stages`
            work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
            return Handle(work.wait, lambda: torch.sum(parts.view(self.replicas, -1), 0, out=own).div_(divisor))
        return self._start(lambda groups: scatter_(tensor, groups, divisor, error), tensor.device)

    def all_gather(self, output: Tensor, own: Tensor, kind: str = "mask") -> Handle:
        """Starts gathering `own` (b,) of every replica into `output` (replicas * b,), in the order of `replica`."""
        if self.replicas == 1:
            output.copy_(own)
            return Handle()
        self._count(kind, gather_bytes(own.nbytes, self.rings))
        if self.is_fake or len(self.rings) == 1:
            return Handle(all_gather_into(output, own, group=self.groups.replicate, async_op=True).wait)
        return self._start(lambda groups: gather_(output, own, groups), output.device)

    def reduced_bytes(self, entries: int, rounded: bool = False) -> float:
        """Bytes that this rank sends in an all-reduce of FP32 `entries`."""
        return sum(sent for _, _, sent in reduce_bytes(entries, self.rings, rounded)) if self.replicas > 1 else 0.0

    def scattered_bytes(self, entries: int, rounded: bool = False) -> float:
        """The same in a reduce-scatter."""
        return sum(sent for _, _, sent in scatter_bytes(entries, self.rings, rounded))

    def gathered_bytes(self, own: int) -> float:
        """Bytes that this rank sends in an all-gather to which it brings `own` bytes."""
        return sum(sent for _, _, sent in gather_bytes(own, self.rings))

    def _start(self, exchange: Any, device: torch.device) -> Handle:
        """Runs `exchange(groups)` in the next lane; here and now where there is none."""
        if not self._lanes:
            assert len(self.rings) == 1 and self.groups.replicate is not None
            exchange([(self.rings[0], self.groups.replicate)])
            return Handle()
        lane, groups = self._lanes[self._next_lane], self.groups.lanes[self._next_lane]
        self._next_lane = (self._next_lane + 1) % len(self._lanes)
        stages: list[Group] = list(zip(self.rings, groups, strict=True))
        return lane.start(lambda: exchange(stages), device)

    def broadcast_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives every replica the values of replica 0, in place; not counted, it happens once."""
        for tensor in tensors if self.replicas > 1 else ():
            values = tensor if tensor.is_contiguous() else tensor.contiguous()
            self.broadcast(values, 0)
            if values is not tensor:
                tensor.copy_(values)

    # ------------------------------------------------------- whether replicas are what they should be

    @property
    def twins(self) -> tuple[list[int], int]:
        """(ranks that hold the same parameters, which of them this one is), in the order of the replicate group."""
        group = self.groups.replicate
        if group is None:
            return [dist.get_rank() if dist.is_initialized() else 0], 0
        return dist.get_process_group_ranks(group), group.rank()

    def gather_from_twins(self, values: Tensor) -> Tensor:
        """`values` (n,) of all `twins`, (replicas, n); not counted: a few numbers, now and then."""
        if self.groups.replicate is None:
            return values[None]
        gathered = torch.empty(self.replicas * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_into(gathered, values, group=self.groups.replicate)
        return gathered.view(self.replicas, -1)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Gives all `twins` the contiguous `tensor` of the `source`-th of them, in place; not counted."""
        if self.groups.replicate is not None:
            dist.broadcast(tensor, dist.get_process_group_ranks(self.groups.replicate)[source], self.groups.replicate)

    # ------------------------------------------------------------------------- scalars, over all axes

    def all_true(self, flag: Tensor) -> Tensor:
        """bool, of the shape of `flag`: whether it is true on every rank of every replica, entry by entry."""
        value = flag.float()
        for group in (self.groups.model, self.groups.replicate):
            if group is not None:
                dist.all_reduce(value, dist.ReduceOp.MIN, group=group)
                self._count_one(group, "flag", value.nbytes, 2.0 * (group.size() - 1) / group.size())
        return value > 0

    def sum_over_model(self, value: Tensor) -> Tensor:
        """FP32 (): the sum over the ranks of this replica, added in rank order.

        An all-reduce may add in another order in each node; this sum is the same to the last bit on every
        replica.
        """
        group = self.groups.model
        if group is None:
            return value
        values = self._gathered(value, group)
        total = values[0]
        for i in range(1, group.size()):
            total = total + values[i]
        return total

    def sum_over_owners(self, value: Tensor) -> Tensor:
        """FP32 (): the sum over all ranks: of a replica, then over the replicas.

        All have the same summands and add them alike, in FP64, which gives all the same bits.
        """
        own, group = self.sum_over_model(value), self.groups.replicate
        return own if group is None else self._gathered(own, group).double().sum().to(own.dtype)

    def _gathered(self, value: Tensor, group: ProcessGroup) -> Tensor:
        """Every rank's scalar, in rank order."""
        values = torch.empty(group.size(), dtype=value.dtype, device=value.device)
        all_gather_into(values, value.view(1), group=group)
        self._count_one(group, "norm", value.nbytes, float(group.size() - 1))
        return values

    def sum_over_all(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks of all replicas, for reports; not counted."""
        values = values.clone()
        for group in (self.groups.model, self.groups.replicate):
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

    def sum_over_replicas(self, values: Tensor) -> None:
        """The sum of `values`, of any dtype, over the replicas, in place; for checkpoints, not counted."""
        if self.groups.replicate is not None:
            dist.all_reduce(values, group=self.groups.replicate)

    def gather_objects(self, item: Any) -> list[Any]:
        """Every rank's `item`, for set-up and for error messages; not counted."""
        items = [item]
        for group in (self.groups.model, self.groups.replicate):
            if group is not None:
                lists: list[Any] = [None] * group.size()
                dist.all_gather_object(lists, items, group=group)
                items = [entry for entries in lists for entry in entries]
        return items

    def _count(self, kind: str, stages: Iterable[tuple[str, int, float]]) -> None:
        for level, handed, sent in stages:
            self.traffic.add(level, kind, handed, sent)

    def _count_one(self, group: ProcessGroup, kind: str, handed: int, factor: float) -> None:
        self.traffic.add(self._levels[group], kind, handed, factor * handed)


def _size_and_rank(group: ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


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


def _own_level(groups: ReplicaGroups, group: ProcessGroup) -> str:
    """The level of the link from this rank to its successor in the ring of `group`."""
    if groups.layout is None:
        return "network"
    return groups.layout.ring_level(dist.get_rank(), tuple(dist.get_process_group_ranks(group)))

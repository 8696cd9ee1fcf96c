"""N replicas that one rank plays, or one group of shards: what they would say to each other, with its bytes counted.

Nothing crosses a wire between replicas. What a tensor's rows hold is averaged in the order of the replicas; bytes are
those that one rank of a real run sends, a replica a node, in one ring over the network.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from topology.chunks import Pieces, Source
from topology.dry_run import DryRunCollectives
from topology.groups import ReplicaGroups
from topology.lanes import Handle
from topology.layout import Layout
from topology.ring_bytes import gather_bytes, reduce_bytes


class SimulatedCollectives(DryRunCollectives):
    """`ReplicaCollectives` of `replicas` replicas in this process.

    A tensor with a row a replica is what the replicas bring; one without has been added up over them already, as
    gradients are that several backward passes have left.

    Args:
        replicas: how many this process plays.
        groups: the real ones: `model` holds the shards of all the replicas alike; no `replicate`.

    Raises ValueError for fewer than two replicas, and where there are real replicas besides.
    """

    simulated = True

    def __init__(self, replicas: int, groups: ReplicaGroups | None = None) -> None:
        if replicas < 2:
            raise ValueError(f"{replicas} simulated replicas; there must be 2 or more, and one needs no simulation")
        if groups is not None and groups.replicate is not None:
            raise ValueError(
                f"{replicas} simulated replicas beside {groups.replicate.size()} real ones; start one group of shards "
                "only"
            )
        super().__init__(groups, replicas)

    @property
    def is_fake(self) -> bool:
        """False in a dry run too: between these replicas nothing has to move."""
        return False

    def all_reduce(
        self, tensor: Tensor, mean: bool = True, kind: str = "payload", error: Tensor | None = None
    ) -> Handle:
        """The mean (or sum) over replicas of FP32 (replicas, n), into the first row; of (n,), already a sum, in place.

        error: FP32 (replicas, n); makes BF16 cross the ring, as `topology.stages` does it, and receives what each
        replica has to carry over.
        """
        if tensor.numel() == 0:
            return Handle()
        rounded, divisor = error is not None, float(self.replicas) if mean else 1.0
        assert tensor.shape[-1] % self.granularity(rounded) == 0
        self._count(kind, reduce_bytes(tensor.shape[-1], self.rings, rounded))
        if error is not None:
            _reduce_rounded(tensor, divisor, error)
            return Handle()
        total, *others = tensor.unbind() if tensor.ndim > 1 else (tensor,)
        for other in others:
            total += other
        total.div_(divisor)
        return Handle()

    def all_reduce_chunked(self, source: Any, mean: bool = True) -> None:
        """As `ReplicaCollectives`; or `source` holds the flat tensors, or the `Source`, of every replica.

        Then their mean (or sum) lands at the first.
        """
        if isinstance(source, Sequence) and source and not isinstance(source[0], Tensor):
            source = _Added(source)
        super().all_reduce_chunked(source, mean)

    def all_gather(self, output: Tensor, own: Tensor, kind: str = "mask") -> Handle:
        """`own` (replicas, b) into `output` (replicas * b,)."""
        self._count(kind, gather_bytes(own[0].nbytes, self.rings))
        output.copy_(own.view(-1))
        return Handle()


class _Added:
    """`Source` of the sum over replicas, in their order; what comes back lands at the first."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self._replicas: list[Source] = [Pieces(own) if isinstance(own, Sequence) else own for own in replicas]
        self.entries, self.device = self._replicas[0].entries, self._replicas[0].device

    def fill(self, chunk: Tensor, first: int) -> None:
        own = torch.empty_like(chunk)
        self._replicas[0].fill(chunk, first)
        for source in self._replicas[1:]:
            source.fill(own, first)
            chunk += own

    def land(self, chunk: Tensor, first: int) -> None:
        self._replicas[0].land(chunk, first)


def _reduce_rounded(x: Tensor, divisor: float, error: Tensor) -> None:
    """`topology.stages._reduce_rounded` of one ring whose members' values are the rows of x (replicas, n)."""
    total = torch.zeros_like(x[0])
    for own, lost in zip(x, error, strict=True):
        sent = own.to(torch.bfloat16)
        torch.sub(own, sent, out=lost)
        total += sent
    total.div_(divisor)
    rounded = total.to(torch.bfloat16)
    parts = len(x)
    returned = ((total - rounded) * divisor).view(parts, -1)
    for replica, lost in enumerate(error):
        lost.view(parts, -1)[replica] += returned[replica]
    x[0].copy_(rounded)


def played_layout(layout: Layout, replicas: int) -> Layout:
    """The layout of the real run that `layout`, of one replica, plays: as many nodes for each of the replicas."""
    assert layout.replicate == 1
    return replace(layout, world_size=layout.world_size * replicas, replicate=replicas)

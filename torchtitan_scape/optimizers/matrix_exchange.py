"""Exchanges that divide matrices among ranks, so that no work is repeated: within a replica, and among replicas."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

ALIGNED_ENTRIES = 8  # BF16, 16 bytes


class MatrixExchange:
    """All-to-all that assigns one whole matrix to each rank at a time, so that no work is repeated.

    Args:
        group: The ranks, in the order of their rows, sharded as by FSDP2: ceil(rows / ranks) each, fewer or none on the
            last ranks. None for one rank.
        count: Called for every exchange with the bytes sent to each rank, in rank order.
    """

    def __init__(self, group: ProcessGroup | None, count: Callable[[Sequence[int]], None] | None = None) -> None:
        self._group, self._count = group, count
        self.ranks = 1 if group is None else group.size()
        self._group_rank = 0 if group is None else group.rank()

    def first_row(self, rows: int) -> int:
        """Return the first row of this rank's shard of a matrix with so many rows."""
        return self._group_rank * -(-rows // self.ranks)

    def work(
        self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], on_whole: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Replace matrices by `on_whole` of the whole matrices. Collective.

        Args:
            shards: This rank's rows of at most `ranks` matrices, contiguous and of one dtype; overwritten by the rows
                of the result.
            shapes: Shapes of the whole matrices, equal on all ranks.
            on_whole: Function of the position of a matrix among `shards` and the whole matrix; called on the one rank
                that owns the matrix.
        """
        assert len(shards) <= self.ranks
        if self._group is None:
            shards[0].copy_(on_whole(0, shards[0]))
            return
        send_sizes = [-(-rows // self.ranks) * columns for rows, columns in shapes] + [0] * (self.ranks - len(shards))
        receive_sizes = [send_sizes[self._group_rank]] * self.ranks
        parts = shards[0].new_zeros(sum(send_sizes))
        views = [
            part[: shard.numel()].view_as(shard)
            for shard, part in zip(shards, parts.split(send_sizes)[: len(shards)], strict=True)
        ]
        torch._foreach_copy_(views, list(shards))
        whole = parts.new_empty(sum(receive_sizes))
        self._exchange(whole, receive_sizes, parts, send_sizes)
        if self._group_rank < len(shards):
            rows, columns = shapes[self._group_rank]
            matrix = whole.view(-1, columns)[:rows]
            matrix.copy_(on_whole(self._group_rank, matrix))
        self._exchange(parts, send_sizes, whole, receive_sizes)
        torch._foreach_copy_(list(shards), views)

    def _exchange(self, output: Tensor, outputs: list[int], parts: Tensor, sizes: list[int]) -> None:
        if self._count is not None:
            self._count([size * parts.itemsize for size in sizes])
        dist.all_to_all_single(output, parts, outputs, sizes, group=self._group)


class ReplicaShare:
    """All-gather of matrices that were divided among replicas with equal parameters and gradients.

    Args:
        replicas: Number of replicas.
        replica: Index of this replica.
        all_gather: Called with output (replicas * n,) and input (n,), BF16, in replica order; the input has a multiple
            of 16 bytes. None for one replica.
    """

    def __init__(
        self, replicas: int = 1, replica: int = 0, all_gather: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        assert replicas == 1 or all_gather is not None
        self.replicas, self.replica, self._all_gather = replicas, replica, all_gather

    def gather(
        self, own: Sequence[Tensor], shapes: Sequence[Sequence[torch.Size]], device: torch.device
    ) -> list[Tensor]:
        """Return the matrices of all replicas, in order. Collective.

        Args:
            own: Matrices of this replica, BF16.
            shapes: Shapes of every replica's matrices; replicas without matrices may be missing at the end.
            device: Device of the matrices.
        """
        if self._all_gather is None:
            return list(own)
        sizes = [[shape.numel() for shape in part] for part in shapes]
        # At least one entry: the last ranks of a replica may have no rows.
        length = max(1, -(-max(map(sum, sizes)) // ALIGNED_ENTRIES)) * ALIGNED_ENTRIES
        input = torch.zeros(length, dtype=torch.bfloat16, device=device)
        output = input.new_empty(self.replicas * length)
        if own:
            torch.cat([matrix.reshape(-1) for matrix in own], out=input[: sum(sizes[self.replica])])
        self._all_gather(output, input)
        return [
            values.view(shape)
            for row, part, counts in zip(output.split(length), shapes, sizes, strict=False)
            for values, shape in zip(row[: sum(counts)].split(counts), part, strict=True)
        ]

"""Matrices that lie by rows with the ranks of one replica, each whole on one of these while something is done to it."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class MatrixExchange:
    """Deals as many matrices at once as there are ranks, so that none repeats what another does.

    Args:
        group: of the ranks, which hold the rows in their order, as FSDP2 cuts them: ceil(rows / ranks) each, the last
            ones fewer or none. None for one rank.
        count: is told of every exchange the bytes that go to each rank, in their order.
    """

    def __init__(self, group: ProcessGroup | None, count: Callable[[Sequence[int]], None] | None = None) -> None:
        self._group, self._count = group, count
        self.ranks = 1 if group is None else group.size()
        self._place = 0 if group is None else group.rank()

    def work(
        self, pieces: Sequence[Tensor], shapes: Sequence[torch.Size], on_whole: Callable[[Tensor], Tensor]
    ) -> None:
        """pieces: this rank's rows of `ranks` matrices at most, contiguous, of one dtype; they become those of what
        `on_whole` makes of the whole matrix, on the one rank that has it. A collective call.

        shapes: of the whole matrices, the same on all ranks.
        """
        assert len(pieces) <= self.ranks
        if self._group is None:
            pieces[0].copy_(on_whole(pieces[0]))
            return
        given = [-(-rows // self.ranks) * columns for rows, columns in shapes] + [0] * (self.ranks - len(pieces))
        taken = [given[self._place]] * self.ranks
        parts = pieces[0].new_zeros(sum(given))
        views = [
            part[: piece.numel()].view_as(piece)
            for piece, part in zip(pieces, parts.split(given)[: len(pieces)], strict=True)
        ]
        torch._foreach_copy_(views, list(pieces))
        whole = parts.new_empty(sum(taken))
        self._exchange(whole, taken, parts, given)
        if self._place < len(pieces):
            rows, columns = shapes[self._place]
            matrix = whole.view(-1, columns)[:rows]
            matrix.copy_(on_whole(matrix))
        self._exchange(parts, given, whole, taken)
        torch._foreach_copy_(list(pieces), views)

    def _exchange(self, output: Tensor, outputs: list[int], parts: Tensor, sizes: list[int]) -> None:
        if self._count is not None:
            self._count([size * parts.itemsize for size in sizes])
        dist.all_to_all_single(output, parts, outputs, sizes, group=self._group)

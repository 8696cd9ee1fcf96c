"""The passes of the sharded form of SCAPE ("gather"): what PyTorch and Triton both provide for it.

A step packs as in the local form, without the moment. The payload's sum goes to the owners of its entries alone. They
take the norm (`squares`), compute new parameter values, which replace the payload (`update`), and send them to all
(`values`), who write them (`write`).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import BlockLayout, Mask
from kernels.ownership import Ownership, Piece
from kernels.passes import Part, Rates, ScapePasses


class GatherPasses(ScapePasses):
    """`ScapePasses` where the owner of entries updates them for all replicas.

    `states` hold this replica's residual off A, zero on A; whole tensors have none. Of the entries that this replica
    owns there are besides, FP32 (ownership.share,):

    common: first moment on A, the part of the residual that is the same on all replicas off A.
    master: parameters, where values travel in BF16; else empty.

    The payload at the target density is a matrix with a row an owner.

    Args as `ScapePasses`, and:
        owner: whose share of the entries is this rank's.
        owners: of the whole tensors; ascending.
        rounds_values: values travel in BF16 at the target density; their owner keeps them in FP32.
    """

    def __init__(
        self,
        layout: BlockLayout,
        whole_sizes: Sequence[int],
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
        owner: int,
        owners: Sequence[int],
        rounds_values: bool = False,
        **options: Any,
    ) -> None:
        self.ownership, self.owner = Ownership(layout, selection, tuple(whole_sizes), tuple(owners)), owner
        self._pieces_at: tuple[float, tuple[tuple[Piece, ...], ...]] = (0.0, ())
        self._by_tensor: tuple[float, list[list[tuple[int, Piece]]]] = (0.0, [])
        super().__init__(layout, whole_sizes, selection, density, replica, device, **options)
        self.rounds_values = rounds_values
        self.common = self._zeros(self.ownership.share)
        self.master = self._zeros(self.ownership.share if rounds_values else 0)

    def _pad(self, layout: BlockLayout, whole_sizes: Sequence[int]) -> list[int]:
        return super()._pad(layout, [0] * len(whole_sizes))

    def _cut(self, chunk_entries: int, granularity: int) -> tuple[tuple[Part, ...], list[int]]:
        entries = self.layout.replicas * self.ownership.segment(self.density)
        return (Part(0, len(self.sizes), 0, entries, entries),), []

    def _allocate(self, state: int, payload: int, errors: int) -> None:
        # Last step's moment is the owner's, in `common`.
        self.use(self._zeros(state), self._zeros(payload), self._zeros(0), self._zeros(errors))

    def start_master(self, parameters: Sequence[Tensor]) -> None:
        """Copies the parameters, local tensors in the order of `sizes`, into the master."""
        if self.rounds_values:
            for piece in self.own_pieces(1.0):
                values = parameters[piece.tensor].reshape(-1)[piece.start : piece.end]
                self.master[piece.at :][: values.numel()] = values

    def pieces_at(self, density: float) -> tuple[tuple[Piece, ...], ...]:
        """Of every replica, for a mask of this density."""
        if self._pieces_at[0] != density:
            self._pieces_at = density, self.ownership.pieces(density)
        return self._pieces_at[1]

    def own_pieces(self, density: float) -> tuple[Piece, ...]:
        return self.pieces_at(density)[self.owner]

    def bind(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rates: list[Rates],
        in_use: Mask,
        previous: Mask,
        next_density: float,
    ) -> None:
        super().bind(parameters, gradients, rates, in_use, previous, next_density)
        self.own = self.own_pieces(in_use.density)

    def stretches(self) -> list[list[tuple[int, int]]]:
        """Where every owner's entries lie in a payload that is not compact: (first entry, length)."""
        starts = [0, *accumulate(self.counts)]
        pieces = self.pieces_at(self.in_use.density)
        return [[(starts[p.tensor] + p.first, p.count) for p in own] for own in pieces]

    def by_tensor(self, tensor: int) -> list[tuple[int, Piece]]:
        """(owner, piece) of the tensor, for the mask in use; in the order of its entries."""
        if self._by_tensor[0] != self.in_use.density:
            found: list[list[tuple[int, Piece]]] = [[] for _ in self.sizes]
            for owner, pieces in enumerate(self.pieces_at(self.in_use.density)):
                for piece in pieces:
                    found[piece.tensor].append((owner, piece))
            self._by_tensor = self.in_use.density, found
        return self._by_tensor[1][tensor]

    def clear_padding(self) -> None:
        """Zeros behind every row of the compact payload, where masks have lain."""
        for row, own in zip(self.payload.view(self.layout.replicas, -1), self.pieces_at(self.density), strict=True):
            row[sum(piece.count for piece in own) :].zero_()

    def values(self) -> tuple[Tensor, Tensor]:
        """Behind `update`, where compact: room for the values of all owners, and this rank's; FP32 or BF16."""
        own = self.payload.view(self.layout.replicas, -1)[self.owner]
        if not self.rounds_values:
            return self.payload, own
        return self.payload.view(torch.bfloat16)[: self.payload.numel()], own.to(torch.bfloat16)

    def write(self, applied: Tensor) -> None:
        """The owners' values on A, weight decay everywhere else. Nothing where not `applied`, bool ()."""
        raise NotImplementedError

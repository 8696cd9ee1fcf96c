"""The passes of the sharded form of SCAPE ("gather"): what PyTorch and Triton both provide for it.

A step packs as in the local form, without the moment. The payload's sum goes to the owners of its entries alone. They
take the norm (`squares`), compute new parameter values, which replace the payload (`update`), and send them to all
(`wire`), who write them (`write`).
"""

from typing import Any

import torch
from torch import Tensor

from kernels.launching import to_device
from kernels.ownership import Ownership
from kernels.passes import Part, ScapePasses
from kernels.visits import VisitRates


class GatherPasses(ScapePasses):
    """`ScapePasses` where the owner of entries updates them for all replicas.

    The tensors of the passes are the pieces of `ownership`, of one owner each. `states` hold this replica's residual
    off A, zero on A; whole tensors have none. Of what this replica owns there are besides, FP32 (ownership.share,):

    common: first moment on A, the part of the residual that is the same on all replicas off A.
    master: parameters, where values travel in BF16; else empty.

    The payload at the target density is a matrix with a row an owner.

    Args as `ScapePasses`, and:
        owner: whose pieces are this rank's.
        rounds_values: values travel in BF16 at the target density; their owner keeps them in FP32.
    """

    def __init__(
        self,
        ownership: Ownership,
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
        owner: int,
        rounds_values: bool = False,
        **options: Any,
    ) -> None:
        self.ownership, self.owner = ownership, owner
        sizes = [piece.end - piece.start for piece in ownership.whole]
        super().__init__(ownership.layout, sizes, selection, density, replica, device, **options)
        self.own = [i for i, piece in enumerate(ownership.pieces) if piece.owner == owner]
        self.rounds_values = rounds_values
        self._padding_at: Tensor | None = None
        self.common = self._zeros(ownership.share)
        self.master = self._zeros(ownership.share if rounds_values else 0)

    def _pad(self) -> list[int]:
        return [*super()._pad()[: self.sparsified], *(0 for _ in self.ownership.whole)]

    def _cut(self, chunk_entries: int, granularity: int) -> tuple[tuple[Part, ...], list[int]]:
        length, places = self.ownership.rows(self.payload_counts(self.density))
        entries = self.layout.replicas * length
        return (Part(0, len(self.sizes), 0, entries, entries),), places

    def _allocate(self, state: int, payload: int, errors: int) -> None:
        # Last step's moment is the owner's, in `common`.
        self.use(self._zeros(state), self._zeros(payload), self._zeros(0), self._zeros(errors))

    def _rates_of_visits(self, columns: Any) -> VisitRates:
        return VisitRates(self.ownership.tensors.sizes, columns, self.device)

    def start_master(self, parameters: list[Tensor]) -> None:
        """Copies the parameters, in the order of `sizes`, into the master."""
        for i in self.own if self.rounds_values else ():
            self.share_of(self.master, i).copy_(parameters[i].reshape(-1))

    def owns(self, piece: int) -> bool:
        return self.ownership.pieces[piece].owner == self.owner

    def share_of(self, buffer: Tensor, piece: int) -> Tensor:
        """The stretch of an owned piece in a buffer of this replica's share."""
        return buffer[self.ownership.places[piece] :][: self.sizes[piece]]

    @property
    def payload_rows(self) -> Tensor:
        """The payload at the target density, FP32 (replicas, entries)."""
        return self.payload.view(self.layout.replicas, -1)

    def stretches(self) -> list[list[tuple[int, int]]]:
        """Where every owner's entries lie in a payload that is not compact: (first entry, length), in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.replicas)]
        start = 0
        for piece, count in zip(self.ownership.pieces, self.counts, strict=True):
            own = found[piece.owner]
            if own and sum(own[-1]) == start:
                own[-1] = (own[-1][0], own[-1][1] + count)
            else:
                own.append((start, count))
            start += count
        return found

    @property
    def longest_row(self) -> int:
        """Entries of the replica that owns most."""
        owned = [0] * self.layout.replicas
        for piece in self.ownership.pieces:
            owned[piece.owner] += piece.end - piece.start
        return max(owned)

    def clear_padding(self) -> None:
        """Zeros behind every row of the compact payload, where masks have lain."""
        if self._padding_at is None:
            padding = torch.ones(self.payload.numel(), dtype=torch.bool)
            for start, count in zip(self.positions(), self.counts, strict=True):
                padding[start : start + count] = False
            self._padding_at = to_device(padding.nonzero().view(-1), self.device)
        self.payload.index_fill_(0, self._padding_at, 0.0)

    @property
    def wire(self) -> Tensor:
        """Behind `update`, where compact: room for the values of all owners, FP32 or BF16 (replicas * entries,)."""
        if self.rounds_values:
            return self.payload.view(torch.bfloat16)[: self.payload.numel()]
        return self.payload

    def values(self) -> Tensor:
        """This rank's values, of the dtype of the wire."""
        return self.payload_rows[self.owner].to(self.wire.dtype)

    def write(self, applied: Tensor, own_only: bool = False) -> None:
        """The owners' values on A, weight decay everywhere else. Nothing where not `applied`, bool ().

        own_only: in this replica's own pieces, for a dry run, where no others' values arrive.
        """
        raise NotImplementedError

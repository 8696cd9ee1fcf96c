"""The passes of the sharded form of SCAPE: what PyTorch and Triton both provide for it.

A step packs as in the local form, without the moment. The payload's sum goes to the owners of its entries alone. They
take the norm (`squares`), compute new parameter values, which replace the payload (`update`), and send them to all
(`wire`), who write them (`write`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.common.launching import Table, to_device
from kernels.common.offload import in_dry_run
from kernels.scape.ownership import Ownership
from kernels.scape.passes import Part, ScapePasses
from kernels.scape.visits import VisitRates

# A scale of weights that has become smaller is made larger, long before what it divides leaves the range of BF16.
LEAST_SCALE = 2.0**-16


class GatherPasses(ScapePasses):
    """`ScapePasses` where the owner of entries updates them for all replicas.

    The tensors of the passes are the pieces of `ownership`, of one owner each. `states` hold this replica's residual
    off A, zero on A; whole tensors have none. Of what this replica owns there are besides, FP32 (ownership.share,):

    common: first moment on A, the part of the residual that is the same on all replicas off A.
    master: parameters, where values travel in BF16 or all replicas hold scaled copies; else empty.

    The payload at the target density is a matrix with a row an owner.

    Args as `ScapePasses`, and:
        owner: whose pieces are this rank's.
        rounds_values: values travel in BF16 at the target density; their owner keeps them in FP32.
        scaled: the parameters bound are not the weights w but w / scales, in BF16, see `decay_scales`.

    Attributes:
        scales: float64 (pieces,), equal on all replicas and for all pieces of a tensor. Empty if not `scaled`.
    """

    # An owner's moments are n / N numbers and stay on the device; norm and update need no residual.
    _touched: ClassVar[dict[str, tuple[str, ...]]] = {"pack": ("state",), "squares": (), "update": ("master",)}

    def __init__(
        self,
        ownership: Ownership,
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
        owner: int,
        rounds_values: bool = False,
        scaled: bool = False,
        **options: Any,
    ) -> None:
        self.ownership, self.owner = ownership, owner
        self.rounds_values, self._scaled = rounds_values, scaled
        sizes = [piece.end - piece.start for piece in ownership.whole]
        super().__init__(ownership.layout, sizes, selection, density, replica, device, **options)
        self.own = [i for i, piece in enumerate(ownership.pieces) if piece.owner == owner]
        self._padding_at: Tensor | None = None
        self.common = self._zeros(ownership.share)
        count = len(ownership.pieces) if scaled else 0
        self.scales = torch.ones(count, dtype=torch.float64, device=device)
        self._left_by_decay = Table(count, 1, torch.float64, device)
        self._least_scale = 1.0

    def _pad(self) -> list[int]:
        return [*super()._pad()[: self.sparsified], *(0 for _ in self.ownership.whole)]

    def _cut(self, chunk_entries: int, granularity: int) -> tuple[tuple[Part, ...], list[int]]:
        length, places = self.ownership.rows(self.payload_counts(self.density))
        entries = self.layout.replicas * length
        return (Part(0, len(self.sizes), 0, entries, entries),), places

    def _allocate(self, state: int, payload: int, errors: int) -> None:
        # Last step's moment is the owner's, in `common`.
        has_master = self.rounds_values or self._scaled
        owned = (self._owned_spans(), self.ownership.share) if has_master else ([], 0)
        self._keep(self._spans(), state, *owned)
        self.payload, self.moment_on_mask, self.wire_residual = (self._zeros(n) for n in (payload, 0, errors))

    def _owned_spans(self) -> list[tuple[int, int]]:
        """Where every piece lies in the buffers of this replica's share; nowhere unless it owns it."""
        spans, end = [], 0
        for i, place in enumerate(self.ownership.places):
            start, end = (place, place + self.sizes[i]) if self.owns(i) else (end, end)
            spans.append((start, end))
        return spans

    def _rates_of_visits(self, columns: Any) -> VisitRates:
        return VisitRates(self.ownership.tensors.sizes, columns, self.device)

    def start_master(self, parameters: list[Tensor]) -> None:
        kept = self.kept("master")
        for i in self.own if kept else ():
            values = parameters[i].reshape(-1).float()
            kept[i].copy_(values * self.scales[i].float() if self.scales.numel() else values)

    def load_scales(self, scales: Tensor) -> None:
        """Takes back `scales`."""
        self.scales.copy_(scales)
        self._least_scale = 1.0 if in_dry_run() else min([1.0, *scales.tolist()])

    def decay_scales(self, applied: Tensor) -> None:
        """Weight decay of the step, where parameters are scaled; unless not `applied`.

        A weight w off the mask changes by decay alone, w *= 1 - lr * wd, which is less than half a unit of BF16's last
        place: rounded to BF16 step by step it would not decay at all. So what is kept is w / scale, rounded once, when
        the entry was last on the mask; the decay of all entries is that of the scale, exact to FP64. However long an
        entry waits, its error stays that of one rounding. A scale that has become small moves into the numbers by a
        power of two, which rounds nothing.
        """
        if not self.scales.numel():
            return
        if self._least_scale < LEAST_SCALE:
            powers = torch.exp2(torch.frexp(self.scales).exponent.double())
            for parameter, power in zip(self.parameters, powers, strict=True):
                parameter.mul_(power)
            self.scales.div_(powers)
            self._least_scale = 0.5
        left = [1.0 - r.lr * r.weight_decay for r in self.rates]
        # What the host can tell without asking whether steps were applied: scales are this at least.
        self._least_scale *= min(left)
        decay = self._left_by_decay.set([(value,) for value in left]).view(-1)
        self.scales.mul_(torch.where(applied, decay, 1.0))

    def update(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """The owner's AdamS step: new values over the payload of its pieces."""
        self.decay_scales(applied)
        super().update(part, clip, clip_moment, steps, applied)
        for i in self.own if self.scales.numel() else ():
            self._sent(i).div_(self.scales[i])

    def _sent(self, piece: int) -> Tensor:
        """Behind `update`: storage, FP32, in which all values of an owned piece lie."""
        raise NotImplementedError

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

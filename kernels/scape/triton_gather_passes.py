"""The passes of the sharded form of SCAPE as Triton kernels, a few launches for all tensors of a model."""

from typing import Any

import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import Range, aligned, as_flag, to_device
from kernels.dense.triton_dense_passes import DTYPES
from kernels.scape import triton_gather
from kernels.scape.blocks import Mask, entries_per_block
from kernels.scape.gather_passes import GatherPasses
from kernels.scape.passes import Part, Rates
from kernels.scape.triton_passes import TritonScape
from kernels.scape.triton_visits import EnteringCount
from kernels.scape.visits import LEAST_RATE, VisitRates


class TritonGather(GatherPasses, TritonScape):
    """`GatherPasses` on the kernels of `triton_gather` and `triton_scape`; selection in blocks only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sparse = self.ownership.sparse
        self._tensor = to_device(torch.tensor([p.tensor for p in sparse], dtype=torch.int64), self.device)
        mine = [r for r in self._all if self.owns(r[0])]
        self._mine: tuple[Range, ...] = tuple(mine)
        # A dry run selects in others' pieces, too.
        self._selected_mine = tuple(r for r in self._own if self.owns(r[0]))
        self._selected_others = tuple(r for r in self._own if not self.owns(r[0]))
        self._packed_others = tuple(r for r in self._others if r[0] < self.sparsified)
        self._packed_mine = tuple(r for r in mine if r[0] < self.sparsified)

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
        # The owner's kernels read the gradients' storage where the payload is not compact.
        flat, shares = self._writable.flat, range(len(self.sizes))
        self._owner_kinds = tuple(
            (aligned(flat[i], *(() if self.compact else (self.gradients[i],))), flat[i].dtype) for i in shares
        )

    def _columns_from_outside(self, i: int) -> tuple[int, ...]:
        piece, outside = self.ownership.pieces[i], 0
        axes: tuple[int, ...] = (1, 0, 0)
        if i < self.sparsified:
            tensors = self.ownership.tensors
            outside = tensors.sizes[piece.tensor] - tensors.nnz(piece.tensor, self.in_use.density, self.selection)
            if self.visits is not None:
                axes = (self.visits.columns[piece.tensor], *self.visits.places[2 * piece.tensor :][:2])
        common = self.share_of(self.common, i).data_ptr() if self.owns(i) else 0
        master = self.masters[i].data_ptr() if self.owns(i) and self.masters else 0
        return outside, *axes, piece.start, common, master

    def _pack_tensors(self, part: Part, applied: Tensor) -> None:
        if self.compact and self.carrying:
            self._carry(part)
        self._pack_whole(range(max(part.first, self.sparsified), part.end))
        if self._chosen is None:
            # Nothing is selected while the next mask is dense, yet the common part has to be kept.
            self._pack(self._tiles, self._in(part, self._packed_mine), applied, common=True)
            self._pack(self._tiles, self._in(part, self._selected_others + self._packed_others), applied)
            return
        k = entries_per_block(self.next_density, self.layout.block_size)
        form = "offsets" if self._chosen.dtype == torch.int16 else "bitmap"
        self._pack(self._choose, self._in(part, self._selected_mine), applied, form, self._chosen, k, common=True)
        self._pack(self._choose, self._in(part, self._selected_others), applied, form, self._chosen, k)
        self._pack(self._tiles, self._in(part, self._packed_others), applied)

    def _in(self, part: Part, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        return ranges if part.end - part.first == len(self.sizes) else tuple(r for r in ranges if r[0] in part)

    def _pack_whole(self, tensors: range) -> None:
        """Tensors that are sent whole have no residual."""
        gradients = [self.gradients[i].float() for i in tensors]
        if not gradients:
            return
        rates = [(1.0 - self.rates[i].beta1) * self.rates[i].scale for i in tensors]
        if not self.compact:
            torch._foreach_mul_(gradients, rates)  # FP32 already
            return
        places = [self.positions()[i] for i in tensors]
        payloads = [self.payload[at : at + g.numel()] for at, g in zip(places, gradients, strict=True)]
        torch._foreach_copy_(payloads, torch._foreach_mul(gradients, rates))

    def _squares_of(self, part: Part) -> list[Tensor]:
        sums: list[Tensor] = []
        for listed, _, _ in self._tiles.lists(self._mine, self._any_kinds):
            partial = torch.empty(len(listed), dtype=torch.float32, device=self.device)
            launching.launch(
                triton_gather.owned_gradient_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.in_use.bits,
                self.previous.bits,
                int(not self.in_use.dense),
                int(not self.previous.dense),
                self.payload,
                partial,
                warps=self._tiles.warps,
                **self._tiles.shape,
                COMPACT=self.compact,
            )
            sums.append(partial)
        return sums

    def _update_tensors(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        visits: VisitRates | None,
        applied: Tensor,
    ) -> None:
        corrections = (1.0 - self._betas.values**steps).float()
        fresh = self._fresh
        if visits is not None:
            # Pieces were counted; staleness is that of the tensor.
            sums = torch.zeros(len(self.ownership.tensors.sizes), dtype=torch.int32, device=self.device)
            sums.index_add_(0, self._tensor, self._fresh[: self.sparsified])
            fresh = torch.cat((sums[self._tensor], self._fresh[self.sparsified :]))
        for listed, easy, dtype in self._tiles.lists(self._in(part, self._mine), self._owner_kinds):
            launching.launch(
                triton_gather.owned_update_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                corrections,
                self.in_use.bits,
                self.previous.bits,
                int(not self.in_use.dense),
                int(not self.previous.dense),
                self.payload,
                fresh,
                self.common if visits is None else visits.relative,
                self.most_stale,
                clip,
                as_flag(applied),
                warps=self._tiles.warps,
                **self._tiles.shape,
                EASY=easy,
                DTYPE=DTYPES[dtype],
                COMPACT=self.compact,
                HAS_MASTER=bool(self.masters),
                SCALED=visits is not None,
                KEEPS=self.keeps,
                LEAST=LEAST_RATE,
                CLIP_MOMENT=clip_moment,
            )

    def write(self, applied: Tensor, own_only: bool = False) -> None:
        for listed, easy, dtype in self._tiles.lists(self._mine if own_only else self._all, self._owner_kinds):
            launching.launch(
                triton_gather.write_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.in_use.bits,
                int(not self.in_use.dense),
                self.wire,
                as_flag(applied),
                warps=self._tiles.warps,
                **self._tiles.shape,
                EASY=easy,
                DTYPE=DTYPES[dtype],
                COMPACT=self.compact,
                DECAYS=self.scales.numel() == 0,
            )
        self._writable.store()

    def _sent(self, piece: int) -> Tensor:
        if not self.compact:
            return self.gradients[piece]
        return self.payload[self.positions()[piece] :][: self.counts[piece]]

    def count_entering(self, visits: VisitRates) -> None:
        if self._entering is None:
            self._entering = EnteringCount(self.ownership.tensors, visits)
        self._entering(self.in_use, self.previous)

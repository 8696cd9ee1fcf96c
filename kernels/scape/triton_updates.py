"""Triton passes that depend on the updater."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.launching import aligned, as_flag, to_device
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.scape import triton_owner
from torchtitan_scape.kernels.scape.step import PayloadChunk, PayloadPlan
from torchtitan_scape.kernels.scape.triton_passes import TritonPasses
from torchtitan_scape.kernels.scape.triton_replicated import TritonReplicated
from torchtitan_scape.kernels.scape.triton_updates_base import UpdatesBase
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate


def triton_passes(
    updater: ReplicatedUpdate | ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any
) -> TritonPasses:
    """Return the passes of a step on Triton kernels. Arguments are those of `ScapePasses`."""
    passes = TritonPasses(updater, plan, device, **options)
    passes.updates = TritonOwner(passes, updater) if isinstance(updater, ShardedUpdate) else TritonReplicated(passes)
    return passes


class TritonOwner(UpdatesBase):
    """Passes of `ShardedUpdate`: each entry's owner updates it for all replicas."""

    fixed_columns = False  # they contain addresses of the common buffer and of the masters

    def __init__(self, passes: TritonPasses, owner: ShardedUpdate) -> None:
        super().__init__(passes)
        self._owner = owner
        sparse = owner.ownership.sparse
        tensors = torch.tensor([piece.tensor for piece in sparse], dtype=torch.int64, device="cpu")
        self._tensor = to_device(tensors, passes.device)
        self._owned = tuple(r for r in passes.all if owner.owns(r[0]))
        # A dry run also selects in the slices of other owners.
        self._selected_owned = tuple(r for r in passes.own if owner.owns(r[0]))
        self._selected_others = tuple(r for r in passes.own if not owner.owns(r[0]))
        self._packed_others = tuple(r for r in passes.others if r[0] < passes.sparsified)
        self._packed_owned = tuple(r for r in self._packed_others if owner.owns(r[0]))
        self._packed_others = tuple(r for r in self._packed_others if not owner.owns(r[0]))

    def columns(self, i: int) -> tuple[int, ...]:
        p, owner, piece, outside = self._passes, self._owner, self._owner.ownership.pieces[i], 0
        axes: tuple[int, ...] = (1, 0, 0)
        if i < p.sparsified:
            density = p.step.in_use.density
            outside = owner.tensors.sizes[piece.tensor] - owner.tensors.nnz(piece.tensor, density, p.selection)
            axes = self._axes(piece.tensor)
        common = owner.share_of(owner.common, i).data_ptr() if owner.owns(i) else 0
        master = p.masters[i].data_ptr() if owner.owns(i) and p.masters else 0
        return outside, *axes, piece.start, common, master

    def pack(self, part: PayloadChunk) -> None:
        p = self._passes
        p.carry(part)
        self._pack_whole(range(max(part.first, p.sparsified), part.end))
        for ranges, select, common in (
            (self._selected_owned, True, True),
            (self._packed_owned, False, True),
            (self._selected_others, True, False),
            (self._packed_others, False, False),
        ):
            p.pack_blocks(p.within(part, ranges), select=select, common=common)

    def _pack_whole(self, tensors: range) -> None:
        """Pack tensors that are not sparsified, which have no residual."""
        p = self._passes
        gradients = [p.gradients[i].float() for i in tensors]
        if not gradients:
            return
        rates = [(1.0 - p.step.rates[i].beta1) * p.step.rates[i].scale for i in tensors]
        if not p.compact:
            torch._foreach_mul_(gradients, rates)  # FP32 already
            return
        torch._foreach_copy_([self._values(i) for i in tensors], torch._foreach_mul(gradients, rates))

    def squares(self, part: PayloadChunk) -> list[Tensor]:
        p, sums = self._passes, []
        for listed, _, _ in p.tiles.lists(self._owned, p.any_kinds):
            partial = torch.empty(len(listed), dtype=torch.float32, device=p.device)
            p.launch(triton_owner.owned_gradient_kernel, p.tiles, listed, partial, COMPACT=p.compact)
            sums.append(partial)
        return sums

    def update(self, part: PayloadChunk) -> None:
        p, owner, fresh = self._passes, self._owner, self._passes.fresh
        if p.stale is not None:
            # Entries were counted by slice, but the staleness is that of the whole tensor.
            sums = torch.zeros(len(owner.tensors.sizes), dtype=torch.int32, device=p.device)
            sums.index_add_(0, self._tensor, fresh[: p.sparsified])
            fresh = torch.cat((sums[self._tensor], fresh[p.sparsified :]))
        ranges = p.within(part, self._owned)
        master = bool(p.masters)
        self._update(
            triton_owner.owned_update_kernel,
            p.tiles,
            ranges,
            fresh,
            HAS_MASTER=master,
            CHANGES=owner.sends_changes,
            COMPACT=p.compact,
        )
        for i in owner.own if owner.scales.numel() else ():
            if i in part:
                self._values(i).div_(owner.scales[i])

    def write(self, own_only: bool) -> None:
        p, owner = self._passes, self._owner
        if not owner.writes:
            return
        for listed, full, dtype in p.tiles.lists(self._owned if own_only else p.all, p.parameter_kinds):
            p.launch(
                triton_owner.write_kernel,
                p.tiles,
                listed,
                as_flag(p.step.applied),
                payload=owner.value_buffer(p.payload),
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                COMPACT=p.compact,
                DECAYS=owner.scales.numel() == 0,
                CHANGES=owner.sends_changes,
            )
        p.writable.store()

    def kinds(self) -> tuple[tuple[bool, torch.dtype], ...]:
        p = self._passes
        # An in-place payload is read from the gradients' storage.
        read = p.writable.flat if p.compact else p.gradients
        return tuple((aligned(q, r), q.dtype) for q, r in zip(p.writable.flat, read, strict=True))

    def _values(self, piece: int) -> Tensor:
        """Return the FP32 storage of all payload entries of a slice."""
        p = self._passes
        if not p.compact:
            return p.gradients[piece]
        return p.payload[p.payload_layout.positions[piece] :][: p.counts[piece]]

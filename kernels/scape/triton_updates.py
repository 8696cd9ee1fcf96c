"""Triton passes that depend on the updater."""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.common.launching import Range, TileSchedule, aligned, as_flag, to_device
from kernels.dense.triton_passes import DTYPES
from kernels.common import launching
from kernels.scape import triton_compact, triton_kernels, triton_owner
from kernels.scape.blocks import Mask, entries_per_block
from kernels.scape.step import PayloadChunk, PayloadPlan
from kernels.scape.triton_lists import MaskLists
from kernels.scape.triton_passes import TritonPasses
from kernels.scape.triton_visits import EnteringCount
from kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from kernels.scape.visits import MIN_VISIT_RATE, VisitRates


def triton_passes(
    updater: ReplicatedUpdate | ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any
) -> TritonPasses:
    """Return the passes of a step on Triton kernels. Arguments are those of `ScapePasses`."""
    passes = TritonPasses(updater, plan, device, **options)
    passes.updates = TritonOwner(passes, updater) if isinstance(updater, ShardedUpdate) else TritonReplicated(passes)
    return passes


class _TritonUpdates:
    """Common part of both updaters."""

    def __init__(self, passes: TritonPasses) -> None:
        self._passes = passes
        self._entering: EnteringCount | None = None

    def count_entering(self, visits: VisitRates) -> None:
        p = self._passes
        if self._entering is None:
            self._entering = EnteringCount(p.updater.tensors, visits)
        self._entering(p.step.in_use, p.step.previous)

    def _axes(self, tensor: int) -> tuple[int, int, int]:
        """Return the columns ROW, VISITED_ROWS and VISITED_COLUMNS of a sparsified tensor in the pointer table."""
        visits = self._passes.visits
        if visits is None:
            return 1, 0, 0
        rows, columns = visits.starts[2 * tensor : 2 * tensor + 2]
        return visits.columns[tensor], rows, columns

    def begin_step(self) -> None:
        """Do nothing: the state contains the moments."""

    def rotate(self, density: float, in_use: Tensor, previous: Tensor) -> Tensor | None:
        """Do nothing, as in `begin_step`."""
        return None

    def decoded(self, in_use: Tensor) -> None:
        """Do nothing, as in `begin_step`."""

    def store_moments(self) -> None:
        """Do nothing, as in `begin_step`."""

    def _update(self, kernel: Any, ranges: tuple[Range, ...], *between: Tensor, **constants: Any) -> None:
        """Launch an update kernel. between: its arguments after `corrections`, up to `fresh_counts`."""
        p, step = self._passes, self._passes.step
        relative = p.fresh if p.stale is None else p.stale.relative
        corrections = p.corrections()
        for listed, full, dtype in p.tiles.lists(ranges, p.parameter_kinds):
            p.launch(
                kernel,
                p.tiles,
                listed,
                corrections,
                *between,
                relative,
                p.max_staleness,
                step.clip,
                as_flag(step.applied),
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                SCALED=p.stale is not None,
                MOMENT_SHARE=p.keeps,
                MIN_VISIT_RATE=MIN_VISIT_RATE,
                CLIP_MOMENT=step.clip_moment,
                **constants,
            )


class TritonReplicated(_TritonUpdates):
    """Passes of `ReplicatedUpdate`: every replica updates all entries.

    At the target density `moment_on_mask` contains the first moment of the sparsified tensors between two steps, see
    `triton_compact`. `store_moments` copies it to the state.
    """

    fixed_columns = True

    def __init__(self, passes: TritonPasses) -> None:
        super().__init__(passes)
        self._payload_tiles: dict[PayloadChunk, tuple[Tensor, Tensor]] = {}
        self._whole = tuple(r for r in passes.others if r[0] >= passes.sparsified)
        self._others = tuple(r for r in passes.others if r[0] < passes.sparsified)
        self._sparse = tuple(r for r in passes.all if r[0] < passes.sparsified)
        self._lists = MaskLists(passes.layout, passes.density, passes.device) if passes.density < 1.0 else None
        # Whether `moment_on_mask` contains the moments on P.
        self._on_previous = False
        # `applied` of the last step, if it stored the moments on A there.
        self._last_step: Tensor | None = None
        self._masks: tuple[Mask, Mask] | None = None

    def columns(self, i: int) -> tuple[int, ...]:
        p = self._passes
        return p.sizes[i] - p.counts[i], *(self._axes(i) if i < p.sparsified else (1, 0, 0))

    def kinds(self) -> tuple[tuple[bool, torch.dtype], ...]:
        p = self._passes
        # An in-place payload is read from the gradients' storage.
        columns = zip(p.writable.flat, p.states, p.states if p.compact else p.gradients, strict=True)
        return tuple((aligned(q, s, r), q.dtype) for q, s, r in columns)

    @property
    def _listed(self) -> bool:
        """Whether the bound step lists the entries of A. A dense mask may have a payload buffer if blocks are short."""
        return self._passes.compact and not self._passes.step.in_use.dense

    def begin_step(self) -> None:
        self._last_step = None  # if it was not followed by `rotate`, it was not applied
        if not self._listed:
            self.store_moments()
        self._masks = self._passes.step.in_use, self._passes.step.previous

    def rotate(self, density: float, in_use: Tensor, previous: Tensor) -> Tensor | None:
        self._on_previous, self._last_step = self._last_step is not None, None
        if self._lists is None:
            return None
        room = self._lists.rotate(in_use, previous)
        return room if self._lists.k == entries_per_block(density, self._passes.layout.block_size) else None

    def decoded(self, in_use: Tensor) -> None:
        if self._lists:
            self._lists.decoded(in_use)

    def _lists_of(self, in_use: Mask | None, previous: Mask | None) -> tuple[Tensor, Tensor]:
        p, masks = self._passes, [None if mask is None else mask.bits for mask in (in_use, previous)]
        assert self._lists is not None
        return self._lists.of(*masks, self._sparse, p.tiles, p.table)

    def store_moments(self) -> None:
        if self._masks is None or not (self._on_previous or self._last_step is not None):
            return
        p, applied, (in_use, previous) = self._passes, self._last_step, self._masks
        used, held = self._lists_of(in_use if applied is not None else None, previous if self._on_previous else None)
        if applied is None:
            applied = torch.zeros((), dtype=torch.bool, device=p.device)
        count = p.sparsified
        for first, end in p.storage.walk(("state",), (0, count), [(0, count)], changed=True):
            for listed, _, _ in p.tiles.lists(p.within(PayloadChunk(first, end, 0, 0), self._sparse), p.any_kinds):
                launching.launch(
                    triton_compact.store_moments_kernel,
                    (len(listed),),
                    listed,
                    p.table,
                    used,
                    held,
                    p.moment_on_mask,
                    as_flag(applied),
                    int(self._on_previous),
                    warps=p.tiles.warps,
                    ENTRIES=self._most_entries(p.tiles),
                    BLOCK=p.layout.block_size,
                )
        self._on_previous, self._last_step = False, None

    def _most_entries(self, tiles: TileSchedule) -> int:
        """Return the most listed entries of a tile, as a power of two."""
        assert self._lists is not None
        return triton.next_power_of_2(tiles.rows * self._lists.k)

    def pack(self, part: PayloadChunk) -> None:
        p = self._passes
        own, others = p.within(part, p.own), p.within(part, p.others)
        if self._listed:
            for ranges, select in ((own, True), (p.within(part, self._others), False)):
                self._pack_listed(ranges, *p.selection_of(select))
            own, others = (), p.within(part, self._whole)
        p.pack_blocks(own, select=True, adds_errors=True)
        p.pack_blocks(others, adds_errors=True)

    def _pack_listed(self, ranges: tuple[Range, ...], tiles: TileSchedule, selection: Tensor, form: str, k: int) -> None:
        p, step = self._passes, self._passes.step
        lists = self._lists_of(step.in_use, step.previous if self._on_previous or p.carrying else None)
        for listed, full, dtype in tiles.lists(ranges, p.gradient_kinds):
            p.launch(
                triton_compact.pack_compact_kernel,
                tiles,
                listed,
                p.moment_on_mask,
                *lists,
                p.wire_residual,
                p.fresh,
                selection,
                k,
                p.own_block,
                as_flag(step.applied),
                width=4 if form == "none" else 8,
                ENTRIES=self._most_entries(tiles),
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                HAS_MOMENTS=self._on_previous,
                ADDS_ERRORS=p.carrying,
                SKIP_NEW=p.excludes_new and form != "none",
                SELECT=form,
            )

    def squares(self, part: PayloadChunk) -> list[Tensor]:
        p = self._passes
        if p.compact:
            if part not in self._payload_tiles:
                self._payload_tiles[part] = p.tile_payload(part)
            return p.squares_of_tiles(*self._payload_tiles[part])
        sums = []
        for listed, _, _ in p.stream.lists(p.within(part, p.all), p.any_kinds):
            partial = torch.empty(len(listed), dtype=torch.float32, device=p.device)
            p.launch(triton_kernels.squares_in_place_kernel, p.stream, listed, partial)
            sums.append(partial)
        return sums

    def update(self, part: PayloadChunk) -> None:
        p, writes = self._passes, self._passes.updater.writes
        ranges, last = p.within(part, self._whole if self._listed else p.all), p.moment_on_mask
        self._update(triton_kernels.update_kernel, ranges, last, p.fresh, WRITES=writes, COMPACT=p.compact)
        if self._listed:
            self._last_step = p.step.applied
            used, _ = self._lists_of(p.step.in_use, None)
            self._update(
                triton_compact.update_compact_kernel,
                p.within(part, self._sparse),
                *(last, used, p.fresh),
                width=4,
                ENTRIES=self._most_entries(p.tiles),
                WRITES=writes,
            )
        if writes:
            p.writable.store(range(part.first, part.end))

    def write(self, own_only: bool) -> None:
        """Do nothing: `update` wrote all parameters."""


class TritonOwner(_TritonUpdates):
    """Passes of `ShardedUpdate`: each entry's owner updates it for all replicas."""

    fixed_columns = False  # they contain addresses of the common buffer and of the masters

    def __init__(self, passes: TritonPasses, owner: ShardedUpdate) -> None:
        super().__init__(passes)
        self._owner = owner
        sparse = owner.ownership.sparse
        self._tensor = to_device(torch.tensor([piece.tensor for piece in sparse], dtype=torch.int64), passes.device)
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
        self._update(triton_owner.owned_update_kernel, ranges, fresh, HAS_MASTER=master, CHANGES=owner.sends_changes, COMPACT=p.compact)
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
                payload=owner.wire(p.payload),
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

"""Triton passes of an update that every replica computes."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import Range, TileSchedule, aligned, as_flag
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.scape import triton_compact, triton_kernels
from torchtitan_scape.kernels.scape.blocks import Mask, entries_per_block
from torchtitan_scape.kernels.scape.step import PayloadChunk
from torchtitan_scape.kernels.scape.triton_lists import MaskLists
from torchtitan_scape.kernels.scape.triton_passes import TritonPasses
from torchtitan_scape.kernels.scape.triton_updates_base import UpdatesBase


class TritonReplicated(UpdatesBase):
    """Passes of `ReplicatedUpdate`: every replica updates all entries.

    At the target density `moment_on_mask` contains the first moment of the sparsified tensors between two steps, see
    `triton_compact`. `store_moments` copies it to the state.
    """

    fixed_columns = True

    def __init__(self, passes: TritonPasses) -> None:
        super().__init__(passes)
        self._payload_tiles: dict[PayloadChunk, tuple[Tensor, Tensor]] = {}
        self._dense_ranges = tuple(r for r in passes.others if r[0] >= passes.sparsified)
        self._unselected_ranges = tuple(r for r in passes.others if r[0] < passes.sparsified)
        self._sparse_ranges = tuple(r for r in passes.all if r[0] < passes.sparsified)
        self._lists = MaskLists(passes.layout, passes.density, passes.device) if passes.density < 1.0 else None
        # Whether `moment_on_mask` contains the moments on P, which the state does not.
        self._moments_in_payload = False
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
        """Whether the bound step lists the entries of A.

        If all tensors have few entries, masks of other densities also have a payload buffer. They contain all entries.
        """
        p = self._passes
        k = entries_per_block(p.step.in_use.density, p.layout.block_size)
        return p.compact and self._lists is not None and k == self._lists.k

    @property
    def leaves_state(self) -> bool:
        return self._listed

    def begin_step(self) -> None:
        self._last_step = None  # if it was not followed by `rotate`, it was not applied
        if not self._listed:
            self.store_moments()
        self._masks = self._passes.step.in_use, self._passes.step.previous

    def rotate(self, density: float, in_use: Tensor, previous: Tensor) -> Tensor | None:
        self._moments_in_payload, self._last_step = self._last_step is not None, None
        if self._lists is None:
            return None
        buffer = self._lists.rotate(in_use, previous)
        return buffer if self._lists.k == entries_per_block(density, self._passes.layout.block_size) else None

    def decoded(self, in_use: Tensor) -> None:
        if self._lists:
            self._lists.decoded(in_use)

    def _lists_of(self, in_use: Mask | None, previous: Mask | None) -> tuple[Tensor, Tensor]:
        """Return the lists of A and P; that of None may be invalid."""
        p, bits = self._passes, [None if mask is None else mask.bits for mask in (in_use, previous)]
        assert self._lists is not None
        lists = [listed for listed, _, _ in p.tiles.lists(self._sparse_ranges, p.any_kinds)]
        return self._lists.of(bits, p.tiles, lists, p.table)

    def store_moments(self) -> None:
        if self._masks is None or not (self._moments_in_payload or self._last_step is not None):
            return
        p, applied, (in_use, previous) = self._passes, self._last_step, self._masks
        used, held = self._lists_of(
            in_use if applied is not None else None, previous if self._moments_in_payload else None
        )
        if applied is None:
            applied = torch.zeros((), dtype=torch.bool, device=p.device)
        count = p.sparsified
        for first, end in p.storage.walk(("state",), (0, count), [(0, count)], changed=True):
            for listed, _, _ in p.tiles.lists(
                p.within(PayloadChunk(first, end, 0, 0), self._sparse_ranges), p.any_kinds
            ):
                launching.launch(
                    triton_compact.store_moments_kernel,
                    (len(listed),),
                    listed,
                    p.table,
                    used,
                    held,
                    p.moment_on_mask,
                    as_flag(applied),
                    int(self._moments_in_payload),
                    warps=p.tiles.warps,
                    ENTRIES=self._most_entries(p.tiles),
                    BLOCK=p.layout.block_size,
                )
        self._moments_in_payload, self._last_step = False, None

    def _most_entries(self, tiles: TileSchedule) -> int:
        """Return the most listed entries of a tile, as a power of two."""
        assert self._lists is not None
        return 1 << (tiles.rows * self._lists.k - 1).bit_length()

    def pack(self, part: PayloadChunk) -> None:
        p = self._passes
        own, others = p.within(part, p.own), p.within(part, p.others)
        if self._listed:
            for ranges, select in ((own, True), (p.within(part, self._unselected_ranges), False)):
                self._pack_listed(ranges, *p.selection_of(select, p.pack_tiles))
            own, others = (), p.within(part, self._dense_ranges)
        p.pack_blocks(own, select=True, adds_errors=True)
        p.pack_blocks(others, adds_errors=True)

    def _pack_listed(
        self, ranges: tuple[Range, ...], tiles: TileSchedule, selection: Tensor, form: str, k: int
    ) -> None:
        p, step = self._passes, self._passes.step
        lists = self._lists_of(step.in_use, step.previous if self._moments_in_payload or p.carrying else None)
        for listed, full, dtype in tiles.lists(ranges, p.gradient_kinds):
            p.launch(
                triton_compact.pack_compact_kernel,
                tiles,
                listed,
                p.moment_on_mask,
                *lists,
                p.code_residual,
                p.fresh,
                selection,
                k,
                p.own_block,
                as_flag(step.applied),
                width=4 if form == "none" else 8,
                ENTRIES=self._most_entries(tiles),
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                HAS_MOMENTS=self._moments_in_payload,
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
        for listed, _, _ in p.tiles.lists(p.within(part, p.all), p.any_kinds):
            partial = torch.empty(len(listed), dtype=torch.float32, device=p.device)
            p.launch(triton_kernels.squares_in_place_kernel, p.tiles, listed, partial)
            sums.append(partial)
        return sums

    def update(self, part: PayloadChunk) -> None:
        p, ranges = self._passes, self._passes.all
        constants = {"WRITES": p.updater.writes}
        if self._listed:
            if self._last_step is None:
                self._last_step = p.step.applied.clone()  # the next check overwrites the tensor
            lists, _ = self._lists_of(p.step.in_use, None)
            self._update(
                triton_compact.update_compact_kernel,
                p.update_tiles,
                p.within(part, self._sparse_ranges),
                *(p.moment_on_mask, lists, p.fresh),
                width=4,
                ENTRIES=self._most_entries(p.update_tiles),
                **constants,
            )
            # No entries of the other tensors enter a mask.
            ranges, constants["SCALED"] = self._dense_ranges, False
        self._update(
            triton_kernels.update_kernel,
            p.tiles,
            p.within(part, ranges),
            *(p.moment_on_mask, p.fresh),
            COMPACT=p.compact,
            **constants,
        )
        if p.updater.writes:
            p.writable.store(range(part.first, part.end))

    def write(self, own_only: bool) -> None:
        """Do nothing: `update` wrote all parameters."""

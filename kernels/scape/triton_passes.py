"""SCAPE passes on Triton kernels: a few launches for all tensors of a model, without synchronization."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import DeviceTable, Range, TileSchedule, Writable, addresses, to_device
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.common.triton_common import RATES, WIDTH, table_row
from torchtitan_scape.kernels.dense.triton_passes import DTYPES, set_rates
from torchtitan_scape.kernels.scape import triton_kernels, triton_masks
from torchtitan_scape.kernels.scape.blocks import Mask, entries_per_block, offset_code
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.reference import VisitRates
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadChunk, ShardedUpdate
from torchtitan_scape.kernels.scape.triton_masks import EnteringCount, InPlaceEntries, MaskLists

# Entries per tile and per warp. Those of packing and updating listed entries were the fastest of five on an H200, in
# the sum over three densities. Selection is fastest with one warp per block: its reductions synchronize warps.
TILE, WARP = 2048, 512
PACK_TILE, PACK_WARP = 1024, 256
UPDATE_TILE, UPDATE_WARP = 1024, 512
SELECT_TILE, SELECT_WARP = 1024, 1024
_ROTATED = 2048  # bytes of masks per program; more cause spills if the masks are not aligned
_DECODED = 64  # words of a mask that one program, of one warp, decodes
_SQUARED = 4096  # entries of the payload per program


class TritonPasses(ScapePasses):
    """What the passes of both updates share. Supports selection in blocks only."""

    # Whether `moment_on_mask` contains the moments on P, which the state does not.
    moments_in_payload = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.selection == "block"  # the selection "tensor" runs in PyTorch
        count, size, device = len(self.sizes), self.layout.block_size, self.device
        self._table = DeviceTable(count, WIDTH.value, torch.int64, device)
        self._rates = DeviceTable(count, RATES.value, torch.float32, device)
        self._betas = DeviceTable(count, 2, torch.float64, device)
        self.table, self.rates = self._table.values, self._rates.values  # of pointers, and of hyper-parameters
        self.tiles = TileSchedule(self.sizes, size, TILE, WARP, device)
        self.pack_tiles = TileSchedule(self.sizes, size, PACK_TILE, PACK_WARP, device)
        self.update_tiles = TileSchedule(self.sizes, size, UPDATE_TILE, UPDATE_WARP, device)
        self._select_tiles = TileSchedule(self.sizes, size, SELECT_TILE, SELECT_WARP, device)
        self.unused = torch.zeros(1, dtype=torch.int32, device=device)
        self.any_kinds = ((False, None),) * count
        self._own_block = self.first_run * self.layout.run_blocks
        self.all = self.tiles.whole()
        self.sparse = tuple(r for r in self.all if r[0] < self.sparsified)
        self.dense = tuple(r for r in self.all if r[0] >= self.sparsified)
        self.selected_blocks, self.other_blocks = self._split(
            self._own_block, self._own_block + self.runs * self.layout.run_blocks
        )
        self.lists = MaskLists(self.layout, self.density, device) if self.density < 1.0 else None
        self._entering = None if self.visits is None else EnteringCount(self.tensors, self.visits)
        self._parameters: list[Tensor] | None = None
        self.writable: Writable  # set by `bind`
        self._known: Any = None
        self._known_rates: list[Rates] = []
        self._forms: dict[
            tuple[int, int, int, bool], tuple[tuple[Range, ...], list[tuple[str, tuple[Range, ...]]]]
        ] = {}

    def _split(self, start: int, end: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return the blocks [start, end) of the masks as ranges of tensors, and all other blocks of the masks."""
        own: list[Range] = []
        others: list[Range] = []
        for tensor, _, blocks in self.sparse:
            first = self.layout.first_block[tensor]
            a, b = (min(max(edge - first, 0), blocks) for edge in (start, end))
            own.append((tensor, a, b))
            others += [(tensor, 0, a), (tensor, b, blocks)]
        return tuple(r for r in own if r[1] < r[2]), tuple(r for r in others if r[1] < r[2])

    # -------------------------------------------------------------------------------------- the passes

    def bind(self, step: PassInputs) -> None:
        super().bind(step)
        self.begin_step()
        if not self.compact or self.carrying:
            # mt, or the quantization error, is added to the gradients' storage in FP32: other dtypes are copied.
            self.gradients = [g if g.dtype is torch.float32 else g.float() for g in step.gradients]
        if step.parameters is not self._parameters:
            self.writable = Writable(step.parameters)
            self._parameters = step.parameters
            self._written = addresses(self.writable.flat)
        known = addresses(self.gradients), [g.dtype for g in self.gradients], self._written
        if (*known, step.in_use.density, self.compact) != self._known:  # as a rule, gradients are where they were
            self._set_table(known[0])
            self._known = *known, step.in_use.density, self.compact
        if step.rates is not self._known_rates:
            set_rates(self._rates, self._betas, step.rates)
            self._known_rates = step.rates
        self._corrections: Tensor | None = None
        self._selection = self.allocate_selection(step.next_density)

    def begin_step(self) -> None:
        """Prepare the state for the bound step. The pointer table is still that of the last one."""

    def _set_table(self, gradients: list[int]) -> None:
        """Update the pointer table and the kinds of the tensors. gradients: addresses."""
        layout, density = self.layout, self.step.in_use.density
        k = layout.block_size if self.step.in_use.dense else entries_per_block(density, layout.block_size)
        if self.compact and self.lists is not None:
            k = self.lists.k
        states = addresses(self.states)
        rows = []
        gradient_kinds: list[tuple[bool, torch.dtype]] = []
        parameter_kinds: list[tuple[bool, torch.dtype]] = []
        for i, (tensor, start, _) in enumerate(self.slices):
            gradient, parameter = self.gradients[tensor], self.writable.flat[tensor]
            g = gradients[tensor] + start * gradient.element_size()
            p = self._written[tensor] + start * parameter.element_size()
            sparse, owned = i < self.sparsified, self.owned_addresses(i)
            rows.append(
                table_row(
                    *(g, p, states[i], self.sizes[i], layout.first_block[i] if sparse else -1),
                    *(self.payload_layout.positions[i], k if sparse else layout.block_size),
                    *(self._visit_columns(tensor) if sparse else (0, 1, 0, 0)),
                    *(start, *owned, tensor if sparse else 0),
                )
            )
            gradient_kinds.append(((g | states[i]) % 16 == 0, gradient.dtype))
            # An in-place payload is read from the gradients' storage.
            used = p | states[i] | owned[0] | owned[1] | (0 if self.compact else g)
            parameter_kinds.append((used % 16 == 0, parameter.dtype))
        self._table.set(rows)
        self.gradient_kinds, self.parameter_kinds = tuple(gradient_kinds), tuple(parameter_kinds)

    def owned_addresses(self, i: int) -> tuple[int, int]:
        """Return the addresses of a tensor's common buffer and master weights, for slices that this replica owns."""
        return 0, 0

    def _visit_columns(self, tensor: int) -> tuple[int, int, int, int]:
        """Return the columns from OUTSIDE to VISITED_COLUMNS of a whole sparsified tensor."""
        tensors = self.tensors
        outside = tensors.sizes[tensor] - tensors.nnz(tensor, self.step.in_use.density, self.selection)
        if self.visits is None:
            return outside, 1, 0, 0
        rows, columns = self.visits.starts[2 * tensor : 2 * tensor + 2]
        return outside, self.visits.columns[tensor], rows, columns

    def release(self) -> None:
        super().release()
        if self.writable.copies:  # of one step
            self._parameters = None
            del self.writable

    def selected(self) -> Tensor | None:
        if self._selection is None:
            return None
        if self._selection.dtype == torch.int16:
            return self._encode(self._selection)
        nbytes = self.layout.wire_bytes(self.step.next_density, self.selection)
        if nbytes == self.layout.run_bytes:
            return self._selection
        return pad(self._selection.view(self.runs, -1), (0, nbytes - self.layout.run_bytes)).view(-1)

    def pieces(self) -> list[Tensor] | InPlaceEntries:
        if self.step.in_use.dense:
            gradients = [g.view(-1) for g in self.gradients]
            return gradients if self.owner is None else self.owner.cut(gradients)
        return InPlaceEntries(self)

    def count_entering(self, visits: VisitRates) -> None:
        assert self._entering is not None
        self._entering(self.step.in_use, self.step.previous)

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        layout, lists = self.layout, None
        if self.lists is not None:
            lists = self.lists.rotate(in_use, previous)
            lists = lists if self.lists.k == entries_per_block(density, layout.block_size) else None
        if received is None or not layout.sends_offsets(density, self.selection):
            bits = in_use if received is None else self.received_selections(received, density)
            launching.launch(
                triton_masks.rotate_kernel,
                (-(-in_use.numel() // _ROTATED),),
                bits,
                in_use,
                previous,
                in_use.numel(),
                warps=4,
                HAS_BITS=received is not None,
                TILE=_ROTATED,
            )
            return
        k = entries_per_block(density, layout.block_size)
        code = offset_code(k, layout.block_size)
        unit = 8 if layout.block_size % 32 else 32
        units = layout.total_blocks * layout.block_size // unit
        launching.launch(
            triton_masks.decode_offsets_kernel,
            (-(-units // _DECODED),),
            received,
            in_use,
            previous,
            self.unused if lists is None else lists,
            units,
            layout.run_blocks,
            layout.wire_bytes(density, self.selection),
            k,
            code.nbytes,
            code.unary,
            code.low,
            warps=1,
            BLOCK=layout.block_size,
            UNIT=unit,
            TILE=_DECODED,
            LISTS=lists is not None,
        )
        if self.lists is not None and lists is not None:
            self.lists.decoded(in_use)

    # ------------------------------------------------------------------------------------- for subclasses

    def forms(self, part: PayloadChunk, ranges: tuple[Range, ...]) -> list[tuple[str, tuple[Range, ...]]]:
        """Return the launches for the tensors of a chunk, as (FORM, ranges of blocks)."""
        key = part.first, part.end, id(ranges), self.compact
        if key not in self._forms:
            own = tuple(r for r in ranges if r[0] in part)
            split = {"in place": own}
            if self.compact:
                split = {"listed": tuple(r for r in own if r[0] < self.sparsified)}
                split["whole"] = tuple(r for r in own if r[0] >= self.sparsified)
            # The entry refers to the ranges, so that no others have their identity.
            self._forms[key] = ranges, [(form, some) for form, some in split.items() if some]
        return self._forms[key][1]

    def launch(
        self, kernel: Any, tiles: TileSchedule, listed: Tensor, *rest: Any, form: str, width: int = 4, **constants: Any
    ) -> None:
        """Launch a kernel on a list of tiles. All kernels on masks have the same first arguments.

        form: FORM of `triton_tiles`. width: of the parts of a tile.
        """
        in_use, previous = self.step.in_use, self.step.previous
        launching.launch(
            kernel,
            (len(listed),),
            listed,
            self.table,
            self.rates,
            in_use.bits,
            previous.bits,
            int(not in_use.dense),
            int(not previous.dense),
            *rest,
            warps=tiles.warps,
            **tiles.units(width),
            ENTRIES=self.most_entries(tiles) if form == "listed" else 1,
            FORM=form,
            **constants,
        )

    def most_entries(self, tiles: TileSchedule) -> int:
        """Return the most listed entries of a tile, as a power of two."""
        assert self.lists is not None
        return 1 << (tiles.rows * self.lists.k - 1).bit_length()

    def lists_of(self, in_use: Mask | None, previous: Mask | None) -> tuple[Tensor, Tensor]:
        """Return the lists of A and P; that of None may be invalid."""
        assert self.lists is not None
        tiles = [listed for listed, _, _ in self.tiles.lists(self.sparse, self.any_kinds)]
        return self.lists.of((in_use, previous), self.tiles, tiles, self.table)

    def list_in_use(self, form: str) -> Tensor:
        """Return the list of A for a launch on listed entries, else an unused tensor."""
        return self.lists_of(self.step.in_use, None)[0] if form == "listed" else self.unused

    def corrections(self) -> Tensor:
        """Return the bias corrections 1 - beta^t of both moments, FP32 (tensors, 2)."""
        if self._corrections is None:
            self._corrections = (1.0 - self._betas.values**self.step.steps).float()
        return self._corrections

    def pack_ranges(
        self, part: PayloadChunk, ranges: tuple[Range, ...], select: bool = False, **constants: Any
    ) -> None:
        """Launch the pack kernel over a chunk's part of `ranges`.

        select: also select the next mask in these blocks. constants: HAS_STATE and HAS_COMMON.
        """
        tiles, selection, k, how = self.pack_tiles, self.unused, 0, "none"
        if select and self._selection is not None:
            tiles, selection = self._select_tiles, self._selection
            k = entries_per_block(self.step.next_density, self.layout.block_size)
            how = "offsets" if selection.dtype == torch.int16 else "bitmap"
        needs_previous = self.moments_in_payload or self.carrying
        for form, some in self.forms(part, ranges):
            lists = self.unused, self.unused
            if form == "listed":
                lists = self.lists_of(self.step.in_use, self.step.previous if needs_previous else None)
            for listed, full, dtype in tiles.lists(some, self.gradient_kinds):
                self.launch(
                    triton_kernels.pack_kernel,
                    tiles,
                    listed,
                    self.payload,
                    self.moment_on_mask,
                    *lists,
                    self.code_residual,
                    selection,
                    k,
                    self._own_block,
                    self.step.applied,
                    form=form,
                    width=4 if how == "none" else 8,
                    ALIGNED_TILE=full,
                    DTYPE=DTYPES[dtype],
                    HAS_LAST=self.moment_on_mask.numel() > 0,
                    HAS_MOMENTS=self.moments_in_payload and form == "listed",
                    ADDS_ERRORS=self.compact and self.carrying,
                    SKIP_NEW=self.excludes_new and how != "none",
                    SELECT=how,
                    **constants,
                )

    def squares_of_tiles(self, part: PayloadChunk, ranges: tuple[Range, ...], owned: bool) -> list[Tensor]:
        """Return the sums of squares of the synchronized gradient over tiles. owned: of a sharded update."""
        sums = []
        for form, some in self.forms(part, ranges):
            for listed, _, _ in self.tiles.lists(some, self.any_kinds):
                partial = torch.empty(len(listed), dtype=torch.float32, device=self.device)
                sums.append(partial)
                arguments = self.payload, self.list_in_use(form), partial
                self.launch(triton_kernels.gradient_kernel, self.tiles, listed, *arguments, form=form, OWNED=owned)
        return sums

    def update_ranges(
        self, kernel: Any, part: PayloadChunk, ranges: tuple[Range, ...], *arguments: Any, **constants: Any
    ) -> None:
        """Launch an update kernel over a chunk's part of `ranges`. arguments: those between `corrections` and
        `fresh_counts`.
        """
        step, stale, corrections = self.step, self.stale, self.corrections()
        fresh, relative = (self.unused,) * 2 if stale is None else (stale.fresh, stale.relative)
        for form, some in self.forms(part, ranges):
            tiles = self.update_tiles if form == "listed" else self.pack_tiles
            for listed, full, dtype in tiles.lists(some, self.parameter_kinds):
                self.launch(
                    kernel,
                    tiles,
                    listed,
                    self.payload,
                    self.list_in_use(form),
                    corrections,
                    *arguments,
                    fresh,
                    relative,
                    step.clip,
                    self.step.applied,
                    form=form,
                    ALIGNED_TILE=full,
                    DTYPE=DTYPES[dtype],
                    SCALED=stale is not None and form != "whole",  # no entries of a tensor without a mask enter it
                    CLIP_MOMENT=step.clip_moment,
                    **constants,
                )

    # -------------------------------------------------------------------------------------- internals

    def _encode(self, offsets: Tensor) -> Tensor:
        """Encode the offsets of the runs, int16 (blocks, k)."""
        k, layout = offsets.shape[1], self.layout
        code, nbytes = offset_code(k, layout.block_size), layout.wire_bytes(self.step.next_density, self.selection)
        message = torch.zeros(self.runs * nbytes, dtype=torch.uint8, device=self.device)
        launching.launch(
            triton_masks.encode_offsets_kernel,
            (-(-offsets.numel() // 1024),),
            offsets,
            message,
            offsets.numel(),
            layout.run_blocks,
            nbytes,
            k,
            code.nbytes,
            code.unary,
            code.low,
            warps=4,
            TILE=1024,
        )
        return message


class TritonReplicated(TritonPasses):
    """Passes of the replicated update: every replica updates all entries.

    At the target density `moment_on_mask` contains the first moment of the sparsified tensors between two steps, see
    `triton_kernels`. `store_moments` copies it to the state.
    """

    # `applied` of the last step, if it stored the moments on A in `moment_on_mask`.
    _last_step: Tensor | None = None
    _masks: tuple[Mask, Mask]
    _payload_tiles: tuple[Tensor, list[int], Tensor] | None = None

    def begin_step(self) -> None:
        self.leaves_state = self.compact
        self._last_step = None  # if it was not followed by `rotate`, it was not applied
        if not self.compact:
            self.store_moments()
        self._masks = self.step.in_use, self.step.previous

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        self.moments_in_payload, self._last_step = self._last_step is not None, None
        super().rotate(received, density, in_use, previous)

    def store_moments(self) -> None:
        applied = self._last_step
        if not self.moments_in_payload and applied is None:
            return
        in_use, previous = self._masks
        lists = self.lists_of(in_use if applied is not None else None, previous if self.moments_in_payload else None)
        flag = torch.zeros((), dtype=torch.bool, device=self.device) if applied is None else applied
        count = self.sparsified
        window = self.storage.window
        for first, end in [(0, count)] if window is None else window.walk((0, count), [(0, count)], changed=True):
            ranges = tuple(r for r in self.sparse if first <= r[0] < end)
            for listed, _, _ in self.tiles.lists(ranges, self.any_kinds):
                launching.launch(
                    triton_kernels.store_moments_kernel,
                    (len(listed),),
                    listed,
                    self.table,
                    *lists,
                    self.moment_on_mask,
                    flag,
                    int(self.moments_in_payload),
                    warps=self.tiles.warps,
                    ENTRIES=self.most_entries(self.tiles),
                    BLOCK=self.layout.block_size,
                )
        self.moments_in_payload, self._last_step = False, None

    def pack(self, chunk: PayloadChunk) -> None:
        for part in self.walk(chunk, "pack"):
            for ranges, select in ((self.selected_blocks, True), (self.other_blocks, False), (self.dense, False)):
                self.pack_ranges(part, ranges, select, HAS_STATE=True, HAS_COMMON=False)

    def squares(self, chunk: PayloadChunk) -> None:
        if not self.compact:
            self.partial_squares.append(
                [s for part in self.walk(chunk, "squares") for s in self.squares_of_tiles(part, self.all, owned=False)]
            )
            return
        if self._payload_tiles is None:
            self._payload_tiles = self.tile_payload()
        tiles, first, partial = self._payload_tiles
        launching.launch(
            triton_kernels.squares_kernel,
            (first[chunk.end] - first[chunk.first],),
            tiles,
            first[chunk.first],
            self.rates,
            self.payload,
            self.moment_on_mask,
            partial,
            warps=4,
            TILE=_SQUARED,
        )
        self.partial_squares.append([partial] if chunk.end == len(self.sizes) else [])

    def tile_payload(self) -> tuple[Tensor, list[int], Tensor]:
        """Return the tiles of the payload buffer, int64 (tiles, 3), the first one of each tensor and the end, and the
        buffer of their sums.
        """
        tiles: list[Tensor] = []
        first = [0]
        for i, (start, count) in enumerate(zip(self.payload_layout.positions, self.counts, strict=True)):
            at = torch.arange(0, count, _SQUARED, dtype=torch.int64, device="cpu")
            tiles.append(torch.stack((torch.full_like(at, i), start + at, (count - at).clamp(max=_SQUARED)), dim=1))
            first.append(first[-1] + len(at))
        partial = torch.zeros(first[-1], dtype=torch.float32, device=self.device)
        return to_device(torch.cat(tiles), self.device), first, partial

    def update(self, chunk: PayloadChunk) -> None:
        self.begin_update(chunk)
        for part in self.walk(chunk, "update"):
            if self.compact and self._last_step is None:
                self._last_step = self.step.applied.clone()  # the next check overwrites the tensor
            last, writes = self.moment_on_mask, self.writes
            self.update_ranges(triton_kernels.update_kernel, part, self.all, last, WRITES=writes)
            if writes:
                self.writable.store(range(part.first, part.end))


class TritonSharded(TritonPasses):
    """Passes of the sharded update: each entry's owner updates it for all replicas."""

    owner: ShardedUpdate

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owned = tuple(r for r in self.all if self.owner.owns(r[0]))
        # (blocks, whether the next mask is selected in them, whether the slices are owned). A dry run also selects in
        # the slices of other owners.
        self._packed = [
            (tuple(r for r in blocks if self.owner.owns(r[0]) == owned), select, owned)
            for owned in (True, False)
            for blocks, select in ((self.selected_blocks, True), (self.other_blocks, False))
        ]

    def owned_addresses(self, i: int) -> tuple[int, int]:
        owner = self.owner
        if not owner.owns(i):
            return 0, 0
        master = owner.share_of(owner.master, i).data_ptr() if owner.scaled else 0
        return owner.share_of(owner.common, i).data_ptr(), master

    def pack(self, chunk: PayloadChunk) -> None:
        for part in self.walk(chunk, "pack"):
            self.pack_ranges(part, self.dense, HAS_STATE=False, HAS_COMMON=False)
            for blocks, select, owned in self._packed:
                self.pack_ranges(part, blocks, select, HAS_STATE=True, HAS_COMMON=owned)

    def squares(self, chunk: PayloadChunk) -> None:
        self.partial_squares.append(self.squares_of_tiles(chunk, self._owned, owned=True))

    def update(self, chunk: PayloadChunk) -> None:
        self.begin_update(chunk)
        scales = self.owner.scales if self.owner.scaled else self.unused
        for part in self.walk(chunk, "update"):
            self.update_ranges(
                triton_kernels.owned_update_kernel, part, self._owned, scales, HAS_MASTER=self.owner.scaled
            )

    def write(self, own_only: bool = False) -> None:
        if not self.writes:
            return
        whole = PayloadChunk(0, len(self.sizes), 0, 0)
        for form, some in self.forms(whole, self._owned if own_only else self.all):
            for listed, full, dtype in self.tiles.lists(some, self.parameter_kinds):
                self.launch(
                    triton_kernels.write_kernel,
                    self.tiles,
                    listed,
                    self.owner.value_buffer(self.payload),
                    self.list_in_use(form),
                    self.step.applied,
                    form=form,
                    ALIGNED_TILE=full,
                    DTYPE=DTYPES[dtype],
                    DECAYS=not self.owner.scaled,
                )
        self.writable.store()

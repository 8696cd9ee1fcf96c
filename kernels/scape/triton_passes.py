"""SCAPE passes on Triton kernels: a few launches for all tensors of a model, without synchronization."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import (
    DeviceTable,
    Range,
    TileSchedule,
    Writable,
    addresses,
    aligned,
    as_flag,
)
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.common.triton_common import RATES, WIDTH, table_row
from torchtitan_scape.kernels.dense.triton_passes import DTYPES, set_rates
from torchtitan_scape.kernels.scape import triton_kernels, triton_masks
from torchtitan_scape.kernels.scape.blocks import entries_per_block, offset_code
from torchtitan_scape.kernels.scape.passes import ScapePasses, Updates
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadChunk, PayloadPlan
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate

# Entries per tile and per warp. Those of packing and updating in `triton_compact` were the fastest of five on an H200,
# in the sum over three densities. Selection is fastest with one warp per block: its reductions synchronize warps.
TILE, WARP = 2048, 512
PACK_TILE, PACK_WARP = 1024, 256
UPDATE_TILE, UPDATE_WARP = 1024, 512
SELECT_TILE, SELECT_WARP = 1024, 1024
_FLAT = 4096  # entries per program of kernels over flat buffers
_ROTATED = 2048  # bytes of masks per program; more cause spills if the masks are not aligned
_CODED = 512  # bytes of unary bits that one program decodes


class TritonUpdates(Updates, Protocol):
    """`Updates` of this backend."""

    fixed_columns: bool
    """The columns and kinds depend on the tensors' pointers and dtypes and on the density only."""

    def columns(self, i: int) -> tuple[int, ...]:
        """Return the columns of a tensor in the pointer table, from OUTSIDE on."""

    def begin_step(self) -> None:
        """Prepare the state for the bound step. The pointer table is still that of the last one."""

    def rotate(self, density: float, in_use: Tensor, previous: Tensor) -> Tensor | None:
        """Prepare the rotation after an applied step: its mask A will be P, and the next A has this density.

        Returns the buffer for the list of the next A (`triton_lists`) if it will be used; call `decoded` once written.
        """

    def decoded(self, in_use: Tensor) -> None:
        """See `rotate`."""

    def kinds(self) -> tuple[tuple[bool, torch.dtype], ...]:
        """Return for every tensor whether all data of its update is aligned, and the parameter's dtype."""


class TritonPasses(ScapePasses):
    """`ScapePasses` with the kernels of `triton_kernels` and `triton_masks`. Supports selection in blocks only.

    Additional public members are for `triton_updates`.
    """

    updates: TritonUpdates

    def __init__(
        self, updater: ReplicatedUpdate | ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any
    ) -> None:
        assert plan.selection == "block"  # the selection "tensor" runs in PyTorch
        super().__init__(updater, plan, device, **options)
        count, size = len(self.sizes), self.layout.block_size
        self._table = DeviceTable(count, WIDTH.value, torch.int64, device)
        self._rates = DeviceTable(count, RATES.value, torch.float32, device)
        self._betas = DeviceTable(count, 2, torch.float64, device)
        self.tiles = TileSchedule(self.sizes, size, TILE, WARP, device)
        self.pack_tiles = TileSchedule(self.sizes, size, PACK_TILE, PACK_WARP, device)
        self.update_tiles = TileSchedule(self.sizes, size, UPDATE_TILE, UPDATE_WARP, device)
        self._select_tiles = TileSchedule(self.sizes, size, SELECT_TILE, SELECT_WARP, device)
        self.fresh = torch.zeros(count, dtype=torch.int32, device=device)
        self.any_kinds = ((False, None),) * count
        self._selection_bits = torch.zeros(0, dtype=torch.uint8, device=device)
        self.own_block = self.first_run * self.layout.run_blocks
        self.all = tuple(self.tiles.whole())
        self.own, self.others = self._split(self.own_block, self.own_block + self.runs * self.layout.run_blocks)
        self._known: Any = None
        self._known_rates: list[Rates] = []
        self._within: dict[tuple[int, int, int], tuple[tuple[Range, ...], tuple[Range, ...]]] = {}

    def _split(self, start: int, end: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return the blocks [start, end) of the masks as ranges of tensors, and all other blocks."""
        own: list[Range] = []
        others: list[Range] = []
        for tensor, _, blocks in self.all:
            if tensor >= self.sparsified:
                others.append((tensor, 0, blocks))
                continue
            first = self.layout.first_block[tensor]
            a, b = (min(max(edge - first, 0), blocks) for edge in (start, end))
            own.append((tensor, a, b))
            others += [(tensor, 0, a), (tensor, b, blocks)]
        return tuple(r for r in own if r[1] < r[2]), tuple(r for r in others if r[1] < r[2])

    def within(self, part: PayloadChunk, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        """Return the ranges of the tensors of a chunk."""
        key = part.first, part.end, id(ranges)  # the entry refers to the ranges, so that no others have their identity
        if key not in self._within:
            self._within[key] = ranges, tuple(r for r in ranges if r[0] in part)
        return self._within[key][1]

    # -------------------------------------------------------------------------------------- the passes

    def bind(self, step: PassInputs) -> None:
        super().bind(step)
        self.updates.begin_step()
        if not self.compact or self.carrying:
            # mt, or the quantization error, is added to the gradients' storage in FP32: other dtypes are copied.
            self.gradients = [g if g.dtype is torch.float32 else g.float() for g in step.gradients]
        through_master = self.updater.updates_master and self.masters
        self.writable = Writable(step.parameters, self.masters if through_master else None)
        pointers = [addresses(tensors) for tensors in (self.gradients, self.writable.flat, self.states)]
        dtypes = [t.dtype for tensors in (self.gradients, self.writable.flat) for t in tensors]
        known = pointers, dtypes, step.in_use.density, self.compact
        if known != self._known or not self.updates.fixed_columns:  # as a rule, gradients are allocated where they were
            self._set_table(list(zip(*pointers, strict=True)))
            self._known = known
        if step.rates != self._known_rates:
            set_rates(self._rates, self._betas, step.rates)
            self._known_rates = list(step.rates)
        self._corrections: Tensor | None = None
        self.fresh.zero_()
        self._selection = self._allocate_selection(step.next_density)

    def _set_table(self, pointers: Sequence[tuple[int, ...]]) -> None:
        """Update the pointer table and the kinds of the tensors. pointers: of gradient, parameter and state of each."""
        layout, step = self.layout, self.step
        k = layout.block_size if step.in_use.dense else entries_per_block(step.in_use.density, layout.block_size)
        rows = []
        for i, own in enumerate(pointers):
            sparse = i < self.sparsified
            rows.append(
                table_row(
                    *own,
                    self.sizes[i],
                    layout.first_block[i] if sparse else -1,
                    self.payload_layout.positions[i],
                    k if sparse else layout.block_size,
                    *self.updates.columns(i),
                )
            )
        self._table.set(rows)
        self.gradient_kinds = tuple((aligned(g, s), g.dtype) for g, s in zip(self.gradients, self.states, strict=True))
        self.parameter_kinds = self.updates.kinds()

    def release(self) -> None:
        super().release()
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

    def pieces(self) -> "list[Tensor] | _Entries":
        return self.gradients if self.step.in_use.dense else _Entries(self)

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        layout, lists = self.layout, self.updates.rotate(density, in_use, previous)
        offsets = received is not None and layout.sends_offsets(density, self.selection)
        bits = self.received_selections(received, density) if received is not None and not offsets else in_use
        launching.launch(
            triton_masks.rotate_kernel,
            (-(-in_use.numel() // _ROTATED),),
            bits,
            in_use,
            previous,
            in_use.numel(),
            warps=4,
            HAS_BITS=bits is not in_use,
            TILE=_ROTATED,
        )
        if offsets:
            assert received is not None
            k = entries_per_block(density, layout.block_size)
            code = offset_code(k, layout.block_size)
            # Bytes of the unary part, as a power of two.
            width = 1 << (-(-(code.unary or k) // 8) - 1).bit_length()
            rows = max(1, _CODED // width)
            launching.launch(
                triton_masks.decode_offsets_kernel,
                (-(-layout.total_blocks // rows),),
                received,
                in_use,
                in_use if lists is None else lists,
                layout.total_blocks,
                layout.run_blocks,
                layout.wire_bytes(density, self.selection),
                k,
                code.nbytes,
                code.unary,
                code.low,
                warps=4,
                BLOCK=layout.block_size,
                ROWS=rows,
                BYTES=width,
                LISTS=lists is not None,
            )
            if lists is not None:
                self.updates.decoded(in_use)

    # ---------------------------------------------------------------------------- for `triton_updates`

    def launch(
        self,
        kernel: Any,
        tiles: TileSchedule,
        listed: Tensor,
        *rest: Any,
        payload: Tensor | None = None,
        width: int = 0,
        **constants: Any,
    ) -> None:
        """Launch a kernel on a list of tiles. All kernels on masks have the same first arguments.

        width: of the parts of a tile, for `triton_compact`.
        """
        in_use, previous = self.step.in_use, self.step.previous
        launching.launch(
            kernel,
            (len(listed),),
            listed,
            self.table,
            self._rates.values,
            in_use.bits,
            previous.bits,
            int(not in_use.dense),
            int(not previous.dense),
            self.payload if payload is None else payload,
            *rest,
            warps=tiles.warps,
            **(tiles.units(width) if width else tiles.shape),
            **constants,
        )

    def corrections(self) -> Tensor:
        """Return the bias corrections 1 - beta^t of both moments, FP32 (tensors, 2)."""
        if self._corrections is None:
            self._corrections = (1.0 - self._betas.values**self.step.steps).float()
        return self._corrections

    @property
    def table(self) -> Tensor:
        """The pointer table."""
        return self._table.values

    def selection_of(self, select: bool, tiles: TileSchedule) -> tuple[TileSchedule, Tensor, str, int]:
        """Return the arguments of pack kernels: tiles, selection, SELECT, and k.

        select: select the next mask, with other tiles than `tiles`.
        """
        if not select or self._selection is None:
            return tiles, self.fresh, "none", 0
        form = "offsets" if self._selection.dtype == torch.int16 else "bitmap"
        k = entries_per_block(self.step.next_density, self.layout.block_size)
        return self._select_tiles, self._selection, form, k

    def pack_blocks(
        self, ranges: tuple[Range, ...], select: bool = False, common: bool = False, adds_errors: bool = False
    ) -> None:
        """Launch the pack kernel over ranges of blocks.

        select: also select the next mask in these blocks. common: the common buffer is part of mt. adds_errors: also do
        the work of `carry`, in one pass over the gradients.
        """
        adds_errors = adds_errors and self.compact and self.carrying
        tiles, selection, form, k = self.selection_of(select, self.tiles)
        for listed, full, dtype in tiles.lists(ranges, self.gradient_kinds):
            self.launch(
                triton_kernels.pack_kernel,
                tiles,
                listed,
                self.moment_on_mask,
                self.fresh,
                selection,
                k,
                self.own_block,
                as_flag(self.step.applied),
                self.code_residual if adds_errors else self.fresh,
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                COMPACT=self.compact,
                SKIP_NEW=self.excludes_new and form != "none",
                SELECT=form,
                HAS_LAST=self.moment_on_mask.numel() > 0,
                HAS_COMMON=common,
                ADDS_ERRORS=adds_errors,
            )

    def carry(self, part: PayloadChunk) -> None:
        """Add the quantization error of the last payload to the gradients."""
        if not (self.compact and self.carrying):
            return
        for listed, _, _ in self.tiles.lists(self.within(part, self.all), self.any_kinds):
            launching.launch(
                triton_kernels.carry_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.step.previous.bits,
                int(not self.step.previous.dense),
                self.code_residual,
                warps=self.tiles.warps,
                **self.tiles.shape,
            )

    def squares_of_tiles(self, whole: Tensor, rest: Tensor) -> list[Tensor]:
        """Return the sums of squares of the synchronized gradient over tiles of the payload; see `tile_payload`."""
        sums = []
        for full, listed in ((True, whole), (False, rest)):
            partial = torch.empty(len(listed), dtype=torch.float32, device=self.device)
            launching.launch(
                triton_kernels.squares_kernel,
                (len(listed),),
                listed,
                self._rates.values,
                self.payload,
                self.moment_on_mask,
                partial,
                warps=4,
                TILE=_FLAT,
                ALIGNED_TILE=full,
            )
            sums.append(partial)
        return sums

    # -------------------------------------------------------------------------------------- internals

    def _allocate_selection(self, density: float) -> Tensor | None:
        """Allocate the selection: int16 offsets (owned blocks, k), or uint8 bits; None if nothing is selected."""
        layout = self.layout
        if density >= 1.0 or layout.total_blocks == 0:
            return None
        if layout.sends_offsets(density, self.selection):
            shape = self.runs * layout.run_blocks, entries_per_block(density, layout.block_size)
            return torch.zeros(shape, dtype=torch.int16, device=self.device)
        # The same buffer in every step; for a single replica it contains the next mask.
        size = self.runs * layout.run_bytes
        if self._selection_bits.numel() != size:
            self._selection_bits = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._selection_bits

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

    def tile_payload(self, part: PayloadChunk) -> tuple[Tensor, Tensor]:
        """Return the tiles of a chunk: those of _FLAT entries that begin at a multiple of 4, and all others."""
        none = torch.empty(0, 3, dtype=torch.int64, device="cpu")
        whole, rest = [none], [none]
        for i in range(part.first, part.end):
            start = self.payload_layout.positions[i]
            end = start + self.counts[i]
            first = min(-(-start // 4) * 4, end)
            last = first + (end - first) // _FLAT * _FLAT
            positions = torch.arange(first, last, _FLAT, dtype=torch.int64, device="cpu")
            columns = [torch.full_like(positions, i), positions, torch.full_like(positions, _FLAT)]
            whole.append(torch.stack(columns, dim=1))
            edges = [(i, a, b - a) for a, b in ((start, first), (last, end)) if a < b]
            rest.append(torch.tensor(edges, dtype=torch.int64, device="cpu").view(-1, 3))
        return launching.to_device(torch.cat(whole), self.device), launching.to_device(torch.cat(rest), self.device)


class _Entries:
    """`topology.chunks.Source` of a payload in the gradients' storage."""

    def __init__(self, passes: TritonPasses) -> None:
        self._passes = passes
        self.entries, self.device = sum(passes.counts), passes.device
        self._ends = list(accumulate(passes.counts))
        tiles = [-(-end // passes.tiles.rows) for _, _, end in passes.all]
        self._first_tile = [0, *accumulate(tiles)]
        self._per_block = entries_per_block(passes.step.in_use.density, passes.layout.block_size)
        # All tiles, in tensor order.
        ((self._tiles, _, _),) = passes.tiles.lists(passes.all, passes.any_kinds)

    def fill(self, chunk: Tensor, first: int) -> None:
        """Copy payload[first : first + len(chunk)] to `chunk`."""
        self._move(chunk, first, True)

    def store(self, chunk: Tensor, first: int) -> None:
        """Copy `chunk` to payload[first : first + len(chunk)]."""
        self._move(chunk, first, False)

    def _move(self, chunk: Tensor, first: int, to_chunk: bool) -> None:
        begin, end = self._tile_of(first), self._tile_of(first + chunk.numel() - 1)
        listed = self._tiles[begin.start : end.stop]
        self._passes.launch(
            triton_masks.move_kernel,
            self._passes.tiles,
            listed,
            first,
            chunk.numel(),
            payload=chunk,
            TO_CHUNK=to_chunk,
        )

    def _tile_of(self, position: int) -> range:
        """Return the tile that contains this payload entry, as a range of length one."""
        p = self._passes
        tensor = bisect_right(self._ends, position)
        tiles = range(self._first_tile[tensor], self._first_tile[tensor + 1])
        per_tile = p.tiles.rows * (self._per_block if tensor < p.sparsified else p.layout.block_size)
        start = self._ends[tensor] - p.counts[tensor]
        return tiles[(position - start) // per_tile :][:1]

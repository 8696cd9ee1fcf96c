"""SCAPE's passes as Triton kernels, a few launches for all tensors of a model. Nothing here waits for the device."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import Range, Table, Tiles, Writable, aligned, as_flag, to_device
from kernels.common.triton_common import RATES, WIDTH, table_row
from kernels.dense.triton_dense_passes import DTYPES, rates_row
from kernels.scape import triton_masks, triton_scape
from kernels.scape.blocks import BlockLayout, Mask, entries_per_block, offset_bits
from kernels.scape.passes import Part, Rates, ScapePasses
from kernels.scape.triton_visits import EnteringCount
from kernels.scape.visits import LEAST_RATE, VisitRates

# Entries of a tile and for each of its warps. Many entries a thread spread a program's fixed cost, which pays where
# only the mask's entries are worked on, and spills where all are. Selection wants a block in few warps: they agree
# fastest.
COMPACT_TILE, COMPACT_WARP = 4096, 1024
STREAM_TILE, STREAM_WARP = 2048, 512
SELECT_TILE, SELECT_WARP = 1024, 1024
_FLAT = 4096


class TritonScape(ScapePasses):
    """`ScapePasses` on the kernels of `triton_scape`, `triton_select` and `triton_masks`."""

    def __init__(
        self,
        layout: BlockLayout,
        whole_sizes: tuple[int, ...],
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
        **options: Any,
    ) -> None:
        assert selection == "block"  # the paper's runs in PyTorch
        super().__init__(layout, whole_sizes, selection, density, replica, device, **options)
        count, size = len(self.sizes), layout.block_size
        self._table = Table(count, WIDTH.value, torch.int64, device)
        self._rates = Table(count, RATES.value, torch.float32, device)
        self._betas = Table(count, 2, torch.float64, device)
        self._stream = Tiles(self.sizes, size, STREAM_TILE, STREAM_WARP, device)
        self._wide = Tiles(self.sizes, size, COMPACT_TILE, COMPACT_WARP, device)
        self._choose = Tiles(self.sizes, size, SELECT_TILE, SELECT_WARP, device)
        self._fresh = torch.zeros(count, dtype=torch.int32, device=device)
        self._payload_tiles: dict[Part, tuple[Tensor, Tensor]] = {}
        self._ranges: dict[tuple[Part, str], tuple[Range, ...]] = {}
        self._any_kinds = ((False, None),) * count
        self._entering: EnteringCount | None = None
        self._wire = torch.zeros(0, dtype=torch.uint8, device=device)
        self._own_block = self.first_run * layout.run_blocks
        self._all = tuple(self._stream.whole())
        self._own, self._others = self._split(self._own_block, self._own_block + self.runs * layout.run_blocks)

    def _split(self, start: int, end: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The blocks [start, end) of the masks as ranges of tensors, and all others."""
        own: list[Range] = []
        others: list[Range] = []
        for tensor, _, blocks in self._all:
            if tensor >= self.sparsified:
                others.append((tensor, 0, blocks))
                continue
            first = self.layout.first_block[tensor]
            a, b = (min(max(edge - first, 0), blocks) for edge in (start, end))
            own.append((tensor, a, b))
            others += [(tensor, 0, a), (tensor, b, blocks)]
        return tuple(r for r in own if r[1] < r[2]), tuple(r for r in others if r[1] < r[2])

    def _of(self, part: Part, which: str) -> tuple[Range, ...]:
        """The part's ranges among "all", the "own" run's, or the "others"."""
        if (part, which) not in self._ranges:
            ranges = {"all": self._all, "own": self._own, "others": self._others}[which]
            self._ranges[part, which] = tuple(r for r in ranges if r[0] in part)
        return self._ranges[part, which]

    # -------------------------------------------------------------------------------------- the passes

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
        if not self.compact or self.carrying:
            # mt, or what is carried over, is kept in FP32 where the gradient was: one of another dtype is copied.
            self.gradients = [g.float() for g in gradients]
        self._writable = Writable(parameters, self.masters if self.holds_master else None)
        layout, flat, positions = self.layout, self._writable.flat, self.positions()
        k = entries_per_block(in_use.density, layout.block_size) if not in_use.dense else layout.block_size
        rows = []
        for i in range(len(self.sizes)):
            sparse = i < self.sparsified
            rows.append(
                table_row(
                    self.gradients[i].data_ptr(),
                    flat[i].data_ptr(),
                    self.states[i].data_ptr(),
                    self.sizes[i],
                    layout.first_block[i] if sparse else -1,
                    positions[i],
                    k if sparse else layout.block_size,
                    *self._columns_from_outside(i),
                )
            )
        self._table.set(rows)
        self._rates.set([rates_row(r) for r in rates])
        self._betas.set([(r.beta1, r.beta2) for r in rates])
        self._gradient_kinds = tuple((aligned(g, s), g.dtype) for g, s in zip(self.gradients, self.states, strict=True))
        # While the payload is not compact `update` reads it where the gradients are.
        read = self.states if self.compact else self.gradients
        self._parameter_kinds = tuple(
            (aligned(p, s, r), p.dtype) for p, s, r in zip(flat, self.states, read, strict=True)
        )
        self._fresh.zero_()
        self._tiles = self._wide if self.compact else self._stream
        self._chosen: Tensor | None = None
        if next_density < 1.0 and layout.total_blocks > 0:
            if layout.sends_offsets(next_density, self.selection):
                shape = self.runs * layout.run_blocks, entries_per_block(next_density, layout.block_size)
                self._chosen = torch.zeros(shape, dtype=torch.int16, device=self.device)
            else:
                self._chosen = self._bitmap()

    def _columns_from_outside(self, i: int) -> tuple[int, ...]:
        """The table's columns from OUTSIDE on."""
        axes: tuple[int, ...] = (1, 0, 0)
        if self.visits is not None and i < self.sparsified:
            axes = (self.visits.columns[i], *self.visits.places[2 * i : 2 * i + 2])
        return self.sizes[i] - self.counts[i], *axes

    def _pack_tensors(self, part: Part, applied: Tensor) -> None:
        tiles, own, others = self._tiles, self._of(part, "own"), self._of(part, "others")
        if self.compact and self.carrying:
            self._carry(part)
        if self._chosen is None:
            self._pack(tiles, self._of(part, "all"), applied)
            return
        k = entries_per_block(self.next_density, self.layout.block_size)
        form = "offsets" if self._chosen.dtype == torch.int16 else "bitmap"
        self._pack(self._choose, own, applied, form, self._chosen, k)
        self._pack(tiles, others, applied)

    def selected(self, applied: Tensor) -> Tensor | None:
        if self._chosen is None:
            return None
        if self._chosen.dtype != torch.int16:
            return self._chosen
        return torch.cat([self._encode(run) for run in self._chosen.split(self.layout.run_blocks)])

    def _carry(self, part: Part) -> None:
        for listed, _, _ in self._wide.lists(self._of(part, "all"), self._any_kinds):
            launching.launch(
                triton_scape.carry_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.previous.bits,
                int(not self.previous.dense),
                self.wire_residual,
                warps=self._wide.warps,
                **self._wide.shape,
            )

    def _pack(
        self,
        tiles: Tiles,
        ranges: tuple[Range, ...],
        applied: Tensor,
        select: str = "none",
        chosen: Tensor | None = None,
        k: int = 0,
        common: bool = False,
    ) -> None:
        for listed, easy, dtype in tiles.lists(ranges, self._gradient_kinds):
            launching.launch(
                triton_scape.pack_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.in_use.bits,
                self.previous.bits,
                int(not self.in_use.dense),
                int(not self.previous.dense),
                self.payload,
                self.moment_on_mask,
                self._fresh,
                self._fresh if chosen is None else chosen,
                k,
                self._own_block,
                as_flag(applied),
                warps=tiles.warps,
                **tiles.shape,
                EASY=easy,
                DTYPE=DTYPES[dtype],
                COMPACT=self.compact,
                SKIP_NEW=self.skips_new and select != "none",
                SELECT=select,
                HAS_LAST=self.moment_on_mask.numel() > 0,
                HAS_COMMON=common,
            )

    def pieces(self) -> "list[Tensor] | _InPlace":
        return self.gradients if self.in_use.dense else _InPlace(self)

    def _squares_of(self, part: Part) -> list[Tensor]:
        sums: list[Tensor] = []
        if self.compact:
            if part not in self._payload_tiles:
                self._payload_tiles[part] = self._tile_payload(part)
            for easy, listed in zip((True, False), self._payload_tiles[part], strict=True):
                partial = torch.empty(len(listed), dtype=torch.float32, device=self.device)
                launching.launch(
                    triton_scape.squares_kernel,
                    (len(listed),),
                    listed,
                    self._rates.values,
                    self.payload,
                    self.moment_on_mask,
                    partial,
                    warps=4,
                    TILE=_FLAT,
                    EASY=easy,
                )
                sums.append(partial)
            return sums
        for listed, _, _ in self._stream.lists(self._of(part, "all"), self._any_kinds):
            partial = torch.empty(len(listed), dtype=torch.float32, device=self.device)
            launching.launch(
                triton_scape.squares_in_place_kernel,
                (len(listed),),
                listed,
                self._table.values,
                self._rates.values,
                self.in_use.bits,
                int(not self.in_use.dense),
                partial,
                warps=self._stream.warps,
                **self._stream.shape,
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
        tiles = self._tiles
        for listed, easy, dtype in tiles.lists(self._of(part, "all"), self._parameter_kinds):
            launching.launch(
                triton_scape.update_kernel,
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
                self.moment_on_mask,
                self._fresh,
                self.moment_on_mask if visits is None else visits.relative,
                self.most_stale,
                clip,
                as_flag(applied),
                warps=tiles.warps,
                **tiles.shape,
                EASY=easy,
                DTYPE=DTYPES[dtype],
                COMPACT=self.compact,
                SCALED=visits is not None,
                KEEPS=self.keeps,
                LEAST=LEAST_RATE,
                CLIP_MOMENT=clip_moment,
            )
        self._writable.store(range(part.first, part.end))

    def release(self) -> None:
        super().release()
        self._writable = Writable([])

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        layout = self.layout
        offsets = received is not None and layout.sends_offsets(density, self.selection)
        bits = received if received is not None and not offsets else in_use
        launching.launch(
            triton_masks.rotate_kernel,
            (-(-in_use.numel() // _FLAT),),
            bits,
            in_use,
            previous,
            in_use.numel(),
            warps=4,
            HAS_BITS=bits is received,
            TILE=_FLAT,
        )
        if offsets:
            assert received is not None
            k = entries_per_block(density, layout.block_size)
            launching.launch(
                triton_masks.decode_offsets_kernel,
                (-(-layout.run_blocks * k // 1024), layout.replicas),
                received,
                in_use,
                k,
                layout.run_blocks,
                layout.total_blocks,
                received.numel() // layout.replicas,
                warps=4,
                BLOCK=layout.block_size,
                BITS=offset_bits(layout.block_size),
                TILE=1024,
            )

    # -------------------------------------------------------------------------------------- internals

    def _bitmap(self) -> Tensor:
        """Where this rank's own selection goes, the same at every step: a single replica's next mask lies there."""
        size = self.runs * self.layout.run_blocks * self.layout.block_size // 8
        if self._wire.numel() != size:
            self._wire = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._wire

    def _encode(self, offsets: Tensor) -> Tensor:
        """The offsets of one run, int16 (run_blocks, k), packed for the wire."""
        bits = offset_bits(self.layout.block_size)
        wire = torch.empty((offsets.numel() * bits + 7) // 8, dtype=torch.uint8, device=self.device)
        launching.launch(
            triton_masks.encode_offsets_kernel,
            (-(-wire.numel() // 1024),),
            offsets,
            wire,
            offsets.numel(),
            wire.numel(),
            warps=4,
            BITS=bits,
            TILE=1024,
        )
        return wire

    def count_entering(self, visits: VisitRates) -> None:
        if self._entering is None:
            self._entering = EnteringCount(self.layout, visits)
        self._entering(self.in_use, self.previous)

    def _tile_payload(self, part: Part) -> tuple[Tensor, Tensor]:
        """Stretches of the payload within one tensor: those of _FLAT entries from a multiple of 4 on, and the rest."""
        whole, rest = [torch.empty(0, 3, dtype=torch.int64)], [torch.empty(0, 3, dtype=torch.int64)]
        for i in range(part.first, part.end):
            start, end = self.positions()[i], self.positions()[i] + self.counts[i]
            first = min(-(-start // 4) * 4, end)
            last = first + (end - first) // _FLAT * _FLAT
            positions = torch.arange(first, last, _FLAT, dtype=torch.int64)
            columns = [torch.full_like(positions, i), positions, torch.full_like(positions, _FLAT)]
            whole.append(torch.stack(columns, dim=1))
            edges = [(i, a, b - a) for a, b in ((start, first), (last, end)) if a < b]
            rest.append(torch.tensor(edges, dtype=torch.int64).view(-1, 3))
        return to_device(torch.cat(whole), self.device), to_device(torch.cat(rest), self.device)


class _InPlace:
    """The payload in the gradients' storage, copied to and from chunks of an all-reduce."""

    def __init__(self, passes: TritonScape) -> None:
        self._passes = passes
        self.entries, self.device = sum(passes.counts), passes.device
        self._ends = list(accumulate(passes.counts))
        tiles = [-(-end // passes._stream.rows) for _, _, end in passes._all]
        self._first_tile = [0, *accumulate(tiles)]
        self._per_block = entries_per_block(passes.in_use.density, passes.layout.block_size)
        # All tiles, tensor by tensor.
        ((self._tiles, _, _),) = passes._stream.lists(passes._all, passes._any_kinds)

    def fill(self, chunk: Tensor, first: int) -> None:
        """chunk = payload[first : first + len(chunk)]."""
        self._move(chunk, first, True)

    def land(self, chunk: Tensor, first: int) -> None:
        """payload[first : first + len(chunk)] = chunk."""
        self._move(chunk, first, False)

    def _move(self, chunk: Tensor, first: int, to_chunk: bool) -> None:
        p = self._passes
        tiles = p._stream
        begin, end = self._tiles_of(first), self._tiles_of(first + chunk.numel() - 1)
        listed = self._tiles[begin.start : end.stop]
        launching.launch(
            triton_masks.move_kernel,
            (len(listed),),
            listed,
            p._table.values,
            p.in_use.bits,
            int(not p.in_use.dense),
            chunk,
            first,
            chunk.numel(),
            warps=tiles.warps,
            **tiles.shape,
            TO_CHUNK=to_chunk,
        )

    def _tiles_of(self, position: int) -> range:
        """Tiles among which the one lies that has this entry of the payload."""
        p = self._passes
        tensor = bisect_right(self._ends, position)
        tiles = range(self._first_tile[tensor], self._first_tile[tensor + 1])
        per_tile = p._stream.rows * (self._per_block if tensor < p.sparsified else p.layout.block_size)
        start = self._ends[tensor] - p.counts[tensor]
        return tiles[(position - start) // per_tile :][:1]

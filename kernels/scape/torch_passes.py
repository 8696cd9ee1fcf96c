"""The passes in plain PyTorch, tensor by tensor: what runs on a CPU."""

from functools import cache

import torch
from torch import Tensor

from kernels.scape import reference
from kernels.scape.blocks import Mask, entries_per_block, offset_bytes
from kernels.scape.passes import Part, Rates, ScapePasses
from kernels.scape.visits import VisitRates

# Blocks that are selected or decoded at a time; bounds the temporaries. A multiple of 8, so that packed
# offsets of that many blocks end on a byte.
_ROWS = 4096


class Flat:
    """A tensor as FP32 (n,) to write to; `store` takes back what is no view of it.

    master: what is written to instead, and the tensor is a copy of. Without one a BF16 parameter loses updates that are
    smaller than its rounding.
    """

    def __init__(self, tensor: Tensor, master: Tensor | None = None) -> None:
        self._tensor = tensor
        self.flat = tensor.float().contiguous().view(-1) if master is None else master

    def store(self) -> None:
        if self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))


class TorchScape(ScapePasses):
    """`ScapePasses` on `kernels.scape.reference`."""

    def bind(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rates: list[Rates],
        in_use: Mask,
        previous: Mask,
        next_density: float,
    ) -> None:
        super().bind(parameters, [g.float() for g in gradients], rates, in_use, previous, next_density)
        # Positions are kept where they are few; while the mask is nearly dense they are made again.
        self._indices = cache(self._find) if self.compact else self._find
        if self.compact:
            self._payloads: list[Tensor] = self._split(self.payload)
            self._last = self._split(self.moment_on_mask)
        else:
            self._payloads = [g[:n] for g, n in zip(self.gradients, self.counts, strict=True)]
        self._chosen = self._room_for_selection(next_density)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        """The stretch of each tensor."""
        return [buffer[start : start + n] for start, n in zip(self.positions(), self.counts, strict=True)]

    def _pack_tensors(self, part: Part, applied: Tensor) -> None:
        errors = self._split(self.wire_residual) if self.compact and self.carrying else None
        for i in range(part.first, part.end):
            gradient, rates, held = self.gradients[i], self.rates[i], self._bits(self.previous, i)
            if errors is not None:
                self._carry(i, errors[i])
            reference.new_moment_(gradient, self.states[i], held, rates.beta1, rates.scale)
            self._select(i)
            last, indices = self._last[i] if self.compact else None, self._indices(i)
            reference.pack_(gradient, self.states[i], indices, held, self._payloads[i], last, applied)

    def _carry(self, tensor: int, errors: Tensor) -> None:
        held, rates = self._bits(self.previous, tensor), self.rates[tensor]
        where = None if held is None else reference.mask_indices(held, self.sizes[tensor], self.counts[tensor])
        reference.carry_(self.gradients[tensor], where, errors, rates.beta1, rates.scale)

    def selected(self, applied: Tensor) -> Tensor | None:
        if not self._chosen:
            return None
        if not self.layout.sends_offsets(self.next_density, self.selection):
            return torch.cat(self._chosen)
        size = self.layout.block_size
        return torch.cat(
            [reference.pack_offsets(rows.long(), size) for run in self._chosen for rows in run.split(_ROWS)]
        )

    def pieces(self) -> list[Tensor]:
        return list(self._payloads)

    def _squares_of(self, part: Part) -> list[Tensor]:
        sums = []
        for i in range(part.first, part.end):
            payload = self._payloads[i]
            reference.synchronised_gradient_(payload, self._last_moment(i), self.rates[i].beta1)
            if self.rates[i].counted:
                sums.append(payload.square().sum().view(1))
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
        for i in range(part.first, part.end):
            rates, parameter = self.rates[i], Flat(self.parameters[i], self.masters[i] if self.masters else None)
            reference.update_(
                parameter.flat,
                self._payloads[i],
                self.states[i],
                self._last[i] if self.compact else None,
                self._indices(i),
                self._bits(self.previous, i),
                lr=rates.lr,
                betas=(rates.beta1, rates.beta2),
                eps=rates.eps,
                weight_decay=rates.weight_decay,
                clip=clip,
                clip_moment=clip_moment,
                bias_corrections=(1 - rates.beta1**steps, 1 - rates.beta2**steps),
                max_staleness=self.most_stale,
                applied=applied,
                relative=visits.of(visits.relative, i) if visits is not None and i < self.sparsified else None,
                keeps=self.keeps,
            )
            parameter.store()

    def count_entering(self, visits: VisitRates) -> None:
        for i in range(self.sparsified):
            indices, held = self._indices(i), self._bits(self.previous, i)
            assert indices is not None and held is not None
            reference.count_entering_(indices, held, *visits.of(visits.counts, i))

    def release(self) -> None:
        super().release()
        self._payloads = []
        self._indices = self._find

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        previous.copy_(in_use)
        if received is not None:
            in_use.copy_(self._decode(received, density))

    # ------------------------------------------------------------------------------------ internals

    def _bits(self, mask: Mask, tensor: int) -> Tensor | None:
        return self.layout.bits(mask, tensor) if tensor < self.sparsified else None

    def _find(self, tensor: int) -> Tensor | None:
        bits = self._bits(self.in_use, tensor)
        return None if bits is None else reference.mask_indices(bits, self.sizes[tensor], self.counts[tensor])

    def _last_moment(self, tensor: int) -> Tensor:
        if self.compact:
            return self._last[tensor]
        state, indices = self.states[tensor], self._indices(tensor)
        return state if indices is None else state.index_select(0, indices)

    def _room_for_selection(self, density: float) -> list[Tensor]:
        """Zeros for what is selected, one tensor a run: int16 offsets (run_blocks, k), or uint8 bits."""
        layout = self.layout
        if density >= 1.0 or layout.total_blocks == 0:
            return []
        if layout.sends_offsets(density, self.selection):
            k = entries_per_block(density, layout.block_size)
            return [torch.zeros(layout.run_blocks, k, dtype=torch.int16, device=self.device) for _ in range(self.runs)]
        size = layout.run_blocks * layout.block_size // 8
        return [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(self.runs)]

    def _select(self, tensor: int) -> None:
        """Selects in the parts of a tensor's mt that lie in this rank's run."""
        if tensor >= self.sparsified:
            return
        layout, size = self.layout, self.layout.block_size
        for run, chosen in enumerate(self._chosen):
            replica = self.first_run + run
            start, end = layout.owned(tensor, replica)
            if start == end:
                continue
            own = self._candidates(tensor, start, end)
            first = layout.first_block[tensor] + start // size - replica * layout.run_blocks
            if self.selection == "tensor":
                bits = torch.zeros(-(-own.numel() // size) * size, dtype=torch.bool, device=self.device)
                chosen_here = reference.select_largest(own, entries_per_block(self.next_density, own.numel()))
                bits.index_fill_(0, chosen_here, True)
                packed = reference.pack_bits(bits)
                chosen[first * size // 8 :][: packed.numel()] = packed
                continue
            k = entries_per_block(self.next_density, size)
            for i, values in enumerate(own.split(_ROWS * size)):
                row, offsets = first + i * _ROWS, reference.select_blocks(values, k, size)
                if chosen.dtype == torch.int16:
                    chosen[row : row + offsets.shape[0]] = offsets
                else:
                    packed = reference.offsets_to_mask(offsets, size)
                    chosen[row * size // 8 :][: packed.numel()] = packed

    def _candidates(self, tensor: int, start: int, end: int) -> Tensor:
        """mt of owned entries [start, end), as the selection sees it: FP32 (end - start,)."""
        return self._without_new(self.gradients[tensor][start:end], tensor, start)

    def _without_new(self, moment: Tensor, tensor: int, start: int) -> Tensor:
        if not self.skips_new:
            return moment
        used, held = (self._bits(mask, tensor) for mask in (self.in_use, self.previous))
        assert used is not None and held is not None
        spent = reference.unpack_bits((used & ~held)[start // 8 :], moment.numel())
        return torch.where(spent, 0.0, moment)

    def _decode(self, received: Tensor, density: float) -> Tensor:
        layout = self.layout
        if not layout.sends_offsets(density, self.selection):
            return received
        bits = torch.zeros(layout.mask_bytes(), dtype=torch.uint8, device=self.device)
        size, run_blocks, k = layout.block_size, layout.run_blocks, entries_per_block(density, layout.block_size)
        rows_bytes = offset_bytes(_ROWS, k, size)
        for replica, own in enumerate(received.view(layout.replicas, -1)):
            # The last run may be short: what lies behind its blocks is no tensor's.
            blocks = min(run_blocks, layout.total_blocks - replica * run_blocks)
            for i in range(0, max(0, blocks), _ROWS):
                rows = min(_ROWS, blocks - i)
                packed = own[i // _ROWS * rows_bytes :][: offset_bytes(rows, k, size)]
                mask = reference.offsets_to_mask(reference.unpack_offsets(packed, rows, k, size), size)
                bits[(replica * run_blocks + i) * size // 8 :][: mask.numel()] = mask
        return bits


class TorchAdams:
    """Dense AdamS on `kernels.scape.reference`."""

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """One step.

        Args:
            parameters, moments: local shards, written; gradients: flat.
            steps: float64 (len(parameters),), applied steps of each, this one included.
            applied: bool (); false writes nothing.
        """
        for parameter, gradient, moment, r, step in zip(parameters, gradients, moments, rates, steps, strict=True):
            flat, flat_moment = Flat(parameter), Flat(moment)
            reference.adams_update_(
                flat.flat,
                gradient.float(),
                flat_moment.flat,
                lr=r.lr,
                betas=(r.beta1, r.beta2),
                eps=r.eps,
                weight_decay=r.weight_decay,
                bias_corrections=(1 - r.beta1**step, 1 - r.beta2**step),
                applied=applied,
            )
            flat.store()
            flat_moment.store()

"""SCAPE passes in plain PyTorch, tensor by tensor: the CPU implementation."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import Mask, entries_per_block, offset_bytes
from torchtitan_scape.kernels.scape.mask_code import decode_offsets, encode_offsets
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PassInputs
from torchtitan_scape.kernels.scape.visits import VisitRates

# Blocks that are selected or encoded at a time; limits the size of temporaries.
_ROWS = 4096


class TorchPasses(ScapePasses):
    """`ScapePasses` with `kernels.scape.reference`. Subclasses are in `torch_updates`."""

    def bind(self, step: PassInputs) -> None:
        super().bind(step)
        self.gradients = [g.float() for g in self.updater.cut([g.view(-1) for g in step.gradients])]
        self.parameters = self.updater.cut(step.parameters)
        # Positions are cached at the target density, and recomputed for denser masks, where they are many.
        self.indices = cache(self._positions) if self.compact else self._positions
        if self.compact:
            self.payloads: list[Tensor] = self.split(self.payload)
        else:
            self.payloads = [g[:n] for g, n in zip(self.gradients, self.counts, strict=True)]
        self._selection = self._allocate_selection(step.next_density)

    def release(self) -> None:
        super().release()
        del self.payloads, self.indices, self.parameters

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the slice of each tensor in a buffer of the payload's shape."""
        return [buffer[start : start + n] for start, n in zip(self.payload_layout.positions, self.counts, strict=True)]

    def carry(self, tensor: int) -> None:
        """Add the quantization error of the last payload to the gradient."""
        if not (self.compact and self.carrying):
            return
        held, rates = self.bits(self.step.previous, tensor), self.step.rates[tensor]
        indices = None if held is None else reference.mask_indices(held, self.sizes[tensor], self.counts[tensor])
        reference.carry_(self.gradients[tensor], indices, self.code_residual_of(tensor), rates.beta1, rates.scale)

    def selected(self) -> Tensor | None:
        if not self._selection:
            return None
        runs, layout, density = self._selection, self.layout, self.step.next_density
        if layout.sends_offsets(density, self.selection):
            size = layout.block_size
            runs = [torch.cat([encode_offsets(rows.long(), size) for rows in run.split(_ROWS)]) for run in runs]
        nbytes = layout.wire_bytes(density, self.selection)
        return torch.cat([pad(run, (0, nbytes - run.numel())) for run in runs])

    def pieces(self) -> list[Tensor]:
        return list(self.payloads)

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        previous.copy_(in_use)
        if received is not None:
            in_use.copy_(self._decode(received, density))

    def bits(self, mask: Mask, tensor: int) -> Tensor | None:
        """Return a tensor's packed bits of a mask; None if all are set."""
        return self.layout.bits(mask, tensor) if tensor < self.sparsified else None

    def count_entering(self, visits: VisitRates) -> None:
        for tensor in range(len(self.updater.tensors.sizes)):
            rows, columns = visits.of(visits.counts, tensor)
            fresh = self.entering(tensor).view(rows.numel(), columns.numel())
            rows.copy_(fresh.sum(1))
            columns.copy_(fresh.sum(0))

    def entering(self, tensor: int) -> Tensor:
        """Return bool (n,) of a whole sparsified tensor: true for the entries in A and not in P."""
        step, tensors = self.step, self.updater.tensors
        used, held = (tensors.bits(mask, tensor) for mask in (step.in_use, step.previous))
        assert used is not None and held is not None
        return reference.unpack_bits(used & ~held, tensors.sizes[tensor])

    def _positions(self, tensor: int) -> Tensor | None:
        bits = self.bits(self.step.in_use, tensor)
        return None if bits is None else reference.mask_indices(bits, self.sizes[tensor], self.counts[tensor])

    def _allocate_selection(self, density: float) -> list[Tensor]:
        """Allocate the selection of each run, zeros: int16 offsets (run_blocks, k), or uint8 bits."""
        layout = self.layout
        if density >= 1.0 or layout.total_blocks == 0:
            return []
        if layout.sends_offsets(density, self.selection):
            k = entries_per_block(density, layout.block_size)
            return [torch.zeros(layout.run_blocks, k, dtype=torch.int16, device=self.device) for _ in range(self.runs)]
        return [torch.zeros(layout.run_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.runs)]

    def select(self, tensor: int, common: Tensor | None = None) -> None:
        """Select entries of a tensor's mt, which replaced the gradient, in this rank's runs.

        common: FP32 (n,), common part of mt, for a slice that is entirely in the run.
        """
        if tensor >= self.sparsified:
            return
        layout, size, density = self.layout, self.layout.block_size, self.step.next_density
        for run, selection in enumerate(self._selection):
            replica = self.first_run + run
            start, end = layout.owned(tensor, replica)
            if start == end:
                continue
            moment = self.gradients[tensor][start:end]
            values = self._exclude_new(moment if common is None else moment + common, tensor, start)
            first = layout.first_block[tensor] + start // size - replica * layout.run_blocks
            if self.selection == "tensor":
                bits = torch.zeros(-(-values.numel() // size) * size, dtype=torch.bool, device=self.device)
                bits[: values.numel()] = reference.select_largest(values, entries_per_block(density, values.numel()))
                packed = reference.pack_bits(bits)
                selection[first * size // 8 :][: packed.numel()] = packed
                continue
            k = entries_per_block(density, size)
            for i, some in enumerate(values.split(_ROWS * size)):
                row, offsets = first + i * _ROWS, reference.select_blocks(some, k, size)
                if selection.dtype == torch.int16:
                    selection[row : row + offsets.shape[0]] = offsets
                else:
                    packed = reference.offsets_to_mask(offsets, size, some.numel())
                    selection[row * size // 8 :][: packed.numel()] = packed

    def _exclude_new(self, moment: Tensor, tensor: int, start: int) -> Tensor:
        """Return mt with zeros for newly entered entries, if the step excludes them from the selection."""
        if not self.excludes_new:
            return moment
        used, held = (self.bits(mask, tensor) for mask in (self.step.in_use, self.step.previous))
        assert used is not None and held is not None
        fresh = reference.unpack_bits((used & ~held)[start // 8 :], moment.numel())
        return torch.where(fresh, 0.0, moment)

    def _decode(self, received: Tensor, density: float) -> Tensor:
        layout, received = self.layout, self.received_selections(received, density)
        if not layout.sends_offsets(density, self.selection):
            return received
        bits = torch.zeros(layout.mask_bytes(), dtype=torch.uint8, device=self.device)
        size, k = layout.block_size, entries_per_block(density, layout.block_size)
        nbytes = offset_bytes(1, k, size)
        for i in range(0, layout.total_blocks, _ROWS):
            rows = min(_ROWS, layout.total_blocks - i)
            offsets = decode_offsets(received[i * nbytes :][: rows * nbytes], rows, k, size)
            bits[i * size // 8 :][: rows * size // 8] = reference.offsets_to_mask(offsets, size)
        return bits

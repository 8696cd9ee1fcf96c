"""The passes in plain PyTorch, tensor by tensor: what runs on a CPU."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.scape import reference
from kernels.scape.blocks import Mask, entries_per_block, offset_bytes
from kernels.scape.mask_code import decode_offsets, encode_offsets
from kernels.scape.passes import ScapePasses
from kernels.scape.step import PassInputs

# Blocks that are selected or coded at a time; bounds the temporaries.
_ROWS = 4096


class TorchPasses(ScapePasses):
    """`ScapePasses` on `kernels.scape.reference`. What is public besides is for `torch_updates`,
    which makes them."""

    def bind(self, step: PassInputs) -> None:
        super().bind(step)
        self.gradients = [g.float() for g in step.gradients]
        # Positions are kept where they are few; while the mask is nearly dense they are made again.
        self.indices = cache(self._find) if self.compact else self._find
        if self.compact:
            self.payloads: list[Tensor] = self.split(self.payload)
        else:
            self.payloads = [g[:n] for g, n in zip(self.gradients, self.counts, strict=True)]
        self._chosen = self._room_for_selection(step.next_density)

    def release(self) -> None:
        super().release()
        del self.payloads, self.indices

    def split(self, buffer: Tensor) -> list[Tensor]:
        """The stretch of each tensor in a buffer of the payload's shape."""
        return [buffer[start : start + n] for start, n in zip(self.payload_layout.positions, self.counts, strict=True)]

    def carry(self, tensor: int) -> None:
        """What rounding lost of the last payload enters the gradient."""
        if not (self.compact and self.carrying):
            return
        held, rates = self.bits(self.step.previous, tensor), self.step.rates[tensor]
        where = None if held is None else reference.mask_indices(held, self.sizes[tensor], self.counts[tensor])
        reference.carry_(self.gradients[tensor], where, self.wire_residual_of(tensor), rates.beta1, rates.scale)

    def selected(self) -> Tensor | None:
        if not self._chosen:
            return None
        received_selections, layout, density = self._chosen, self.layout, self.step.next_density
        if layout.sends_offsets(density, self.selection):
            size = layout.block_size
            received_selections = [
                torch.cat([encode_offsets(rows.long(), size) for rows in run.split(_ROWS)])
                for run in received_selections
            ]
        room = layout.wire_bytes(density, self.selection)
        return torch.cat([pad(run, (0, room - run.numel())) for run in received_selections])

    def pieces(self) -> list[Tensor]:
        return list(self.payloads)

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        previous.copy_(in_use)
        if received is not None:
            in_use.copy_(self._decode(received, density))

    def bits(self, mask: Mask, tensor: int) -> Tensor | None:
        """A tensor's packed bits; None for all ones."""
        return self.layout.bits(mask, tensor) if tensor < self.sparsified else None

    def _find(self, tensor: int) -> Tensor | None:
        bits = self.bits(self.step.in_use, tensor)
        return None if bits is None else reference.mask_indices(bits, self.sizes[tensor], self.counts[tensor])

    def _room_for_selection(self, density: float) -> list[Tensor]:
        """Zeros for what is selected, one tensor a run: int16 offsets (run_blocks, k), or uint8 bits."""
        layout = self.layout
        if density >= 1.0 or layout.total_blocks == 0:
            return []
        if layout.sends_offsets(density, self.selection):
            k = entries_per_block(density, layout.block_size)
            return [torch.zeros(layout.run_blocks, k, dtype=torch.int16, device=self.device) for _ in range(self.runs)]
        return [torch.zeros(layout.run_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.runs)]

    def select(self, tensor: int, common: Tensor | None = None) -> None:
        """Selects in the parts of a tensor's mt, which lies over the gradient, that are of this rank's run.

        common: FP32 (n,), what mt has besides, of a piece that lies in the run as a whole.
        """
        if tensor >= self.sparsified:
            return
        layout, size, density = self.layout, self.layout.block_size, self.step.next_density
        for run, chosen in enumerate(self._chosen):
            replica = self.first_run + run
            start, end = layout.owned(tensor, replica)
            if start == end:
                continue
            moment = self.gradients[tensor][start:end]
            own = self._without_new(moment if common is None else moment + common, tensor, start)
            first = layout.first_block[tensor] + start // size - replica * layout.run_blocks
            if self.selection == "tensor":
                bits = torch.zeros(-(-own.numel() // size) * size, dtype=torch.bool, device=self.device)
                bits[: own.numel()] = reference.select_largest(own, entries_per_block(density, own.numel()))
                packed = reference.pack_bits(bits)
                chosen[first * size // 8 :][: packed.numel()] = packed
                continue
            k = entries_per_block(density, size)
            for i, values in enumerate(own.split(_ROWS * size)):
                row, offsets = first + i * _ROWS, reference.select_blocks(values, k, size)
                if chosen.dtype == torch.int16:
                    chosen[row : row + offsets.shape[0]] = offsets
                else:
                    packed = reference.offsets_to_mask(offsets, size)
                    chosen[row * size // 8 :][: packed.numel()] = packed

    def _without_new(self, moment: Tensor, tensor: int, start: int) -> Tensor:
        if not self.skips_new:
            return moment
        used, held = (self.bits(mask, tensor) for mask in (self.step.in_use, self.step.previous))
        assert used is not None and held is not None
        spent = reference.unpack_bits((used & ~held)[start // 8 :], moment.numel())
        return torch.where(spent, 0.0, moment)

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

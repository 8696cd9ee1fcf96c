"""The passes in plain PyTorch, tensor by tensor: what runs on a CPU."""

from functools import cache

import torch
from torch import Tensor

from kernels import reference
from kernels.blocks import Mask, entries_per_block, offset_bytes
from kernels.passes import Rates, ScapePasses

# Blocks that are selected or decoded at a time; bounds the temporaries. A multiple of 8, so that packed
# offsets of that many blocks end on a byte.
_ROWS = 4096


class _Flat:
    """A tensor as FP32 (n,) to write to; `store` takes back what is no view of it.

    No master copy is kept: a BF16 parameter loses updates that are smaller than its rounding.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.flat = tensor.float().contiguous().view(-1)

    def store(self) -> None:
        if self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))


class TorchScape(ScapePasses):
    """`ScapePasses` on `kernels.reference`."""

    def bind(
        self, parameters: list[Tensor], gradients: list[Tensor], rates: list[Rates], in_use: Mask, previous: Mask
    ) -> None:
        super().bind(parameters, [g.float() for g in gradients], rates, in_use, previous)
        # Positions are kept where they are few; while the mask is nearly dense they are made again.
        self._indices = cache(self._find) if self.compact else self._find
        if self.compact:
            self._payloads, self._last = self.payload.split(self.counts), self.last.split(self.counts)
        else:
            self._payloads = tuple(g[:n] for g, n in zip(self.gradients, self.counts, strict=True))

    def pack(self, applied: Tensor, next_density: float) -> Tensor | None:
        for i, gradient in enumerate(self.gradients):
            rates = self.rates[i]
            reference.new_moment_(gradient, self.states[i], self._bits(self.previous, i), rates.beta1, rates.scale)
        own = self._select(next_density)
        for i, payload in enumerate(self._payloads):
            last = self._last[i] if self.compact else None
            indices, previous = self._indices(i), self._bits(self.previous, i)
            reference.pack_(self.gradients[i], self.states[i], indices, previous, payload, last, applied)
        return own

    def pieces(self) -> list[Tensor]:
        return list(self._payloads)

    def squares(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for i, payload in enumerate(self._payloads):
            reference.synchronised_gradient_(payload, self._last_moment(i), self.rates[i].beta1)
            if self.rates[i].counted:
                total += payload.square().sum()
        return total

    def update(self, clip: Tensor, clip_moment: bool, steps: Tensor, max_wait: float | None, applied: Tensor) -> None:
        for i, payload in enumerate(self._payloads):
            rates, parameter = self.rates[i], _Flat(self.parameters[i])
            reference.update_(
                parameter.flat,
                payload,
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
                max_wait=max_wait,
                applied=applied,
            )
            parameter.store()
        self.release()

    def release(self) -> None:
        super().release()
        self._payloads = ()
        self._indices = self._find

    def rotate(
        self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor, applied: Tensor
    ) -> None:
        previous.copy_(torch.where(applied, in_use, previous))
        if received is not None:
            in_use.copy_(torch.where(applied, self._decode(received, density), in_use))

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

    def _select(self, density: float) -> Tensor | None:
        if density >= 1.0 or self.layout.total_blocks == 0:
            return None
        select = self._select_blocks if self.selection == "block" else self._select_tensors
        return torch.cat([select(density, run) for run in range(self.first_run, self.first_run + self.runs)])

    def _owned_parts(self, replica: int) -> list[tuple[int, Tensor]]:
        """(first row in the replica's run, the owned part of mt) of every tensor that the run meets."""
        layout = self.layout
        parts = []
        for i in range(self.sparsified):
            start, end = layout.owned(i, replica)
            if end > start:
                row = layout.first_block[i] + start // layout.block_size - replica * layout.run_blocks
                parts.append((row, self.gradients[i][start:end]))
        return parts

    def _select_blocks(self, density: float, replica: int) -> Tensor:
        size, run_blocks = self.layout.block_size, self.layout.run_blocks
        k = entries_per_block(density, size)
        as_offsets = self.layout.sends_offsets(density, self.selection)
        offsets = torch.zeros(run_blocks if as_offsets else 0, k, dtype=torch.int16, device=self.device)
        bitmap = torch.zeros(0 if as_offsets else run_blocks * size // 8, dtype=torch.uint8, device=self.device)
        for first, part in self._owned_parts(replica):
            for i, values in enumerate(part.split(_ROWS * size)):
                row = first + i * _ROWS
                chosen = reference.select_blocks(values, k, size)
                if as_offsets:
                    offsets[row : row + chosen.shape[0]] = chosen
                else:
                    packed = reference.offsets_to_mask(chosen, size)
                    bitmap[row * size // 8 :][: packed.numel()] = packed
        if not as_offsets:
            return bitmap
        return torch.cat([reference.pack_offsets(rows.long(), size) for rows in offsets.split(_ROWS)])

    def _select_tensors(self, density: float, replica: int) -> Tensor:
        bits = torch.zeros(self.layout.run_blocks * self.layout.block_size, dtype=torch.bool, device=self.device)
        for row, part in self._owned_parts(replica):
            chosen = reference.select_largest(part, entries_per_block(density, part.numel()))
            bits.index_fill_(0, row * self.layout.block_size + chosen, True)
        return reference.pack_bits(bits)

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
    """Dense AdamS on `kernels.reference`."""

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
            flat, flat_moment = _Flat(parameter), _Flat(moment)
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

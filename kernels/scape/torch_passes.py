"""SCAPE passes in plain PyTorch, tensor by tensor: the CPU implementation, specified by `reference.py`."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.common.tensors import Flat, adams, decay_, gated, known_false
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import Mask, entries_per_block, offset_bytes
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.reference import VisitRates
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadChunk, ShardedUpdate

# Blocks that are selected or encoded at a time; limits the size of temporaries.
_ROWS = 4096


class TorchPasses(ScapePasses):
    """What the passes of both updates share."""

    def bind(self, step: PassInputs) -> None:
        super().bind(step)
        self.gradients, self.parameters = [g.view(-1) for g in step.gradients], step.parameters
        if self.owner is not None:
            self.gradients, self.parameters = self.owner.cut(self.gradients), self.owner.cut(self.parameters)
        self.gradients = [g.float() for g in self.gradients]
        # Positions are cached at the target density, and recomputed for denser masks, where they are many.
        self.indices = cache(self._positions) if self.compact else self._positions
        if self.compact:
            self.payloads: list[Tensor] = self.split(self.payload)
        else:
            self.payloads = [g[:n] for g, n in zip(self.gradients, self.counts, strict=True)]
        selection = self.allocate_selection(step.next_density)
        self._selections = () if selection is None else selection.chunk(self.runs)  # of every run

    def release(self) -> None:
        super().release()
        del self.payloads, self.indices, self.parameters

    def tensors_of(self, chunk: PayloadChunk, name: str) -> Iterator[int]:
        """Yield the tensors of a chunk, while their offloaded state is on the device for a pass."""
        for part in self.walk(chunk, name):
            yield from range(part.first, part.end)

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the slice of each tensor in a buffer of the payload's shape."""
        return [buffer[start : start + n] for start, n in zip(self.payload_layout.positions, self.counts, strict=True)]

    def pack(self, chunk: PayloadChunk) -> None:
        owner, step = self.owner, self.step
        moments = self.split(self.moment_on_mask) if self.compact and owner is None else None
        for i in self.tensors_of(chunk, "pack"):
            gradient, rates, held = self.gradients[i], step.rates[i], self.bits(step.previous, i)
            self.carry(i)
            if owner is not None and i >= self.sparsified:  # without a residual
                self.payloads[i].copy_(gradient.mul_((1.0 - rates.beta1) * rates.scale))
                continue
            reference.new_moment_(gradient, self.states[i], held, rates.beta1, rates.scale)
            common = owner.share_of(owner.common, i) if owner is not None and owner.owns(i) else None
            self.select(i, None if common is None else reference.retained(common, held, rates.beta1))
            last = None if moments is None else moments[i]
            reference.pack_(gradient, self.states[i], self.indices(i), held, self.payloads[i], last, step.applied)
            if common is not None:
                reference.keep_common_(common, held, self.bits(step.in_use, i), rates.beta1, step.applied)

    def carry(self, tensor: int) -> None:
        """Add the quantization error of the last payload to the gradient."""
        if not (self.compact and self.carrying):
            return
        held, rates = self.bits(self.step.previous, tensor), self.step.rates[tensor]
        indices = None if held is None else reference.mask_indices(held, self.sizes[tensor], self.counts[tensor])
        reference.carry_(self.gradients[tensor], indices, self.code_residual_of(tensor), rates.beta1, rates.scale)

    def selected(self) -> Tensor | None:
        if not self._selections:
            return None
        runs, layout, density = list(self._selections), self.layout, self.step.next_density
        if layout.sends_offsets(density, self.selection):
            size = layout.block_size
            runs = [
                torch.cat([reference.encode_offsets(rows.long(), size) for rows in run.split(_ROWS)]) for run in runs
            ]
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
        for tensor in range(len(self.tensors.sizes)):
            bits = self.tensors.entering(self.step.in_use, self.step.previous, tensor)
            visits.count(tensor, reference.unpack_bits(bits, self.tensors.sizes[tensor]))

    def moment_and_step(self, tensor: int, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new moment and the step of a tensor's entries in A, from gh in the payload and m of the last step.

        With the visit rates, the step of newly entered entries is multiplied by their staleness.
        """
        step, rates, indices = self.step, self.step.rates[tensor], self.indices(tensor)
        gradient, clipped = self.payloads[tensor], self.payloads[tensor] * step.clip
        bias_corrections = 1 - rates.beta1**step.steps, 1 - rates.beta2**step.steps
        moment, update = adams(last, clipped if step.clip_moment else gradient, clipped, rates, bias_corrections)
        held = self.bits(step.previous, tensor)
        if self.stale is not None and indices is not None and held is not None:
            whole, start, _ = self.slices[tensor]
            outside = self.tensors.sizes[whole] - self.tensors.nnz(whole, step.in_use.density, self.selection)
            relative = self.stale.of(self.stale.relative, whole)
            factor = reference.staleness(indices + start, outside, self.stale.fresh[whole], relative)
            fresh = reference.entering(indices, held, self.sizes[tensor])
            update, moment = reference.scaled(update, moment, fresh, factor)
        return moment, update * rates.lr

    def _positions(self, tensor: int) -> Tensor | None:
        bits = self.bits(self.step.in_use, tensor)
        return None if bits is None else reference.mask_indices(bits, self.sizes[tensor], self.counts[tensor])

    def select(self, tensor: int, common: Tensor | None = None) -> None:
        """Select entries of a tensor's mt, which replaced the gradient, in this rank's runs.

        common: FP32 (n,), common part of mt, for a slice that is entirely in the run.
        """
        if tensor >= self.sparsified:
            return
        layout, size, density = self.layout, self.layout.block_size, self.step.next_density
        for run, selection in enumerate(self._selections):
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
        bits = self.layout.entering(self.step.in_use, self.step.previous, tensor)
        return torch.where(reference.unpack_bits(bits[start // 8 :], moment.numel()), 0.0, moment)

    def _decode(self, received: Tensor, density: float) -> Tensor:
        layout, received = self.layout, self.received_selections(received, density)
        if not layout.sends_offsets(density, self.selection):
            return received
        bits = torch.zeros(layout.mask_bytes(), dtype=torch.uint8, device=self.device)
        size, k = layout.block_size, entries_per_block(density, layout.block_size)
        nbytes = offset_bytes(1, k, size)
        for i in range(0, layout.total_blocks, _ROWS):
            rows = min(_ROWS, layout.total_blocks - i)
            offsets = reference.decode_offsets(received[i * nbytes :][: rows * nbytes], rows, k, size)
            bits[i * size // 8 :][: rows * size // 8] = reference.offsets_to_mask(offsets, size)
        return bits


class TorchReplicated(TorchPasses):
    """Passes of the replicated update: every replica updates all entries."""

    def squares(self, chunk: PayloadChunk) -> None:
        sums: list[Tensor] = []
        for i in self.tensors_of(chunk, "squares"):
            payload = self.payloads[i]
            reference.synchronized_gradient_(payload, self._last_moment(i), self.step.rates[i].beta1)
            if self.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        self.partial_squares.append(sums)

    def update(self, chunk: PayloadChunk) -> None:
        self.begin_update(chunk)
        step = self.step
        for i in self.tensors_of(chunk, "update"):
            if known_false(step.applied):
                continue
            rates, indices = step.rates[i], self.indices(i)
            moment, update = self.moment_and_step(i, self._last_moment(i))
            if self.writes:
                parameter = Flat(self.parameters[i])
                decay_(parameter.flat, rates.lr * rates.weight_decay, step.applied)
                update = gated(step.applied, update, torch.zeros_like(update))
                if indices is None:
                    parameter.flat.sub_(update)
                else:
                    parameter.flat.scatter_(0, indices, parameter.flat.index_select(0, indices).sub_(update))
                parameter.store()
            reference.write_(self.states[i], indices, moment, step.applied)

    def _last_moment(self, tensor: int) -> Tensor:
        """Return m of the last step on A, from the buffer next to the payload or from the state."""
        if self.compact:
            start = self.payload_layout.positions[tensor]
            return self.moment_on_mask[start : start + self.counts[tensor]]
        state, indices = self.states[tensor], self.indices(tensor)
        return state if indices is None else state.index_select(0, indices)


class TorchSharded(TorchPasses):
    """Passes of the sharded update: each entry's owner updates it for all replicas."""

    owner: ShardedUpdate

    def squares(self, chunk: PayloadChunk) -> None:
        sums: list[Tensor] = []
        for i in self.owner.own:
            payload, (_, released) = self.payloads[i], self._last_of(i)
            reference.owned_gradient_(payload, released, self.step.rates[i].beta1)
            if self.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        self.partial_squares.append(sums)

    def update(self, chunk: PayloadChunk) -> None:
        self.begin_update(chunk)
        owner, step = self.owner, self.step
        for i in self.tensors_of(chunk, "update"):
            if not owner.owns(i) or known_false(step.applied):
                continue
            payload, indices = self.payloads[i], self.indices(i)
            moment, update = self.moment_and_step(i, self._last_of(i)[0])
            values = self._decayed(i, indices).sub_(update)
            if owner.scaled:
                reference.write_(owner.share_of(owner.master, i), indices, values, step.applied)
            reference.write_(owner.share_of(owner.common, i), indices, moment, step.applied)
            payload.copy_(values)
            if owner.scaled:
                payload.div_(owner.scales[i])

    def write(self, own_only: bool = False) -> None:
        owner, step = self.owner, self.step
        if known_false(step.applied) or not self.writes:
            return
        values = self.split(owner.value_buffer(self.payload)) if self.compact else self.payloads
        for i in owner.own if own_only else range(len(self.sizes)):
            rates, parameter = step.rates[i], Flat(self.parameters[i])
            if not owner.scaled:
                decay_(parameter.flat, rates.lr * rates.weight_decay, step.applied)
            reference.write_(parameter.flat, self.indices(i), values[i].float(), step.applied)
            parameter.store()

    def _last_of(self, piece: int) -> tuple[Tensor, Tensor]:
        """Return m of the last step and the common residual of a slice's entries in A; see `reference.owned_moment`."""
        owner = self.owner
        held = self.bits(self.step.previous, piece)
        return reference.owned_moment(owner.share_of(owner.common, piece), self.indices(piece), held)

    def _decayed(self, piece: int, indices: Tensor | None) -> Tensor:
        """Return the decayed parameters of a slice on A. Decays the whole master; `write` decays parameters."""
        step = self.step
        rate = step.rates[piece].lr * step.rates[piece].weight_decay
        if self.owner.scaled:
            master = self.owner.share_of(self.owner.master, piece)
            decay_(master, rate, step.applied)
            return master.clone() if indices is None else master.index_select(0, indices)
        parameter = Flat(self.parameters[piece]).flat
        values = parameter.clone() if indices is None else parameter.index_select(0, indices)
        decay_(values, rate, step.applied)
        return values

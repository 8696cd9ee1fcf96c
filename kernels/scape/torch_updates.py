"""PyTorch passes that depend on the updater; specified by `reference.py` and `reference_owner.py`."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.flat import Flat
from torchtitan_scape.kernels.common.gating import decay_, known_false
from torchtitan_scape.kernels.scape import reference, reference_owner
from torchtitan_scape.kernels.scape.step import PayloadChunk, PayloadPlan
from torchtitan_scape.kernels.scape.torch_passes import TorchPasses
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from torchtitan_scape.kernels.scape.visits import VisitRates


def torch_passes(
    updater: ReplicatedUpdate | ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any
) -> TorchPasses:
    """Return the passes of a step in PyTorch. Arguments are those of `ScapePasses`."""
    if isinstance(updater, ShardedUpdate):
        return TorchSharded(updater, plan, device, **options)
    return TorchReplicated(updater, plan, device, **options)


class TorchReplicated(TorchPasses):
    """Passes of `ReplicatedUpdate`: every replica updates all entries."""

    def pack_part(self, part: PayloadChunk) -> None:
        moments = self.split(self.moment_on_mask) if self.compact else None
        for i in range(part.first, part.end):
            gradient, state, rates = self.gradients[i], self.states[i], self.step.rates[i]
            held = self.bits(self.step.previous, i)
            self.carry(i)
            reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
            self.select(i)
            last = None if moments is None else moments[i]
            reference.pack_(gradient, state, self.indices(i), held, self.payloads[i], last, self.step.applied)

    def squares_of(self, part: PayloadChunk) -> list[Tensor]:
        sums: list[Tensor] = []
        for i in range(part.first, part.end):
            payload = self.payloads[i]
            reference.synchronized_gradient_(payload, self._last_moment(i), self.step.rates[i].beta1)
            if self.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        return sums

    def update_part(self, part: PayloadChunk) -> None:
        step = self.step
        for i in range(part.first, part.end):
            rates, parameter = step.rates[i], self._written(i)
            sparse = self.stale is not None and i < self.sparsified
            reference.update_(
                None if parameter is None else parameter.flat,
                self.payloads[i],
                self.states[i],
                self._last_moment(i) if self.compact else None,
                self.indices(i),
                self.bits(step.previous, i),
                lr=rates.lr,
                betas=(rates.beta1, rates.beta2),
                eps=rates.eps,
                weight_decay=rates.weight_decay,
                clip=step.clip,
                clip_moment=step.clip_moment,
                bias_corrections=(1 - rates.beta1**step.steps, 1 - rates.beta2**step.steps),
                applied=step.applied,
                max_staleness=self.max_staleness,
                relative=self.stale.of(self.stale.relative, i) if self.stale is not None and sparse else None,
                keeps=self.keeps,
            )
            if parameter is not None:
                parameter.store()

    def _written(self, tensor: int) -> Flat | None:
        if not self.updater.writes:
            return None
        return Flat(self.parameters[tensor], self.masters[tensor] if self.masters else None)

    def _last_moment(self, tensor: int) -> Tensor:
        """Return m of the last step on A, from the buffer next to the payload or from the state."""
        if self.compact:
            start = self.payload_layout.positions[tensor]
            return self.moment_on_mask[start : start + self.counts[tensor]]
        state, indices = self.states[tensor], self.indices(tensor)
        return state if indices is None else state.index_select(0, indices)


class TorchSharded(TorchPasses):
    """Passes of `ShardedUpdate`: each entry's owner updates it for all replicas."""

    updater: ShardedUpdate

    def pack_part(self, part: PayloadChunk) -> None:
        owner, step = self.updater, self.step
        for i in range(part.first, part.end):
            gradient, rates = self.gradients[i], step.rates[i]
            self.carry(i)
            if i >= self.sparsified:
                gradient.mul_((1.0 - rates.beta1) * rates.scale)
                self.payloads[i].copy_(gradient)
                continue
            state, held = self.states[i], self.bits(step.previous, i)
            reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
            if not owner.owns(i):  # a dry run selects in these slices too
                self.select(i)
                reference.pack_(gradient, state, self.indices(i), held, self.payloads[i], None, step.applied)
                continue
            common = owner.share_of(owner.common, i)
            self.select(i, reference_owner.common_part(common, held, rates.beta1))
            reference.pack_(gradient, state, self.indices(i), held, self.payloads[i], None, step.applied)
            reference_owner.keep_common_(common, held, self.bits(step.in_use, i), rates.beta1, step.applied)

    def squares_of(self, part: PayloadChunk) -> list[Tensor]:
        sums: list[Tensor] = []
        for i in self.updater.own:
            payload, (_, released) = self.payloads[i], self._last_of(i)
            reference_owner.synchronized_gradient_(payload, released, self.step.rates[i].beta1)
            if self.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        return sums

    def update_part(self, part: PayloadChunk) -> None:
        owner, step = self.updater, self.step
        if known_false(step.applied):
            return
        for i in (i for i in owner.own if i in part):
            payload, rates, indices = self.payloads[i], step.rates[i], self.indices(i)
            corrections = (1 - rates.beta1**step.steps, 1 - rates.beta2**step.steps)
            last, _ = self._last_of(i)
            betas = rates.beta1, rates.beta2
            moment, update = reference.adams(payload, last, betas, rates.eps, step.clip, step.clip_moment, corrections)
            held = self.bits(step.previous, i)
            if self.stale is not None and indices is not None and held is not None:
                fresh = reference.entering(indices, held, self.sizes[i])
                factor = self._staleness(i, indices, self.stale)
                update, moment = reference.scaled(update, moment, fresh, factor, self.keeps)
            values = self._decayed(i, indices).sub_(update * rates.lr)
            if self.masters:
                reference_owner.write_(self.masters[i], indices, values, step.applied)
            reference_owner.write_(owner.share_of(owner.common, i), indices, moment, step.applied)
            payload.copy_(values)
            if owner.scales.numel():
                payload.div_(owner.scales[i])
            if owner.sends_changes:
                copy = Flat(self.parameters[i]).flat
                payload.sub_(reference_owner.decayed_copy(copy, indices, rates.lr * rates.weight_decay))

    def write(self, own_only: bool = False) -> None:
        owner, step = self.updater, self.step
        if known_false(step.applied) or not owner.writes:
            return
        values = self.split(owner.value_buffer(self.payload)) if self.compact else self.payloads
        for i in owner.own if own_only else range(len(self.sizes)):
            rates, parameter, indices, new = step.rates[i], Flat(self.parameters[i]), self.indices(i), values[i].float()
            rate = rates.lr * rates.weight_decay
            if owner.sends_changes:
                new = new + reference_owner.decayed_copy(parameter.flat, indices, rate)
            if not owner.scales.numel():
                decay_(parameter.flat, rate, step.applied)
            reference_owner.write_(parameter.flat, indices, new, step.applied)
            parameter.store()

    def _last_of(self, piece: int) -> tuple[Tensor, Tensor]:
        """Return m of the last step and the common residual of a slice's entries in A; see `reference_owner`."""
        owner = self.updater
        held = self.bits(self.step.previous, piece)
        return reference_owner.last_moment(owner.share_of(owner.common, piece), self.indices(piece), held)

    def _decayed(self, piece: int, indices: Tensor | None) -> Tensor:
        """Return the decayed parameters of a slice on A. Decays the whole master; `write` decays parameters."""
        step = self.step
        rate = step.rates[piece].lr * step.rates[piece].weight_decay
        if self.masters:
            master = self.masters[piece]
            decay_(master, rate, step.applied)
            return master.clone() if indices is None else master.index_select(0, indices)
        parameter = Flat(self.parameters[piece]).flat
        values = parameter.clone() if indices is None else parameter.index_select(0, indices)
        decay_(values, rate, step.applied)
        return values

    def _staleness(self, piece: int, indices: Tensor, visits: VisitRates) -> Tensor:
        own, tensors = self.updater.ownership.sparse[piece], self.updater.tensors
        outside = tensors.sizes[own.tensor] - tensors.nnz(own.tensor, self.step.in_use.density, self.selection)
        fresh = self.entering(own.tensor).sum()
        relative = visits.of(visits.relative, own.tensor)
        return reference.staleness(indices + own.start, outside, fresh, self.max_staleness, relative)

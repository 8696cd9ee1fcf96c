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
    passes = TorchPasses(updater, plan, device, **options)
    passes.updates = TorchOwner(passes, updater) if isinstance(updater, ShardedUpdate) else TorchReplicated(passes)
    return passes


class TorchReplicated:
    """Passes of `ReplicatedUpdate`: every replica updates all entries."""

    leaves_state = False

    def __init__(self, passes: TorchPasses) -> None:
        self._passes = passes

    def pack(self, part: PayloadChunk) -> None:
        p = self._passes
        moments = p.split(p.moment_on_mask) if p.compact else None
        for i in range(part.first, part.end):
            gradient, state, rates = p.gradients[i], p.states[i], p.step.rates[i]
            held = p.bits(p.step.previous, i)
            p.carry(i)
            reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
            p.select(i)
            last = None if moments is None else moments[i]
            reference.pack_(gradient, state, p.indices(i), held, p.payloads[i], last, p.step.applied)

    def squares(self, part: PayloadChunk) -> list[Tensor]:
        p, sums = self._passes, []
        for i in range(part.first, part.end):
            payload = p.payloads[i]
            reference.synchronised_gradient_(payload, self._last_moment(i), p.step.rates[i].beta1)
            if p.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        return sums

    def update(self, part: PayloadChunk) -> None:
        p, step = self._passes, self._passes.step
        for i in range(part.first, part.end):
            rates, parameter = step.rates[i], self._written(i)
            sparse = p.stale is not None and i < p.sparsified
            reference.update_(
                None if parameter is None else parameter.flat,
                p.payloads[i],
                p.states[i],
                self._last_moment(i) if p.compact else None,
                p.indices(i),
                p.bits(step.previous, i),
                lr=rates.lr,
                betas=(rates.beta1, rates.beta2),
                eps=rates.eps,
                weight_decay=rates.weight_decay,
                clip=step.clip,
                clip_moment=step.clip_moment,
                bias_corrections=(1 - rates.beta1**step.steps, 1 - rates.beta2**step.steps),
                applied=step.applied,
                max_staleness=p.max_staleness,
                relative=p.stale.of(p.stale.relative, i) if p.stale is not None and sparse else None,
                keeps=p.keeps,
            )
            if parameter is not None:
                parameter.store()

    def store_moments(self) -> None:
        """Do nothing: the state contains the moments."""

    def write(self, own_only: bool) -> None:
        """Do nothing: `update` wrote all parameters."""

    def count_entering(self, visits: VisitRates) -> None:
        p = self._passes
        for i in range(p.sparsified):
            indices, held = p.indices(i), p.bits(p.step.previous, i)
            assert indices is not None and held is not None
            reference.count_entering_(indices, held, *visits.of(visits.counts, i))

    def _written(self, tensor: int) -> Flat | None:
        p = self._passes
        if not p.updater.writes:
            return None
        return Flat(p.step.parameters[tensor], p.masters[tensor] if p.masters else None)

    def _last_moment(self, tensor: int) -> Tensor:
        """Return m of the last step on A, from the buffer next to the payload or from the state."""
        p = self._passes
        if p.compact:
            start = p.payload_layout.positions[tensor]
            return p.moment_on_mask[start : start + p.counts[tensor]]
        state, indices = p.states[tensor], p.indices(tensor)
        return state if indices is None else state.index_select(0, indices)


class TorchOwner:
    """Passes of `ShardedUpdate`: each entry's owner updates it for all replicas."""

    leaves_state = False

    def __init__(self, passes: TorchPasses, owner: ShardedUpdate) -> None:
        self._passes, self._owner = passes, owner

    def pack(self, part: PayloadChunk) -> None:
        p, owner, step = self._passes, self._owner, self._passes.step
        for i in range(part.first, part.end):
            gradient, rates = p.gradients[i], step.rates[i]
            p.carry(i)
            if i >= p.sparsified:
                gradient.mul_((1.0 - rates.beta1) * rates.scale)
                p.payloads[i].copy_(gradient)
                continue
            state, held = p.states[i], p.bits(step.previous, i)
            reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
            if not owner.owns(i):  # a dry run selects in these slices too
                p.select(i)
                reference.pack_(gradient, state, p.indices(i), held, p.payloads[i], None, step.applied)
                continue
            common = owner.share_of(owner.common, i)
            p.select(i, reference_owner.common_part(common, held, rates.beta1))
            reference.pack_(gradient, state, p.indices(i), held, p.payloads[i], None, step.applied)
            reference_owner.keep_common_(common, held, p.bits(step.in_use, i), rates.beta1, step.applied)

    def squares(self, part: PayloadChunk) -> list[Tensor]:
        p, sums = self._passes, []
        for i in self._owner.own:
            payload, (_, released) = p.payloads[i], self._last_of(i)
            reference_owner.synchronised_gradient_(payload, released, p.step.rates[i].beta1)
            if p.step.rates[i].counted:
                sums.append(payload.square().sum().view(1))
        return sums

    def update(self, part: PayloadChunk) -> None:
        p, owner, step = self._passes, self._owner, self._passes.step
        if known_false(step.applied):
            return
        for i in (i for i in owner.own if i in part):
            payload, rates, indices = p.payloads[i], step.rates[i], p.indices(i)
            corrections = (1 - rates.beta1**step.steps, 1 - rates.beta2**step.steps)
            last, _ = self._last_of(i)
            betas = rates.beta1, rates.beta2
            moment, update = reference.adams(payload, last, betas, rates.eps, step.clip, step.clip_moment, corrections)
            held = p.bits(step.previous, i)
            if p.stale is not None and indices is not None and held is not None:
                fresh = reference.entering(indices, held, p.sizes[i])
                factor = self._staleness(i, indices, p.stale)
                update, moment = reference.scaled(update, moment, fresh, factor, p.keeps)
            values = self._decayed(i, indices).sub_(update * rates.lr)
            if p.masters:
                reference_owner.write_(p.masters[i], indices, values, step.applied)
            reference_owner.write_(owner.share_of(owner.common, i), indices, moment, step.applied)
            payload.copy_(values)
            if owner.scales.numel():
                payload.div_(owner.scales[i])
            if owner.sends_changes:
                copy = Flat(step.parameters[i]).flat
                payload.sub_(reference_owner.decayed_copy(copy, indices, rates.lr * rates.weight_decay))

    def store_moments(self) -> None:
        """Do nothing: the state contains the moments."""

    def write(self, own_only: bool) -> None:
        p, owner, step = self._passes, self._owner, self._passes.step
        if known_false(step.applied) or not owner.writes:
            return
        values = p.split(owner.value_buffer(p.payload)) if p.compact else p.payloads
        for i in owner.own if own_only else range(len(p.sizes)):
            rates, parameter, indices, new = step.rates[i], Flat(step.parameters[i]), p.indices(i), values[i].float()
            rate = rates.lr * rates.weight_decay
            if owner.sends_changes:
                new = new + reference_owner.decayed_copy(parameter.flat, indices, rate)
            if not owner.scales.numel():
                decay_(parameter.flat, rate, step.applied)
            reference_owner.write_(parameter.flat, indices, new, step.applied)
            parameter.store()

    def count_entering(self, visits: VisitRates) -> None:
        for tensor in range(len(self._owner.tensors.sizes)):
            rows, columns = visits.of(visits.counts, tensor)
            fresh = self._entering(tensor).view(rows.numel(), columns.numel())
            rows.copy_(fresh.sum(1))
            columns.copy_(fresh.sum(0))

    def _last_of(self, piece: int) -> tuple[Tensor, Tensor]:
        """Return m of the last step and the common residual of a slice's entries in A; see `reference_owner`."""
        p, owner = self._passes, self._owner
        held = p.bits(p.step.previous, piece)
        return reference_owner.last_moment(owner.share_of(owner.common, piece), p.indices(piece), held)

    def _decayed(self, piece: int, indices: Tensor | None) -> Tensor:
        """Return the decayed parameters of a slice on A. Decays the whole master; `write` decays parameters."""
        p, step = self._passes, self._passes.step
        rate = step.rates[piece].lr * step.rates[piece].weight_decay
        if p.masters:
            master = p.masters[piece]
            decay_(master, rate, step.applied)
            return master.clone() if indices is None else master.index_select(0, indices)
        parameter = Flat(step.parameters[piece]).flat
        values = parameter.clone() if indices is None else parameter.index_select(0, indices)
        decay_(values, rate, step.applied)
        return values

    def _staleness(self, piece: int, indices: Tensor, visits: VisitRates) -> Tensor:
        p, own, tensors = self._passes, self._owner.ownership.sparse[piece], self._owner.tensors
        outside = tensors.sizes[own.tensor] - tensors.nnz(own.tensor, p.step.in_use.density, p.selection)
        fresh = self._entering(own.tensor).sum()
        relative = visits.of(visits.relative, own.tensor)
        return reference.staleness(indices + own.start, outside, fresh, p.max_staleness, relative)

    def _entering(self, tensor: int) -> Tensor:
        """Return bool (n,) of a whole sparsified tensor: true for the entries in A and not in P."""
        step, tensors = self._passes.step, self._owner.tensors
        used, held = (tensors.bits(mask, tensor) for mask in (step.in_use, step.previous))
        assert used is not None and held is not None
        return reference.unpack_bits(used & ~held, tensors.sizes[tensor])

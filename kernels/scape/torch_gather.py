"""The passes of the sharded form of SCAPE in plain PyTorch; `reference_gather.py` says what they do."""

from torch import Tensor

from kernels.scape import reference, reference_gather
from kernels.scape.gather_passes import GatherPasses
from kernels.scape.passes import Part, Rates
from kernels.scape.torch_passes import Flat, TorchScape
from kernels.scape.visits import VisitRates


class TorchGather(GatherPasses, TorchScape):
    """`GatherPasses` on `kernels.scape.reference_gather`."""

    def _pack_tensors(self, part: Part, applied: Tensor) -> None:
        errors = self._split(self.wire_residual) if self.compact and self.carrying else None
        for i in range(part.first, part.end):
            gradient, rates = self.gradients[i], self.rates[i]
            if errors is not None:
                self._carry(i, errors[i])
            if i >= self.sparsified:
                gradient.mul_((1.0 - rates.beta1) * rates.scale)
                self._payloads[i].copy_(gradient)
                continue
            state, held, indices = self.states[i], self._bits(self.previous, i), self._indices(i)
            reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
            self._select(i)
            reference.pack_(gradient, state, indices, held, self._payloads[i], None, applied)
            if self.owns(i):
                used = self._bits(self.in_use, i)
                reference_gather.keep_common_(self.share_of(self.common, i), held, used, rates.beta1, applied)

    def _squares_of(self, part: Part) -> list[Tensor]:
        sums = []
        for i in self.own:
            payload, (_, released) = self._payloads[i], self._last_of(i)
            reference_gather.synchronised_gradient_(payload, released, self.rates[i].beta1)
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
        if reference.known_false(applied):
            return
        for i in (i for i in self.own if i in part):
            payload, rates, indices = self._payloads[i], self.rates[i], self._indices(i)
            corrections = (1 - rates.beta1**steps, 1 - rates.beta2**steps)
            last, _ = self._last_of(i)
            moment, step = reference.adams(
                payload, last, (rates.beta1, rates.beta2), rates.eps, clip, clip_moment, corrections
            )
            held = self._bits(self.previous, i)
            if visits is not None and indices is not None and held is not None:
                fresh = reference.entering(indices, held, self.sizes[i])
                factor = self._staleness(i, indices, visits)
                step, moment = reference.scaled(step, moment, fresh, factor, self.keeps)
            values = self._decayed(i, rates, indices, applied).sub_(step * rates.lr)
            if self.masters:
                reference_gather.write_(self.masters[i], indices, values, applied)
            reference_gather.write_(self.share_of(self.common, i), indices, moment, applied)
            payload.copy_(values)

    def write(self, applied: Tensor, own_only: bool = False) -> None:
        if reference.known_false(applied):
            return
        values = self._split(self.wire) if self.compact else self._payloads
        for i in self.own if own_only else range(len(self.sizes)):
            rates, parameter = self.rates[i], Flat(self.parameters[i])
            if not self.scales.numel():
                reference.decay_(parameter.flat, rates.lr * rates.weight_decay, applied)
            reference_gather.write_(parameter.flat, self._indices(i), values[i].float(), applied)
            parameter.store()

    def count_entering(self, visits: VisitRates) -> None:
        for tensor in range(len(self.ownership.tensors.sizes)):
            rows, columns = visits.of(visits.counts, tensor)
            fresh = self._entering(tensor).view(rows.numel(), columns.numel())
            rows.copy_(fresh.sum(1))
            columns.copy_(fresh.sum(0))

    # ------------------------------------------------------------------------------------ internals

    def _sent(self, piece: int) -> Tensor:
        return self._payloads[piece]

    def _candidates(self, tensor: int, start: int, end: int) -> Tensor:
        if not self.owns(tensor):  # in a dry run
            return super()._candidates(tensor, start, end)
        carried = reference_gather.carried(
            self.share_of(self.common, tensor), self._bits(self.previous, tensor), self.rates[tensor].beta1
        )
        return self._without_new(self.gradients[tensor] + carried, tensor, start)

    def _last_of(self, piece: int) -> tuple[Tensor, Tensor]:
        """Of its entries in A: last step's m, and the common residual that is released."""
        common, held = self.share_of(self.common, piece), self._bits(self.previous, piece)
        return reference_gather.last_moment(common, self._indices(piece), held)

    def _decayed(self, piece: int, rates: Rates, indices: Tensor | None, applied: Tensor) -> Tensor:
        """The piece's parameters on A, decayed; the master is decayed everywhere, parameters are by `write`."""
        rate = rates.lr * rates.weight_decay
        if self.masters:
            master = self.masters[piece]
            reference.decay_(master, rate, applied)
            return master.clone() if indices is None else master.index_select(0, indices)
        parameter = Flat(self.parameters[piece]).flat
        values = parameter.clone() if indices is None else parameter.index_select(0, indices)
        reference.decay_(values, rate, applied)
        return values

    def _staleness(self, piece: int, indices: Tensor, visits: VisitRates) -> Tensor:
        own, tensors = self.ownership.sparse[piece], self.ownership.tensors
        outside = tensors.sizes[own.tensor] - tensors.nnz(own.tensor, self.in_use.density, self.selection)
        fresh = self._entering(own.tensor).sum()
        relative = visits.of(visits.relative, own.tensor)
        return reference.staleness(indices + own.start, outside, fresh, self.most_stale, relative)

    def _entering(self, tensor: int) -> Tensor:
        """bool (n,): what is in A and not in P, of a whole sparsified tensor."""
        tensors = self.ownership.tensors
        used, held = (tensors.bits(mask, tensor) for mask in (self.in_use, self.previous))
        assert used is not None and held is not None
        return reference.unpack_bits(used & ~held, tensors.sizes[tensor])

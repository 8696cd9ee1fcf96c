"""The passes of the sharded form of SCAPE ("gather") in plain PyTorch; `reference_gather.py` says what they do."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference, reference_gather
from kernels.blocks import Mask
from kernels.gather_passes import GatherPasses
from kernels.ownership import Piece
from kernels.passes import Part
from kernels.torch_passes import Flat, TorchScape


@dataclass
class _Owned:
    """One owned piece in a step; `payload` holds the mean of what was sent, then the gradient, then the values."""

    piece: Piece
    payload: Tensor
    common: Tensor
    indices: Tensor | None
    held: Tensor | None


class TorchGather(GatherPasses, TorchScape):
    """`GatherPasses` on `kernels.reference_gather`."""

    def _bind_payload(self) -> None:
        # Where compact the payload of a tensor that has several owners lies in several rows.
        self._payloads = [] if self.compact else [g[:n] for g, n in zip(self.gradients, self.counts, strict=True)]

    def pack(self, part: Part, applied: Tensor) -> None:
        errors = self._split(self.errors) if self.compact and self.carrying else None
        for i, (gradient, rates) in enumerate(zip(self.gradients, self.rates, strict=True)):
            if errors is not None:
                self._carry(i, errors[i])
            payload = gradient
            if i < self.sparsified:
                state, held, indices = self.states[i], self._bits(self.previous, i), self._indices(i)
                reference.new_moment_(gradient, state, held, rates.beta1, rates.scale)
                self._select(i)
                payload = gradient.new_empty(self.counts[i]) if self.compact else self._payloads[i]
                reference.pack_(gradient, state, indices, held, payload, None, applied)
            else:
                gradient.mul_((1.0 - rates.beta1) * rates.scale)
            if self.compact:
                for to, values in zip(self._split_at(self.payload, i), self._pieces_of(i, payload), strict=True):
                    to.copy_(values)
        for owned in self._owned():
            used = self._range(self.in_use, owned.piece)
            beta1 = self.rates[owned.piece.tensor].beta1
            reference_gather.keep_common_(owned.common, owned.held, used, beta1, applied)

    def squares(self, part: Part) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for owned in self._owned():
            rates = self.rates[owned.piece.tensor]
            _, released = reference_gather.last_moment(owned.common, owned.indices, owned.held)
            reference_gather.synchronised_gradient_(owned.payload, released, rates.beta1)
            if rates.counted:
                total += owned.payload.square().sum()
        return total

    def update(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        max_wait: float | None,
        applied: Tensor,
    ) -> None:
        visits = self.learn_visits(part, max_wait, applied)
        if reference.known_false(applied):
            return
        for owned in self._owned():
            piece, indices = owned.piece, owned.indices
            i, rates = piece.tensor, self.rates[piece.tensor]
            corrections = (1 - rates.beta1**steps, 1 - rates.beta2**steps)
            last, _ = reference_gather.last_moment(owned.common, indices, owned.held)
            moment, step = reference.adams(
                owned.payload, last, (rates.beta1, rates.beta2), rates.eps, clip, clip_moment, corrections
            )
            everywhere, held = self._indices(i), self._bits(self.previous, i)
            if max_wait is not None and everywhere is not None and held is not None:
                fresh = reference.entering(everywhere, held, self.sizes[i])
                relative = None if visits is None else visits.of(visits.relative, i)
                wait = reference.waiting_times(everywhere, fresh, self.sizes[i], max_wait, relative)
                own = slice(piece.first, piece.first + piece.count)
                step, moment = reference.scaled(step, moment, fresh[own], wait[own] if wait.ndim else wait, self.keeps)
            rate = rates.lr * rates.weight_decay
            if self.rounds_values:
                parameter = self.master[piece.at :][: piece.end - piece.start]
                reference.decay_(parameter, rate, applied)
                values = parameter if indices is None else parameter.index_select(0, indices)
            else:
                # `write` takes the decay of the rest.
                parameter = Flat(self.parameters[i]).flat[piece.start : piece.end]
                values = parameter.clone() if indices is None else parameter.index_select(0, indices)
                reference.decay_(values, rate, applied)
            owned.payload.copy_(values.sub_(step * rates.lr))
            if self.rounds_values:
                reference_gather.write_(parameter, indices, owned.payload, applied)
            reference_gather.write_(owned.common, indices, moment, applied)

    def write(self, applied: Tensor) -> None:
        if reference.known_false(applied):
            return
        wire = self.values()[0]
        for i, rates in enumerate(self.rates):
            values = torch.cat(self._split_at(wire, i)).float() if self.compact else self._payloads[i]
            parameter = Flat(self.parameters[i])
            reference.decay_(parameter.flat, rates.lr * rates.weight_decay, applied)
            reference_gather.write_(parameter.flat, self._indices(i), values, applied)
            parameter.store()

    # ------------------------------------------------------------------------------------ internals

    def _owned(self) -> Iterator[_Owned]:
        return map(self._own, self.own)

    def _own(self, piece: Piece) -> _Owned:
        of_tensor = slice(piece.first, piece.first + piece.count)
        if self.compact:
            payload = self.payload.view(self.layout.replicas, -1)[self.owner, piece.place :][: piece.count]
        else:
            payload = self._payloads[piece.tensor][of_tensor]
        indices = self._indices(piece.tensor)
        return _Owned(
            piece,
            payload,
            self.common[piece.at :][: piece.end - piece.start],
            None if indices is None else indices[of_tensor] - piece.start,
            self._range(self.previous, piece),
        )

    def _range(self, mask: Mask, piece: Piece) -> Tensor | None:
        """bool (n,): the mask on the piece; None for all ones."""
        bits = self._bits(mask, piece.tensor)
        return None if bits is None else reference.unpack_bits(bits[piece.start // 8 :], piece.end - piece.start)

    def _candidates(self, tensor: int, start: int, end: int) -> Tensor:
        for owner, piece in self.by_tensor(tensor):
            if owner == self.owner and piece.start == start:
                common, held = self.common[piece.at :][: end - start], self._range(self.previous, piece)
                full = self.gradients[tensor][start:end]
                full = full + reference_gather.carried(common, held, self.rates[tensor].beta1)
                return self._without_new(full, tensor, start)
        return super()._candidates(tensor, start, end)

    def _pieces_of(self, tensor: int, payload: Tensor) -> list[Tensor]:
        """Its payload by owner."""
        return list(payload.split([piece.count for _, piece in self.by_tensor(tensor)]))

    def _split_at(self, wire: Tensor, tensor: int) -> list[Tensor]:
        """Where its payload lies in (replicas * segment,), by owner."""
        rows = wire.view(self.layout.replicas, -1)
        return [rows[owner, piece.place :][: piece.count] for owner, piece in self.by_tensor(tensor)]

    def _split(self, buffer: Tensor) -> list[Tensor]:
        return [torch.cat(self._split_at(buffer, i)) for i in range(len(self.sizes))]

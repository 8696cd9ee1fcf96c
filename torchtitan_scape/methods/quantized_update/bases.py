"""Bases of equal variance, which the owner of a matrix computes and sends to the other replicas at times."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.quantized.whitening import MatrixBasis, WhiteningBases
from torchtitan_scape.topology.collectives import ReplicaCollectives


class SharedBases:
    """The bases of all matrices that a single replica updates.

    A basis changes on all replicas at once, to that of the second moments of its owner. Other replicas have neither
    these nor the inverse. The rest is as in `methods.quantized.whitening`.

    Args:
        shards: All parameters of this rank.
        owners: The owner of each matrix, by name.
        collectives: Communication with the other replicas.

    Attributes:
        whitening: The `WhiteningBases` of these matrices.
        start: Attempted steps before the first one that used these bases, int64 () on the host; -1 if not known yet.
        copies: Results of `encoded` in this step, by number of the shard.
    """

    def __init__(self, shards: Sequence[Shard], owners: Mapping[str, int], collectives: ReplicaCollectives) -> None:
        self._owners, self._collectives = owners, collectives
        owned = {name for name, owner in owners.items() if owner == collectives.replica}
        self.whitening = WhiteningBases.of(shards, interval=0, hidden=owners, owned=owned)
        self.start = torch.full((), -1, dtype=torch.int64, device="cpu")
        self.copies: dict[int, Tensor] = {}

    def encoded(self, gradients: Sequence[Tensor | None], numbers: Collection[int]) -> list[Any]:
        """Return the gradients, those of some shards as copies in their bases. A copy is made once in a step.

        Copies of other shards that exist take the place of their gradients, too: kernels on another stream may still
        read the table of addresses, which must not change for them.
        """
        found: list[Any] = list(gradients)
        for i, basis in zip(self.whitening.numbers, self.whitening.bases.values(), strict=True):
            if i in numbers and i not in self.copies:
                self.copies[i] = basis.encode(found[i]).reshape(-1)
            if i in self.copies:
                found[i] = self.copies[i]
            if i in numbers and found[i].is_cuda:  # a hook of the backward pass may have made it on another stream
                found[i].record_stream(torch.cuda.current_stream(found[i].device))
        return found

    def decode_own(self, gradients: Sequence[Tensor], numbers: Collection[int], applied: Tensor) -> None:
        """Replace the means of this replica's matrices by their values in the model's basis, and observe them.

        Args:
            numbers: The shards whose means are known.
        """
        for i, (name, basis) in zip(self.whitening.numbers, self.whitening.bases.items(), strict=True):
            if i in numbers and self._owners[name] == self._collectives.replica:
                basis.decode_and_observe_(gradients[i], applied)

    def number_of(self, step: int) -> int:
        """Return the number of an attempted step of the run among those that use these bases, from 1."""
        if self.start < 0:
            self.start.fill_(step - 1)
        return step - int(self.start)

    def reset(self) -> None:
        """Return to the state before a first step."""
        self.whitening.reset()
        self.start.fill_(-1)

    def states(self, name: str) -> list[State]:
        """Return the state of the bases; their start is stored under `name`."""
        start = {name: self.start}
        # Before the start was saved, all bases began with the first step of the run.
        return [
            self.whitening.state(),
            State("basis_start", start, False, "rebuild", by_parameter=False, if_absent=0.0),
        ]

    def decoded(self, name: str, values: Tensor) -> Tensor:
        """Return values of a parameter, (n,), in the model's basis."""
        basis = self.whitening.bases.get(name)
        return values if basis is None else basis.decode(values).reshape(-1)

    def counted(self, name: str) -> int:
        """Return how often this replica counts its residual of a parameter in a mean over replicas.

        It counts those of its own matrices for all replicas, and not those of others, whose inverses it would compute.
        """
        if name not in self.whitening.bases:
            return 1
        return self._collectives.replicas if self._owners[name] == self._collectives.replica else 0

    def change(self, residuals: Sequence[Tensor], applied: Tensor) -> None:
        """Change to the bases of the owners' second moments, and the residuals of all shards with them. Collective."""
        for i, (name, basis) in zip(self.whitening.numbers, self.whitening.bases.items(), strict=True):
            is_own, sides = self._owners[name] == self._collectives.replica, basis.whitened
            each = [(side.whitening() if is_own else side.forward).flatten() for side in sides]
            message = torch.cat(each)
            self._collectives.broadcast_from(message.view(torch.uint8), self._owners[name], "basis")
            parts = message.split([len(part) for part in each])
            forward = [part.view_as(side.forward) for part, side in zip(parts, sides, strict=True)]
            basis.change(forward, [residuals[i]], applied)

    def replicated(self, name: str) -> list[tuple[str | None, Tensor]]:
        """Return the tensors of a parameter that are bitwise equal on all replicas."""
        basis = self.whitening.bases.get(name)
        tensors = {} if basis is None else basis.tensors()
        return [(f"basis.{kind}", tensor) for kind, tensor in tensors.items() if kind.endswith("forward")]

    def declared(self) -> State:
        """Return the state of the bases with all tensors that checkpoints contain, without values."""
        meta = torch.device("meta")
        every = {name: MatrixBasis.of(basis.shape, meta) for name, basis in self.whitening.bases.items()}
        return WhiteningBases(0, every).state()

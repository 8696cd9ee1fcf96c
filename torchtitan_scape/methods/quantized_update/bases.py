"""Bases of equal variance, made of second moments that the owner of a matrix sends to the other replicas at times."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.quantized.options import has_basis
from torchtitan_scape.methods.quantized.whitening import MatrixBasis, Side

MOMENT_DTYPE = torch.bfloat16


class SharedBases:
    """The bases of all matrices that a single replica updates.

    A basis changes on all replicas at once, to that of the second moments of its owner, rounded to BF16. The rest is as
    in `methods.quantized.whitening`.

    Args:
        shards: All parameters of this rank.
        owners: The owner of each matrix, by number of its shard.
        collectives: Communication with the other replicas.
    """

    def __init__(self, shards: Sequence[Shard], owners: Mapping[int, int], collectives: ReplicaCollectives) -> None:
        self._owners, self._collectives = owners, collectives
        self._numbers = {shard.name: i for i, shard in enumerate(shards)}
        self.bases: dict[int, MatrixBasis] = {}  # by number of the shard
        for i in owners:
            shape = tuple(shards[i].local_shape)
            if has_basis(shards[i].name, shape):
                self.bases[i] = MatrixBasis.of((shape[0], shape[1]), shards[i].device)

    def encode(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients of these matrices, FP32 (n,), by their values in the bases."""
        for i, basis in self.bases.items():
            gradients[i].copy_(basis.encode(gradients[i]).view(-1))

    def decode_own(self, gradients: Sequence[Tensor], applied: Tensor) -> None:
        """Replace the means of this replica's matrices by their values in the model's basis, and observe them."""
        for i, basis in self.bases.items():
            if self._owners[i] == self._collectives.replica:
                gradient = basis.decode(gradients[i])
                basis.observe(gradient, applied)
                gradients[i].copy_(gradient.view(-1))

    def decoded(self, name: str, values: Tensor) -> Tensor:
        """Return values of a parameter, (n,), in the model's basis."""
        basis = self.bases.get(self._numbers[name])
        return values if basis is None else basis.decode(values).reshape(-1)

    def change(self, residuals: Sequence[Tensor], applied: Tensor) -> None:
        """Change to the bases of the owners' second moments, and the residuals of all shards with them. Collective."""
        self._receive_moments(applied)
        for i, basis in self.bases.items():
            basis.update([residuals[i]], applied)

    def _receive_moments(self, applied: Tensor) -> None:
        """Replace all second moments by those of the owners, one triangle of each in BF16. Collective."""
        for i, side in self._sides():
            moment = _of(side)
            first, second = torch.triu_indices(*moment.shape, device=moment.device)
            message = moment[first, second].to(MOMENT_DTYPE)
            self._collectives.broadcast_from(message.view(torch.uint8), self._owners[i], "basis")
            received = torch.empty_like(moment)
            received[first, second] = received[second, first] = message.float()
            masked_copy_(moment, received, applied)

    def _sides(self) -> list[tuple[int, Side]]:
        """Return (number of the shard, side) of all sides with second moments."""
        sides = [(i, side) for i, basis in self.bases.items() for side in (basis.left, basis.right)]
        return [(i, side) for i, side in sides if side.moment is not None]

    def gather(self) -> None:
        """Distribute the second moments of the owners, as they are. Collective."""
        for i, side in self._sides():
            self._collectives.broadcast_from(_of(side), self._owners[i])

    def reset(self) -> None:
        """Return to the state at the start of a run."""
        for basis in self.bases.values():
            basis.reset()

    def replicated(self, name: str) -> list[tuple[str | None, Tensor]]:
        """Return the tensors of a parameter that are bitwise equal on all replicas."""
        basis = self.bases.get(self._numbers[name])
        tensors = {} if basis is None else basis.tensors()
        return [(f"basis.{kind}", tensor) for kind, tensor in tensors.items() if not kind.endswith("moment")]

    def state(self) -> State:
        """Return all tensors but the rotations, which follow from the shapes."""
        names = {number: name for name, number in self._numbers.items()}
        named = ((names[i], basis.tensors()) for i, basis in self.bases.items())
        tensors = {f"{name}.{kind}": tensor for name, each in named for kind, tensor in each.items()}
        return State("basis", tensors, per_replica=False, on_migration="rebuild", by_parameter=False)


def _of(side: Side) -> Tensor:
    assert side.moment is not None
    return side.moment

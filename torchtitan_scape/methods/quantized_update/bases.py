"""Bases in which the entries of a matrix's gradient have about equal variance and fewer outliers.

A code of few bits makes an error of about equal size in every entry of a block. The singular values of a gradient
differ widely, and Muon moves all singular directions by the same distance: the error covers the weak ones.
In a basis that divides every direction by its root mean square, the error is smallest where the gradient is. The second
moments are those of Shampoo (Gupta et al., arXiv:1802.09568), made of synchronized gradients. Only the owner of a
matrix has these: it computes the basis and sends it to all replicas.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.common.tensors import record_streams
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.quantized_update.options import (
    ITERATIONS,
    ROTATED_TOGETHER,
    WHITENED_TOGETHER,
    has_basis,
    largest_divisor,
    whitened_sides,
)
from torchtitan_scape.topology.collectives import ReplicaCollectives

DECAY = 0.95  # of the second moments, per synchronized gradient
FIRST_UPDATES = (10, 20, 40, 80, 160)  # steps after which the bases change, besides the multiples of `whiten_every`
FLOOR = 1e-3  # added to the eigenvalues, relative to the norm of the second moments


@dataclass
class Side:
    """One side of a matrix: y = forward x along an axis of d entries, for b of them in turn.

    Attributes:
        forward: Whole numbers, int8 (d / b, b, b): a basis may be coarse, as its inverse is exact. The same FP32 (b, b)
            for all, if the side is rotated only.
        backward: FP32, the inverse of `forward`; None if this replica computes it when it needs it.
        moment: FP32 (d / b, b, b), average of the gradient's products with itself along the other axis; None for a side
            that is rotated only, or if another replica computes `forward`.
    """

    forward: Tensor
    backward: Tensor | None
    moment: Tensor | None = None

    @classmethod
    def of(cls, size: int, whitened: bool, device: torch.device, owned: bool = True) -> "Side":
        if not whitened:
            rotation = cosine_rotation(size, device)
            return cls(rotation, rotation.T)
        width = largest_divisor(size, WHITENED_TOGETHER)
        rotation = rotated(torch.eye(width, dtype=torch.float32, device=device))
        forward = whole_numbers(rotation.repeat(size // width, 1, 1))
        if not owned:
            return cls(forward, None)
        return cls(forward, inverse(forward), torch.zeros_like(forward, dtype=torch.float32))

    @property
    def whitened(self) -> bool:
        """Whether the second moments determine it."""
        return self.forward.ndim == 3

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; a rotation is made anew."""
        tensors = {"forward": self.forward, "backward": self.backward, "moment": self.moment} if self.whitened else {}
        return {kind: tensor for kind, tensor in tensors.items() if tensor is not None}

    def encode(self, values: Tensor) -> Tensor:
        """Return FP32 (d, n) in the basis."""
        return _times(self.forward.float(), values)

    def decode(self, values: Tensor) -> Tensor:
        """Return FP32 (d, n) of values in the basis."""
        return _times(inverse(self.forward) if self.backward is None else self.backward, values)

    def observe(self, gradient: Tensor, applied: Tensor) -> None:
        """Average the second moments with those of a new gradient, (d, n)."""
        if self.moment is not None:
            blocks = gradient.reshape(len(self.moment), -1, gradient.shape[1])
            products = blocks @ blocks.mT
            masked_copy_(self.moment, self.moment.lerp(products, 1.0 - DECAY), applied & products.isfinite().all())

    def whitening(self) -> Tensor:
        """Return `forward` for the present second moments; the present one if they are too large."""
        assert self.moment is not None
        root = rotated(inverse_root(self.moment))
        return torch.where(root.isfinite().all(), whole_numbers(root), self.forward)

    def change(self, forward: Tensor, applied: Tensor) -> None:
        """Set the basis."""
        masked_copy_(self.forward, forward, applied)
        if self.backward is not None:
            masked_copy_(self.backward, inverse(forward), applied)


@dataclass
class MatrixBasis:
    """The basis of one matrix (a, b): y = left.forward x right.forward^T."""

    shape: tuple[int, int]
    left: Side
    right: Side

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device, owned: bool = True) -> "MatrixBasis":
        sides = (Side.of(n, on, device, owned) for n, on in zip(shape, whitened_sides(shape), strict=True))
        return cls(shape, *sides)

    @property
    def whitened(self) -> list[Side]:
        """The sides that second moments determine."""
        return [side for side in (self.left, self.right) if side.whitened]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of both sides by name, for example "left.moment"."""
        sides = (("left", self.left), ("right", self.right))
        return {f"{name}.{kind}": tensor for name, side in sides for kind, tensor in side.tensors().items()}

    def reset(self) -> None:
        """Return to the state at the start of a run."""
        owned = any(side.moment is not None for side in self.whitened)
        start = MatrixBasis.of(self.shape, self.left.forward.device, owned).tensors()
        for name, tensor in self.tensors().items():
            tensor.copy_(start[name])

    def encode(self, matrix: Tensor) -> Tensor:
        """Return a gradient (n,) or (a, b) in the basis."""
        with tf32_products(matrix.device):
            return self.right.encode(self.left.encode(matrix.view(self.shape)).T).T

    def decode(self, matrix: Tensor) -> Tensor:
        """Return the gradient (a, b) of (n,) or (a, b) in the basis."""
        with tf32_products(matrix.device):
            return self.right.decode(self.left.decode(matrix.view(self.shape)).T).T

    def observe(self, gradient: Tensor, applied: Tensor) -> None:
        """Average the second moments with those of a synchronized gradient (a, b)."""
        with tf32_products(gradient.device):
            self.left.observe(gradient, applied)
            self.right.observe(gradient.T, applied)

    def change(self, forward: Sequence[Tensor], residual: Tensor, applied: Tensor) -> None:
        """Change to the bases `forward` of the whitened sides, and a residual (n,) or (a, b) with them."""
        gradient = self.decode(residual.float())
        for side, new in zip(self.whitened, forward, strict=True):
            side.change(new, applied)
        masked_copy_(residual.view(self.shape), self.encode(gradient), applied)


class WhiteningBases:
    """The bases of the matrices that Muon updates, by the name of the parameter.

    A shard of a matrix, as FSDP2 makes it, is treated as a matrix. Its owner has the second moments and the inverse of
    the basis, and sends the basis to the others. All replicas change a basis in the same step.

    Args:
        shards: All parameters of this rank.
        owners: The replica that owns each parameter of Muon, by name.
        collectives: Communication with the other replicas.
        every: Steps between changes of the bases, besides those of `FIRST_UPDATES`.

    Attributes:
        bases: By the name of the parameter.
        numbers: Positions of these parameters among the shards.
        copies: Results of `encoded` in this step, by number of the shard.
        start: Attempted steps before the first one that used these bases, int64 () on the host; -1 if not known yet.
    """

    def __init__(
        self, shards: Sequence[Shard], owners: Mapping[str, int], collectives: ReplicaCollectives, every: int
    ) -> None:
        self._collectives, self._owners, self._every, self._first = collectives, owners, every, shards[0].name
        self.start = torch.full((), -1, dtype=torch.int64, device="cpu")
        self.bases: dict[str, MatrixBasis] = {}
        self.numbers: list[int] = []
        self.copies: dict[int, Tensor] = {}
        for i, shard in enumerate(shards):
            shape = tuple(shard.local_shape)
            if shard.name in owners and has_basis(shape):
                self.bases[shard.name] = MatrixBasis.of((shape[0], shape[1]), shard.device, self._owns(shard.name))
                self.numbers.append(i)

    def _owns(self, name: str) -> bool:
        return self._owners[name] == self._collectives.replica

    def _numbered(self) -> Iterator[tuple[int, str, MatrixBasis]]:
        return ((i, *item) for i, item in zip(self.numbers, self.bases.items(), strict=True))

    def is_due(self, step: int) -> bool:
        """Return whether the bases change before an attempted step of the run, from 1, if it is applied."""
        if self.start < 0:
            self.start.fill_(step - 1)
        done = step - 1 - int(self.start)
        return done > 0 and (done % self._every == 0 or (done in FIRST_UPDATES and done < self._every))

    def change(self, residuals: Mapping[str, Tensor], applied: Tensor) -> None:
        """Change to the bases of the present second moments. Collective.

        Args:
            residuals: By name, in the bases; changed in place.
            applied: Nothing changes unless it is True, bool ().
        """
        # First all own ones: behind a broadcast they would wait for other owners, one after the other.
        own = {
            name: [side.whitening() for side in basis.whitened]
            for name, basis in self.bases.items()
            if self._owns(name)
        }
        for name, basis in self.bases.items():
            sides = basis.whitened
            message = torch.cat([each.flatten() for each in own.pop(name, [side.forward for side in sides])])
            self._collectives.broadcast_from(message.view(torch.uint8), self._owners[name], "basis")
            parts = message.split([side.forward.numel() for side in sides])
            forward = [part.view_as(side.forward) for part, side in zip(parts, sides, strict=True)]
            basis.change(forward, residuals[name], applied)

    def encode(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients of these parameters, FP32, (n,) or (a, b), by their values in the bases."""
        for i, _, basis in self._numbered():
            gradients[i].view(basis.shape).copy_(basis.encode(gradients[i]))

    def encoded(self, gradients: Sequence[Tensor | None], numbers: Collection[int]) -> list[Any]:
        """Return the gradients, those of some shards as copies in their bases. A copy is made once in a step.

        Copies of other shards that exist take the place of their gradients, too: kernels on another stream may still
        read the table of addresses, which must not change for them.
        """
        values: list[Any] = list(gradients)
        for i, _, basis in self._numbered():
            if i in numbers and i not in self.copies:
                self.copies[i] = basis.encode(values[i]).reshape(-1)
            if i in self.copies:
                values[i] = self.copies[i]
            if i in numbers:
                record_streams(values[i])
        return values

    def decode_and_observe(self, gradients: Sequence[Tensor], applied: Tensor, numbers: Collection[int]) -> None:
        """Replace synchronized gradients of own matrices by their values in the model's own basis, and observe them.

        Args:
            numbers: The shards whose gradients are synchronized.
        """
        for i, name, basis in self._numbered():
            if self._owns(name) and i in numbers:
                decoded = basis.decode(gradients[i])
                basis.observe(decoded, applied)
                gradients[i].view(basis.shape).copy_(decoded)

    def decoded(self, name: str, values: Tensor) -> Tensor:
        """Return values of a parameter, (n,), in the model's own basis."""
        basis = self.bases.get(name)
        return values if basis is None else basis.decode(values).reshape(-1)

    def counted(self, name: str) -> int:
        """Return how often this replica counts its residual of a parameter in a sum over the replicas.

        The owner of a matrix counts its own for all replicas, because the others would have to compute the inverse.
        """
        if name not in self.bases:
            return 1
        return self._collectives.replicas if self._owns(name) else 0

    def reset(self) -> None:
        """Return to the state at the start of a run."""
        for basis in self.bases.values():
            basis.reset()
        self.start.fill_(-1)

    def states(self, declared: bool = False) -> list[State]:
        """Return all tensors but the rotations, which follow from the shapes, and the start of the bases.

        declared: With the tensors of all owners, as checkpoints contain them, without values.
        """
        bases = self.bases
        if declared:
            bases = {name: MatrixBasis.of(basis.shape, torch.device("meta")) for name, basis in bases.items()}
        tensors = {f"{name}.{kind}": t for name, basis in bases.items() for kind, t in basis.tensors().items()}
        start = {self._first: self.start}
        return [
            State("basis", tensors, per_replica=False, on_migration="rebuild", by_parameter=False),
            State("basis_start", start, per_replica=False, on_migration="rebuild", by_parameter=False),
        ]

    def replicated(self, name: str) -> list[tuple[str | None, Tensor]]:
        """Return the tensors of a parameter that are bitwise equal on all replicas."""
        tensors = self.bases[name].tensors() if name in self.bases else {}
        return [(f"basis.{kind}", tensor) for kind, tensor in tensors.items() if kind.endswith("forward")]


def saved_decoders(reader: Any, shards: Sequence[Shard]) -> dict[str, Callable[[Tensor], Tensor]] | None:
    """Read the bases of a checkpoint. Collective.

    Args:
        reader: A `methods.imported.CheckpointReader`.
        shards: All parameters of this rank.

    Returns:
        By parameter, a function of pending gradients (n,), FP32, that returns them without the basis. Parameters
        without a basis are missing. None if the bases are those of other shards.
    """
    rank = str(reader.model_rank)
    saved = reader.shapes_by_shard("basis.")
    with_a_basis = {name.removeprefix("basis.").rsplit(".", 2)[0] for name in saved}
    bases: dict[str, MatrixBasis] = {}
    wanted: dict[str, Tensor] = {}
    readable = reader.saved.get("shard") == reader.model_ranks
    for shard in (shard for shard in shards if shard.name in with_a_basis and len(shard.local_shape) == 2):
        rows, columns = shard.local_shape
        basis = bases[shard.name] = MatrixBasis.of((rows, columns), torch.device("cpu"), owned=False)
        for name, size, side in zip(("left", "right"), basis.shape, (basis.left, basis.right), strict=True):
            if side.whitened:
                key = f"basis.{shard.name}.{name}.backward"
                shape = saved.get(key, {}).get(rank, (0, 0))
                readable = readable and shape[-2] == shape[-1] and math.prod(shape) == size * shape[-1] > 0
                wanted[f"{key}.{rank}"] = side.backward = torch.empty(shape, dtype=torch.float32, device="cpu")
    if not reader.all_agree(readable):
        return None
    reader.fill(wanted)
    return {name: functools.partial(_decode_saved, basis) for name, basis in bases.items()}


def _decode_saved(basis: MatrixBasis, values: Tensor) -> Tensor:
    for side in (basis.left, basis.right):
        assert side.backward is not None
        side.backward = side.backward.to(values.device)
    return basis.decode(values).reshape(-1)


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Compute products of FP32 matrices in TF32 on an NVIDIA GPU: nominally seven times as fast as FP32 on an H100.

    The rounding of the factors to 11 significant bits is small next to the error of a code of one to four bits. AMD's
    MI250X does not have this format.
    """
    if device.type != "cuda":
        yield
        return
    products = torch.backends.cuda.matmul
    kept = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = kept


def _times(matrix: Tensor, values: Tensor) -> Tensor:
    """Multiply FP32 (d, n) by (b, b), for each b entries in turn, or by (d / b, b, b)."""
    return (matrix @ values.reshape(-1, matrix.shape[-1], values.shape[1])).reshape(values.shape)


def inverse(matrices: Tensor) -> Tensor:
    """Return the inverse matrices in FP32, of (k, b, b)."""
    return torch.linalg.inv_ex(matrices.float()).inverse


def whole_numbers(matrices: Tensor) -> Tensor:
    """Return FP32 matrices as int8, times a factor that makes the largest entry 127."""
    return (matrices * (127.0 / matrices.abs().amax())).round().to(torch.int8)


def rotated(matrices: Tensor) -> Tensor:
    """Multiply FP32 (..., b, b) from the left by the rotation of b entries."""
    rotation = cosine_rotation(matrices.shape[-1], matrices.device)
    return (rotation @ matrices.unflatten(-2, (-1, len(rotation)))).flatten(-3, -2)


@functools.cache
def cosine_rotation(size: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix that mixes neighboring entries: a cosine transform after random signs, FP32 (b, b).

    b is the largest divisor of `size` up to `ROTATED_TOGETHER`. It is computed in FP64 and equal on all machines.
    """
    width = largest_divisor(size, ROTATED_TOGETHER)
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width), device="cpu").double() * 2 - 1
    k = torch.arange(width, dtype=torch.float64, device="cpu")
    rotation = torch.cos(math.pi / width * torch.outer(k, k + 0.5)) * math.sqrt(2.0 / width)
    rotation[0] *= math.sqrt(0.5)
    return (rotation * signs).float().to(device)


def inverse_root(moment: Tensor) -> Tensor:
    """Return the inverse square root of a block-diagonal matrix with non-negative eigenvalues, up to a factor.

    The matrix is divided by its norm, and `FLOOR` is added to its eigenvalues. The coupled Newton-Schulz iteration
    (Higham, "Functions of Matrices", 2008, equation 6.35) consists of matrix products; the smallest eigenvalue of
    root times inverse grows by up to 2.25 in each, from `FLOOR` to 1.

    Args:
        moment: The blocks of the diagonal, (k, b, b).
    """
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    largest = moment.abs().amax()  # the norm squares the entries, and small ones would become zero
    scaled = torch.where(largest > 1e-30, moment / largest.clamp(min=1e-30), 0.0)
    root = (scaled / scaled.norm().clamp(min=1.0) + FLOOR * identity) / (1.0 + FLOOR)
    inverted = identity.expand_as(root)
    for _ in range(ITERATIONS):
        correction = 1.5 * identity - 0.5 * inverted @ root
        root, inverted = root @ correction, correction @ inverted
    return inverted

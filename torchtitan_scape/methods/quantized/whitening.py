"""Bases in which the entries of a matrix's gradient have about equal variance and fewer outliers.

A code of few bits makes an error of about equal size in every entry of a block. The singular values of a gradient
differ widely, and Muon moves all singular directions by the same distance: the error covers the weak ones.
In a basis that divides every direction by its root mean square, the error is smallest where the gradient is. The second
moments are those of Shampoo (Gupta et al., arXiv:1802.09568); they are made of synchronized gradients, which all
replicas have, so that no basis is sent.
"""

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.quantized.options import (
    ITERATIONS,
    ROTATED_TOGETHER,
    WHITENED_TOGETHER,
    has_basis,
    largest_divisor,
    whitened_sides,
)

DECAY = 0.95  # of the second moments, per synchronized gradient
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
        found = {"forward": self.forward, "backward": self.backward, "moment": self.moment} if self.whitened else {}
        return {kind: tensor for kind, tensor in found.items() if tensor is not None}

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
        found = rotated(inverse_root(self.moment))
        return torch.where(found.isfinite().all(), whole_numbers(found), self.forward)

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

    def decode_and_observe_(self, gradient: Tensor, applied: Tensor) -> None:
        """Replace a synchronized gradient (n,) or (a, b) in the basis by its values without it, and observe it."""
        decoded = self.decode(gradient)
        self.observe(decoded, applied)
        gradient.view(self.shape).copy_(decoded)

    def change(self, forward: Sequence[Tensor], pending: Sequence[Tensor], applied: Tensor) -> None:
        """Change to the bases `forward` of the whitened sides, and pending errors (n,) or (a, b) with them."""
        gradients = [self.decode(error.float()) for error in pending]
        for side, new in zip(self.whitened, forward, strict=True):
            side.change(new, applied)
        for error, gradient in zip(pending, gradients, strict=True):
            masked_copy_(error.view(self.shape), self.encode(gradient), applied)


@dataclass
class WhiteningBases:
    """The bases of the matrices that Muon updates, by the name of the parameter.

    A shard of a matrix, as FSDP2 makes it, is treated as a matrix.

    Attributes:
        interval: Steps between two updates of the bases.
        numbers: Positions of these parameters among the shards.
    """

    interval: int
    bases: dict[str, MatrixBasis] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, shards: Sequence[Shard], interval: int, hidden: Collection[str], owned: Collection[str] | None = None
    ) -> "WhiteningBases":
        """Return bases of the matrices among the parameters `hidden`, which Muon updates or would update.

        Args:
            owned: The names of those whose second moments this replica has; all if None.
        """
        found = cls(interval)
        for i, shard in enumerate(shards):
            shape = tuple(shard.local_shape)
            if shard.name in hidden and has_basis(shape):
                mine = owned is None or shard.name in owned
                found.bases[shard.name] = MatrixBasis.of((shape[0], shape[1]), shard.device, mine)
                found.numbers.append(i)
        return found

    def begin(
        self, gradients: Sequence[Tensor], number: int, pending: Sequence[Mapping[str, Tensor]], applied: Tensor
    ) -> None:
        """Replace the gradients of step `number` by their values in the bases, after an update if one is due.

        Args:
            gradients: FP32, (n,) or (a, b) per shard, changed in place.
            pending: Errors by name, in the bases; changed in place.
        """
        if number > 1 and (number - 1) % self.interval == 0:
            for name, basis in self.bases.items():
                forward = [side.whitening() for side in basis.whitened]
                basis.change(forward, [errors[name] for errors in pending if errors], applied)
        self.encode(gradients)

    def encode(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients of these parameters, FP32, (n,) or (a, b), by their values in the bases."""
        for i, basis in zip(self.numbers, self.bases.values(), strict=True):
            gradients[i].view(basis.shape).copy_(basis.encode(gradients[i]))

    def finish(self, gradients: Sequence[Tensor], applied: Tensor) -> None:
        """Replace the synchronized gradients by their values in the model's own basis."""
        for i, basis in zip(self.numbers, self.bases.values(), strict=True):
            basis.decode_and_observe_(gradients[i], applied)

    def reset(self) -> None:
        """Return to the state at the start of a run."""
        for basis in self.bases.values():
            basis.reset()

    def state(self, names: Collection[str] | None = None) -> State:
        """Return all tensors but the rotations, which follow from the shapes; those of `names` only, if given."""
        chosen = {name: basis for name, basis in self.bases.items() if names is None or name in names}
        tensors = {f"{name}.{kind}": t for name, basis in chosen.items() for kind, t in basis.tensors().items()}
        return State("basis", tensors, per_replica=False, on_migration="rebuild", by_parameter=False)


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
    found = identity.expand_as(root)
    for _ in range(ITERATIONS):
        correction = 1.5 * identity - 0.5 * found @ root
        root, found = root @ correction, correction @ found
    return found

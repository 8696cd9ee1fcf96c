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
from torchtitan_scape.methods.quantized.options import ITERATIONS, ROTATED_TOGETHER, has_basis, whitened_sides

DECAY = 0.95  # of the second moments, per synchronized gradient
FLOOR = 1e-3  # added to the eigenvalues, relative to the norm of the second moments


@dataclass
class Side:
    """One side of a matrix: y = forward x, and x = backward y, along an axis of d entries.

    Attributes:
        forward, backward: FP32, inverse to each other: (d, d), or (b, b) for each b entries in turn.
        moment: FP32 (d, d), average of the gradient's products with itself along the other axis; None for a side that
            is rotated only.
    """

    forward: Tensor
    backward: Tensor
    moment: Tensor | None = None

    @classmethod
    def of(cls, size: int, whitened: bool, device: torch.device) -> "Side":
        rotation = cosine_rotation(size, device)
        if not whitened:
            return cls(rotation, rotation.T)
        whole = torch.block_diag(*[rotation] * (size // len(rotation)))
        return cls(whole, whole.T.contiguous(), torch.zeros(size, size, dtype=torch.float32, device=device))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; a rotation is made anew."""
        if self.moment is None:
            return {}
        return {"forward": self.forward, "backward": self.backward, "moment": self.moment}

    def observe(self, products: Tensor, applied: Tensor) -> None:
        """Average the second moments with those of a new gradient, (d, d)."""
        assert self.moment is not None
        masked_copy_(self.moment, self.moment.lerp(products, 1.0 - DECAY), applied & products.isfinite().all())

    def whitening(self) -> tuple[Tensor, Tensor]:
        """Return `forward` and `backward` for the present second moments."""
        assert self.moment is not None
        root, inverse = roots(self.moment)
        rotation = cosine_rotation(len(root), root.device)
        return along(rotation, inverse, 0), along(rotation, root, 1)


@dataclass
class MatrixBasis:
    """The basis of one matrix (a, b): y = left.forward x right.forward^T."""

    shape: tuple[int, int]
    left: Side
    right: Side

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device) -> "MatrixBasis":
        left, right = (Side.of(n, on, device) for n, on in zip(shape, whitened_sides(shape), strict=True))
        return cls(shape, left, right)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of both sides by name, for example "left.moment"."""
        sides = (("left", self.left), ("right", self.right))
        return {f"{name}.{kind}": tensor for name, side in sides for kind, tensor in side.tensors().items()}

    def reset(self) -> None:
        """Return to the state at the start of a run."""
        start = MatrixBasis.of(self.shape, self.left.forward.device).tensors()
        for name, tensor in self.tensors().items():
            tensor.copy_(start[name])

    def encode(self, matrix: Tensor) -> Tensor:
        """Return a gradient (n,) or (a, b) in the basis."""
        with tf32_products(matrix.device):
            return along(self.right.forward, along(self.left.forward, matrix.view(self.shape), 0), 1)

    def decode(self, matrix: Tensor) -> Tensor:
        """Return the gradient (a, b) of (n,) or (a, b) in the basis."""
        with tf32_products(matrix.device):
            return along(self.right.backward, along(self.left.backward, matrix.view(self.shape), 0), 1)

    def observe(self, gradient: Tensor, applied: Tensor) -> None:
        """Average the second moments with those of a synchronized gradient (a, b)."""
        with tf32_products(gradient.device):
            if self.left.moment is not None:
                self.left.observe(gradient @ gradient.T, applied)
            if self.right.moment is not None:
                self.right.observe(gradient.T @ gradient, applied)

    def update(self, pending: Sequence[Tensor], applied: Tensor) -> None:
        """Change to the basis of the present second moments, and pending errors with it."""
        gradients = [self.decode(error) for error in pending]
        found = [(side, side.whitening()) for side in (self.left, self.right) if side.moment is not None]
        for value in (value for _, pair in found for value in pair):
            applied = applied & value.isfinite().all()
        for side, (forward, backward) in found:
            masked_copy_(side.forward, forward, applied)
            masked_copy_(side.backward, backward, applied)
        for error, gradient in zip(pending, gradients, strict=True):
            masked_copy_(error, self.encode(gradient), applied)


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
    def of(cls, shards: Sequence[Shard], interval: int, hidden: Collection[str]) -> "WhiteningBases":
        """Return bases of the matrices among the parameters `hidden`, which Muon updates or would update."""
        found = cls(interval)
        for i, shard in enumerate(shards):
            shape = tuple(shard.local_shape)
            if shard.name in hidden and has_basis(shape):
                found.bases[shard.name] = MatrixBasis.of((shape[0], shape[1]), shard.device)
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
                basis.update([errors[name] for errors in pending if errors], applied)
        self.encode(gradients)

    def encode(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients of these parameters, FP32, (n,) or (a, b), by their values in the bases."""
        for i, basis in zip(self.numbers, self.bases.values(), strict=True):
            gradients[i].copy_(basis.encode(gradients[i]).view_as(gradients[i]))

    def finish(self, gradients: Sequence[Tensor], applied: Tensor) -> None:
        """Replace the synchronized gradients by their values in the model's own basis."""
        for i, basis in zip(self.numbers, self.bases.values(), strict=True):
            gradient = basis.decode(gradients[i])
            basis.observe(gradient, applied)
            gradients[i].copy_(gradient.view_as(gradients[i]))

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


def along(matrix: Tensor, values: Tensor, axis: int) -> Tensor:
    """Multiply FP32 (a, b) by a matrix along an axis: by (d, d), or by (b, b) for each b entries in turn."""
    rows, columns = values.shape
    size = len(matrix)
    if axis == 0:
        return (matrix @ values.reshape(rows // size, size, columns)).view(rows, columns)
    return (values.reshape(-1, size) @ matrix.T).view(rows, columns)


@functools.cache
def cosine_rotation(size: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix that mixes neighbouring entries: a cosine transform after random signs, FP32 (b, b).

    b is the largest divisor of `size` up to `ROTATED_TOGETHER`. It is computed in FP64 and equal on all machines.
    """
    width = next(n for n in range(min(size, ROTATED_TOGETHER), 0, -1) if size % n == 0)
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width), device="cpu").double() * 2 - 1
    k = torch.arange(width, dtype=torch.float64, device="cpu")
    rotation = torch.cos(math.pi / width * torch.outer(k, k + 0.5)) * math.sqrt(2.0 / width)
    rotation[0] *= math.sqrt(0.5)
    return (rotation * signs).float().to(device)


def roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return square root and inverse square root of a matrix (d, d) with non-negative eigenvalues, up to a factor.

    The matrix is divided by its norm, and `FLOOR` is added to its eigenvalues. The coupled Newton-Schulz iteration
    (Higham, "Functions of Matrices", 2008, equation 6.35) consists of matrix products; the smallest eigenvalue of
    root times inverse grows by up to 2.25 in each, from `FLOOR` to 1. Root times inverse is the identity.
    """
    identity = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    largest = moment.abs().amax()  # the norm squares the entries, and small ones would become zero
    scaled = torch.where(largest > 1e-30, moment / largest.clamp(min=1e-30), 0.0)
    root = (scaled / scaled.norm().clamp(min=1.0) + FLOOR * identity) / (1.0 + FLOOR)
    inverse = identity
    for _ in range(ITERATIONS):
        correction = 1.5 * identity - 0.5 * inverse @ root
        root, inverse = root @ correction, correction @ inverse
    return root, inverse

"""Options of gradients in block codes of 1 to 8 bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shape
from torchtitan_scape.kernels.codec.formats import FORMATS, encoded_size
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall, all_reduce_stream
from torchtitan_scape.topology.ring_bytes import LevelSize

ITERATIONS = 14  # of the inverse root of second moments, see `whitening.roots`
ROTATED_TOGETHER = 256  # entries at most that the cosine transform mixes
WHITENED_TOGETHER = 3072  # entries at most that a matrix of second moments relates
BASIS_LAYOUT = {"whitened_together": WHITENED_TOGETHER}  # in a checkpoint's record; earlier bases were FP32 and whole
BASIS_BYTES = 1.0  # of an entry of a basis
OWNER_BYTES = 8.0  # of its second moment and of its inverse, FP32

Code = Literal["int8", "int4", "e2m1", "e3m0", "2bit", "1bit"]


@dataclass
class QuantizedOptions(MethodOptions):
    """[sync.quantized]: gradients in a code of 1 to 8 bits."""

    section: ClassVar[str] = "sync.quantized"
    main_options = ("code",)

    code: Code = "e2m1"
    """Encoding of the gradients on the outermost level, in both directions, with BF16 scales per block: 8-bit or 4-bit
    integers, 4-bit floats with a mantissa of one bit or none, or signs and one or two mean magnitudes"""

    block: int = 128
    """Entries that share a scale, a power of two from 32 to 1024; every parameter starts a new block"""

    error_feedback: bool = field(default=True, metadata=LAYOUT)
    """Keep the quantization error (FP32, 4 bytes per parameter) and add it to the next gradient; otherwise drop it"""

    whiten_every: int = field(default=0, metadata=LAYOUT)
    """Steps between updates of the bases in which the matrices of the blocks are encoded, made of the second moments of
    the synchronized gradients; 0 encodes the entries themselves. Measured with code = "2bit"; without overlap"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.block in (32, 64, 128, 256, 512, 1024), "block", "it must be a power of two from 32 to 1024")
        self.require(
            self.whiten_every >= 0, "whiten_every", "it must be 1 or more, or 0 to encode the entries themselves"
        )

    def layout(self) -> dict[str, Any]:
        """Return the options that determine the states. In a basis, errors of one code are not those of another."""
        return super().layout() | ({"code": self.code} | BASIS_LAYOUT if self.whiten_every else {})

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | (BASIS_LAYOUT if self.whiten_every else {})

    @property
    def fills_blocks(self) -> bool:
        """Return whether the scale is a mean magnitude, so that a short block is filled with its own entries."""
        return FORMATS[self.code].largest is None

    def keeps_owner_error(self, replicas: int) -> bool:
        """Return whether an owner stores the quantization error of its mean as a separate state.

        With few bits N times that error is so large that it would determine the scales of the owner's own message.
        """
        return self.error_feedback and self.fills_blocks and replicas > 1

    def needs_comm_streams(self) -> bool:
        return True

    def label(self) -> str:
        return super().label() + (" whitened" if self.whiten_every else "")

    def supports_overlap(self) -> bool:
        """Return whether chunks are independent: a basis needs whole matrices."""
        return not self.whiten_every

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        encoded = encoded_size(self.code, self.block)
        return [all_reduce_stream(model.sizes, levels, chunk_entries, self.block, encoded, in_place=True)]

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        kinds = {"residual": 4.0 * model.entries} if self.error_feedback else {}
        if self.keeps_owner_error(replicas):
            kinds["owner_error"] = 4.0 * model.entries
        if self.whiten_every and replicas > 1:
            kinds["bases"] = (BASIS_BYTES + OWNER_BYTES) * sum(
                map(basis_entries, filter(has_basis, model.hidden_shapes))
            )
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def matrix_flops(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        return basis_flops(self.whiten_every, model) if replicas > 1 else (0.0, 0.0)


def basis_flops(whiten_every: int, model: LocalModel, owned: float = 1.0, interval: int = 1) -> tuple[float, float]:
    """Return (products with bases, in and out, and second moments, in TF32; updates of the bases, in FP32).

    Args:
        whiten_every: Steps between updates of the bases; 0 for none.
        owned: Share of the matrices whose second moments this rank has.
        interval: Steps between synchronized gradients of a matrix.
    """
    products = updates = 0.0
    received = owned / interval
    for shape in filter(has_basis, model.hidden_shapes if whiten_every else ()):
        for side, whitened in zip(shape, whitened_sides(shape), strict=True):
            other = math.prod(shape) // side
            width = largest_divisor(side, WHITENED_TOGETHER if whitened else ROTATED_TOGETHER)
            products += (2.0 + (4.0 if whitened else 2.0) * received) * width * side * other
            if whitened:  # the inverse of the present basis or of the new one, and the root of an owned one
                updates += (2.0 + 6.0 * ITERATIONS * owned) * side * width**2 / whiten_every
    return products, updates


def has_basis(shape: Shape) -> bool:
    """Return whether a shard of one of Muon's parameters has a basis: a matrix, not a stack of matrices or a row.

    Without Muon, these parameters are those of its default rule. Embedding and output are not among them, because
    their rows differ by the frequency of a token.
    """
    return len(shape) == 2 and min(shape) > 1


def basis_entries(shape: Shape) -> int:
    """Return the entries of the bases of a matrix: `largest_divisor` of each whitened side for each of its entries."""
    sides = zip(shape, whitened_sides(shape), strict=True)
    return sum(n * largest_divisor(n, WHITENED_TOGETHER) for n, whitened in sides if whitened)


def largest_divisor(size: int, limit: int) -> int:
    """Return the largest divisor of a size up to a limit."""
    return next(n for n in range(min(size, limit), 0, -1) if size % n == 0)


def whitened_sides(shape: Shape) -> tuple[bool, bool]:
    """Return which sides of a matrix get a basis by its second moments: the shorter one, or both of a square matrix.

    The longer side is only rotated, because its second moments would need more memory than the matrix.
    """
    return shape[0] <= shape[1], shape[1] <= shape[0]

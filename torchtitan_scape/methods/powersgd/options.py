"""Options and cost of PowerSGD."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kernels.codec.formats import BLOCK
from topology.calls import CollectiveCall, padded_size
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shape, count_entries
from torchtitan_scape.methods.cost import GradientCost
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.wire import encoded_size


@dataclass
class PowersgdOptions(MethodOptions):
    """[sync.powersgd]: gradients as products of thin factors (PowerSGD)."""

    section: ClassVar[str] = "sync.powersgd"
    main_options = ("rank",)

    rank: int = field(default=4, metadata=LAYOUT)
    """Columns of the factors. A matrix is exchanged uncompressed if its two factors are not smaller than half of it"""

    start: int = -1
    """Number of dense steps at the start; -1 for a tenth of training.steps"""

    code: Literal["float32", "int8", "e2m1", "2bit"] = "float32"
    """Encoding of the factors on the outermost level, in both directions, with BF16 scales for every 128 entries: none,
    8-bit integers, 4-bit floats, or signs with two mean magnitudes"""

    warm_start: bool = True
    """Start each step from the factor of the previous step, otherwise from random numbers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rank >= 1, "rank", "it must be 1 or more")
        self.require(self.start >= -1, "start", "it must be 0 or more, or -1 for a tenth of training.steps")

    def label(self) -> str:
        return f"{self.method_name()} {self.rank:g}" + ("" if self.code == "float32" else f" {self.code}")

    def needs_comm_streams(self) -> bool:
        return self.code != "float32"

    def cost(self) -> "PowersgdCost":
        return PowersgdCost(self)


@dataclass(frozen=True)
class PowersgdCost(GradientCost):
    """Two all-reduces: one of all P and the parameters that are not factored, one of all Q.

    With a code there are three, because the parameters that are not factored are sent in FP32.
    """

    options: PowersgdOptions

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        if (encoded := encoded_size(self.options.code)) is None:
            whole, ps, qs = factor_entries(model.shapes, self.options.rank)
            return [CollectiveCall("all_reduce", padded_size(count, levels)) for count in (ps + whole, qs)]
        whole, ps, qs = factor_entries(model.shapes, self.options.rank, whole_blocks)
        factors = [CollectiveCall("all_reduce", padded_size(n, levels, BLOCK), encoded) for n in (ps, qs)]
        return [factors[0], CollectiveCall("all_reduce", padded_size(whole, levels)), factors[1]]

    def traffic_per_parameter(self) -> float:
        """Return the bytes per parameter: residual, two products, approximation and new residual.

        The products are small enough to be limited by memory. `scripts.benchmarks.step_operators` counts the figure.
        """
        return 56.0

    def residual_entries(self, model: LocalModel) -> int:
        return count_entries(model.matrices())


def factor_rank(shape: Shape, rank: int) -> int:
    """Return the columns of the factors of a shard; 0 if it is exchanged uncompressed."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    least = min(rows, columns, rank)
    return least if 2 * least * (rows + columns) < rows * columns else 0


def whole_blocks(entries: int) -> int:
    """Return the entries of a factor in a message with a code: a multiple of the block."""
    return -(-entries // BLOCK) * BLOCK


def factor_entries(shapes: Sequence[Shape], rank: int, sent: Callable[[int], int] = int) -> tuple[int, int, int]:
    """Return the entries of (the parameters that are not factored, all P, all Q).

    Args:
        sent: entries in the message of a factor with n entries.
    """
    whole = ps = qs = 0
    for shape in shapes:
        if least := factor_rank(shape, rank):
            ps += sent(least * shape[0])
            qs += sent(least * math.prod(shape[1:]))
        else:
            whole += math.prod(shape)
    return whole, ps, qs


def largest_rank(shapes: Sequence[Shape], nbytes: float) -> int:
    """Return the largest rank whose messages have at most `nbytes`; at least 1."""
    rank = 1
    while rank < 1024 and 4.0 * sum(factor_entries(shapes, rank + 1)) <= nbytes:
        rank += 1
    return rank

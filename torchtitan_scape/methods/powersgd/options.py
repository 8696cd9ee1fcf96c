"""Options of PowerSGD."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shape, count_entries
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, padded_size


@dataclass
class PowersgdOptions(MethodOptions):
    """[sync.powersgd]: gradients as products of thin factors (PowerSGD)."""

    section: ClassVar[str] = "sync.powersgd"
    main_options = ("rank",)

    rank: int = field(default=4, metadata=LAYOUT)
    """Columns of the factors. A matrix is exchanged uncompressed if its two factors are not smaller than half of it"""

    start: int = -1
    """Number of dense steps at the start; -1 for a tenth of training.steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rank >= 1, "rank", "it must be 1 or more")
        self.require(self.start >= -1, "start", "it must be 0 or more, or -1 for a tenth of training.steps")

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return two all-reduces: one of all P and the parameters that are not factored, one of all Q."""
        whole, ps, qs = factor_entries(model.shapes, self.rank)
        return [CollectiveCall("all_reduce", padded_size(count, levels)) for count in (ps + whole, qs)]

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return {"residual": 4.0 * count_entries(model.matrices())}


def factor_rank(shape: Shape, rank: int) -> int:
    """Return the columns of the factors of a shard; 0 if it is exchanged uncompressed."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    least = min(rows, columns, rank)
    return least if 2 * least * (rows + columns) < rows * columns else 0


def factor_entries(shapes: Sequence[Shape], rank: int) -> tuple[int, int, int]:
    """Return the entries of (the parameters that are not factored, all P, all Q)."""
    whole = ps = qs = 0
    for shape in shapes:
        if least := factor_rank(shape, rank):
            ps += least * shape[0]
            qs += least * math.prod(shape[1:])
        else:
            whole += math.prod(shape)
    return whole, ps, qs

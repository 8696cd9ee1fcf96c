"""Options and cost of TAGC between replicas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, count_entries
from torchtitan_scape.kernels.tagc.formats import BLOCK, bitmap_bytes, capacity, index_bytes, sends_offsets
from torchtitan_scape.methods.cost import GradientCost, all_reduce_chunked
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.ring_bytes import LevelSize


@dataclass
class TagcOptions(MethodOptions):
    """[sync.tagc]: gradients at the union of all top-k indices (TAGC)."""

    section: ClassVar[str] = "sync.tagc"
    main_options = ("density",)

    density: float = 0.1
    """Share of the entries that each replica selects, in (0, 1], in every block of 1024. All replicas send the union of
    their selections: with N replicas the buffer holds density x N of the entries, and a step sends more than dense
    training if density x N is 1 or more"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged uncompressed although they have two or more dimensions"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")

    def label(self) -> str:
        return f"{self.method_name()} {self.density:g}"

    def cost(self) -> "TagcCost":
        return TagcCost(self)


@dataclass(frozen=True)
class TagcCost(GradientCost):
    """The exchange of an index of the selected entries, then an all-reduce of the maximum size of their union."""

    options: TagcOptions

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        density, blocks = self.options.density, self.blocks(model)
        if density >= 1.0 or not blocks:
            return [all_reduce_chunked(model.entries, levels, chunk_entries)]
        replicas = math.prod(level.size for level in levels)
        if sends_offsets(density, replicas):
            index = CollectiveCall("all_gather", index_bytes(density, blocks))
        else:
            index = CollectiveCall("all_reduce", bitmap_bytes(blocks, replicas) // 4)
        whole = model.entries - self.residual_entries(model)
        packed = blocks * capacity(density, replicas)
        return [index, all_reduce_chunked(packed + whole, levels, chunk_entries)]

    def blocks(self, model: LocalModel) -> int:
        """Return the blocks of all parameters that are compressed."""
        return sum(-(-math.prod(shape) // BLOCK) for shape in model.matrices(self.options.dense_names))

    def memory_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the bytes per step.

        Per parameter 12 to add the residual, 4 to select, 8 to read and store the residual, 4 to write the mean, 1 for
        the bitmaps; per packed entry 4 to write it, 8 to divide and 4 to read.
        """
        packed = self.blocks(model) * capacity(self.options.density, replicas)
        return 0.0, 29.0 * model.entries + 16.0 * packed

    def residual_entries(self, model: LocalModel) -> int:
        return count_entries(model.matrices(self.options.dense_names))

    def message_memory(self, model: LocalModel, replicas: int) -> float:
        density = self.options.density
        packed = 0 if density >= 1.0 else self.blocks(model) * capacity(density, replicas)
        return super().message_memory(model, replicas) + 4.0 * packed

"""Options of TAGC between replicas."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel, count_entries
from torchtitan_scape.kernels.tagc.formats import BLOCK, bitmap_bytes, capacity, index_bytes, sends_offsets
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, all_reduce_chunked, replicas_of


@dataclass
class TagcOptions(MethodOptions):
    """[sync.tagc]: gradients at the union of all top-k indices (TAGC)."""

    section: ClassVar[str] = "sync.tagc"
    main_options = ("density",)

    density: float = 0.1
    """Share of the entries that each replica selects, in (0, 1], in every block of 1024. All replicas send the union of
    their selections: with N replicas the buffer holds density x N of the entries, and a step sends more than dense
    training if density x N is 1 or more"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return the exchange of an index of the selected entries, and an all-reduce of their union's maximum size."""
        density, compressed, replicas = self.density, model.matrices(), replicas_of(levels)
        blocks = sum(-(-math.prod(shape) // BLOCK) for shape in compressed)
        if density >= 1.0 or not blocks:
            return [all_reduce_chunked(model.entries, levels, chunk_entries)]
        if sends_offsets(density, replicas):
            index = CollectiveCall("all_gather", index_bytes(density, blocks))
        else:
            index = CollectiveCall("all_reduce", bitmap_bytes(blocks, replicas) // 4)
        sent = blocks * capacity(density, replicas) + model.entries - count_entries(compressed)
        return [index, all_reduce_chunked(sent, levels, chunk_entries)]

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return {"residual": 4.0 * count_entries(model.matrices())}

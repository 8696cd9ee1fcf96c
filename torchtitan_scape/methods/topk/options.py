"""Options of top-k gradients with error feedback."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shape, count_entries
from torchtitan_scape.kernels.topk.layout import MessageLayout, block_grid, selected_per_block
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, all_reduce_chunked


@dataclass
class TopkOptions(MethodOptions):
    """[sync.topk]: largest gradient entries of every replica."""

    section: ClassVar[str] = "sync.topk"
    main_options = ("density", "selection", "block_size", "code")

    density: float = 0.01
    """Share of the entries that each replica sends, in (0, 1]. Every replica receives the entries of all others: with N
    replicas a step sends less than dense training only if density x N is below 1.5"""

    density_warmup_steps: int = 0
    """Steps over which the density falls exponentially from 1 to its value. A step of the warm-up is dense if its
    messages would be larger than the dense gradients"""

    start: int = 0
    """Number of dense steps at the start"""

    selection: Literal["block", "tensor", "tile"] = field(default="block", metadata=LAYOUT)
    """Select the largest entries of every block (9 bits per offset at density 0.01 and blocks of 1024), of every tensor
    (32 bits), or of every 64 x 64 tile, with slices of 4096 entries for one-dimensional parameters (8 bits at 64 of
    4096)"""

    block_size: int = 1024
    """Entries per block, a multiple of 8 up to 32768"""

    code: Literal["float32", "2bit"] = "float32"
    """Encoding of the values: FP32, or two bits per value that select one of four means of the tensor. The quantization
    error is added to the residual"""

    decay: float = 1.0
    """Factor on the residual in every step, in (0, 1]; below 1, part of the gradient is never applied"""

    divisor: Literal["replicas", "senders"] = "replicas"
    """Divide sums by the number of replicas, or by the number of replicas that sent the entry"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.01")
        self.require(self.density_warmup_steps >= 0, "density_warmup_steps", "it must be 0 (none) or more")
        self.require(self.start >= 0, "start", "it must be 0 or more")
        whole_bytes = self.block_size % 8 == 0 and 8 <= self.block_size <= 32768
        self.require(whole_bytes, "block_size", "it must be a multiple of 8 from 8 to 32768")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def compressed(self, model: LocalModel) -> list[Shape]:
        """Return the shapes of the parameters that are compressed."""
        return list(model.shapes) if self.selection == "tile" else model.matrices()

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return one all-gather of values and offsets, and one all-reduce of the uncompressed parameters."""
        shapes = [shape for shape in self.compressed(model) if math.prod(shape)]
        if self.density >= 1.0 or not shapes:
            return [all_reduce_chunked(model.entries, levels, chunk_entries)]
        grids = [block_grid(shape, self.selection, self.block_size) for shape in shapes]
        nbytes = MessageLayout(grids, selected_per_block(grids, self.density), self.code).nbytes
        whole = model.entries - count_entries(shapes)
        return [CollectiveCall("all_gather", nbytes), all_reduce_chunked(whole, levels, chunk_entries)]

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return {"residual": 4.0 * count_entries(self.compressed(model))}

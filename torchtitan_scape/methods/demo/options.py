"""Options of DeMo."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.topk.layout import MessageLayout, divisor_grid
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels


@dataclass
class DemoOptions(MethodOptions):
    """[sync.demo]: largest cosine components of the momentum (DeMo)."""

    section: ClassVar[str] = "sync.demo"
    main_options = ("k", "chunk", "code")

    beta: float = 0.999
    """Decay of the momentum per step, in (0, 1]; the components that are sent are subtracted from it"""

    chunk: int = 64
    """Maximum side of the tiles of the cosine transform, from 1 to 256: the sides of a tile are the largest divisors of
    the matrix's sides up to this value; one-dimensional parameters are divided into slices of such a length"""

    k: int = 32
    """Components of the largest magnitude that each replica sends per tile; all if a tile has fewer"""

    code: Literal["float32", "sign"] = "float32"
    """Encoding of the components: FP32, or signs and one mean magnitude per tensor"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.beta <= 1.0, "beta", "it must lie in (0, 1], for example 0.999")
        self.require(1 <= self.chunk <= 256, "chunk", "it must be 1 to 256, for example 64")
        self.require(self.k >= 1, "k", "it must be 1 or more")

    @property
    def message_code(self) -> str:
        """The encoding by its name in `TopkMessages`."""
        return "1bit" if self.code == "sign" else self.code

    def label(self) -> str:
        code = "" if self.message_code == "float32" else f" {self.message_code}"
        return f"{self.method_name()} {self.k:g}{code}"

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return one all-gather of components and offsets of every tile."""
        grids = [divisor_grid(shape, self.chunk) for shape in model.shapes if math.prod(shape)]
        if not grids:
            return []
        selected = [min(self.k, grid.size) for grid in grids]
        return [CollectiveCall("all_gather", MessageLayout(grids, selected, self.message_code).nbytes)]

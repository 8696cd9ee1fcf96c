"""Options of SparseLoCo."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan_scape.methods.local_options import LocalOptions
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.topk.options import TopkOptions


@dataclass
class SparselocoOptions(LocalOptions):
    """[sync.sparseloco]: local steps, then the largest displacements."""

    section: ClassVar[str] = "sync.sparseloco"
    main_options = ("inner_steps", "density", "code")

    outer_lr: float = 1.0
    """Constant learning rate of the outer step, which updates the shared anchor by the mean of the sent entries"""

    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step, in [0, 1); 0 for none, because the residual has a similar effect"""

    density: float = 64 / 4096
    """Share of the entries that each replica sends, in (0, 1]: the largest of every 64 x 64 tile, or of every slice of
    4096 entries of one-dimensional parameters"""

    code: Literal["float32", "e2m1", "2bit"] = "2bit"
    """Encoding of the values: FP32, blocks of 128 with four bits per value, or two bits per value that select one of
    four means of the tensor. The quantization error is added to the residual"""

    decay: float = 0.95
    """Factor on the residual in every round, in (0, 1]"""

    divisor: Literal["replicas", "senders"] = "senders"
    """Divide sums by the number of replicas that sent the entry, as the published code does, or by the number of all
    replicas, as in the paper's equations; the outer step is then smaller by up to that factor"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.015625, 64 of 4096")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def averaging(self) -> MethodOptions:
        return TopkOptions(
            density=self.density, selection="tile", code=self.code, decay=self.decay, divisor=self.divisor
        )

    def label(self) -> str:
        return f"{self.method_name()} {self.inner_steps:g}" + ("" if self.code == "float32" else f" {self.code}")

"""SparseLoCo: replicas train alone for a while, then send the largest of what they moved, in two bits.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025), arXiv:2508.15706; a run of 72 B
parameters: arXiv:2603.08163.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.local_updates import FragmentSchedule, LocalOptions, LocalUpdates, OuterOptimizer
from torchtitan_scape.methods.topk.method import Topk, TopkOptions
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod


@dataclass
class SparselocoOptions(LocalOptions):
    """[sync.sparseloco]: read with method = "sparseloco"."""

    section: ClassVar[str] = "sync.sparseloco"

    outer_lr: float = 1.0
    """Constant rate at which the anchor, which replicas share, follows the mean of what they have sent"""

    outer_momentum: float = 0.0
    """Nesterov momentum of the anchor, in [0, 1); 0 for none: what is kept back does its work"""

    density: float = 64 / 4096
    """Share of the entries that each replica sends, in (0, 1]: the largest of every tile of 64 x 64, those of one
    dimension in runs of 4096"""

    values: Literal["float32", "e2m1", "2bit"] = "2bit"
    """How what is sent travels: in FP32, in blocks of 128 of four bits each, or in two bits by four means of each
    tensor. What the code loses is kept back, too"""

    decay: float = 0.95
    """What a round leaves of what was kept back before it, in (0, 1]"""

    divisor: Literal["replicas", "senders"] = "senders"
    """What sums are divided by: those that sent the entry, as the published code does it, or all replicas, as the
    paper's equations have it; the outer step is up to so many times shorter then"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.015625, 64 of 4096")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "sparseloco",
            self.density,
            values=self.values,
            selection="tile",
            inner_steps=self.inner_steps,
            outer_momentum=self.outer_momentum,
            offload=("anchor",) if self.host else (),
            optimizer=optimizer.lower(),
        )


class Sparseloco(LocalUpdates):
    """All parameters at once, every `inner_steps` steps: top-k of the displacements with error feedback.

    The codec is `Topk` by tiles: x_i = decay e_i + D_i; what is sent of it, decoded, leaves e_i.
    """

    def __init__(self, context: MethodContext, options: SparselocoOptions) -> None:
        sent = TopkOptions(
            density=options.density,
            selection="tile",
            values=options.values,
            decay=options.decay,
            divisor=options.divisor,
        )

        def codec(of: MethodContext) -> GradientMethod:
            return Topk(of, sent)

        schedule, outer = (
            FragmentSchedule(options.inner_steps),
            OuterOptimizer(options.outer_lr, options.outer_momentum),
        )
        super().__init__(context, options, schedule, outer, codec, options.host)

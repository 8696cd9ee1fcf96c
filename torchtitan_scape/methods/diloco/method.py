"""DiLoCo: replicas train alone for a while, then the anchor takes an outer step along the mean of what they moved.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), arXiv:2311.08105; the
defaults are of "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for DiLoCo"
(2025), arXiv:2503.09799.
"""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.local_updates import (
    Code,
    FragmentSchedule,
    LocalOptions,
    LocalUpdates,
    OuterOptimizer,
    averaged_by,
)
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod


@dataclass
class DilocoOptions(LocalOptions):
    """[sync.diloco]: read with method = "diloco"."""

    section: ClassVar[str] = "sync.diloco"

    code: Code = "float32"
    """How displacements travel: as they are, or in blocks of 128 that share a scale"""

    def needs_comm_streams(self) -> bool:
        return self.code != "float32"

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "diloco",
            wire=self.code,
            inner_steps=self.inner_steps,
            outer_momentum=self.outer_momentum,
            offload=("anchor",) if self.host else (),
            optimizer=optimizer.lower(),
        )


class Diloco(LocalUpdates):
    """All parameters at once, every `inner_steps` steps; replicas go on from the anchor."""

    def __init__(self, context: MethodContext, options: DilocoOptions) -> None:
        schedule, outer = (
            FragmentSchedule(options.inner_steps),
            OuterOptimizer(options.outer_lr, options.outer_momentum),
        )
        super().__init__(context, options, schedule, outer, averaged_by(options.code), options.host)

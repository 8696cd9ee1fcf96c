"""Streaming DiLoCo: DiLoCo in fragments, each of which is exchanged while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch" (2025),
arXiv:2501.18512.
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
class StreamingDilocoOptions(LocalOptions):
    """[sync.streaming_diloco]: read with method = "streaming_diloco"."""

    section: ClassVar[str] = "sync.streaming_diloco"

    inner_steps: int = 100
    """Steps of a round, in which every parameter is exchanged once"""

    outer_lr: float = 0.4
    """Constant rate at which the anchor, which replicas share, follows the mean of what they have moved since"""

    fragments: int = 5
    """Parts that are exchanged one after the other, evenly over a round: layers are dealt out to all but the first,
    which has what is no layer"""

    delay: int = 1
    """Steps from the start of an exchange to its use, which it has to arrive in; from 0 to inner_steps"""

    mix: float = 0.5
    """Share of a replica's own parameters that stays when an exchange arrives; the rest is the anchor's"""

    code: Code = "e2m1"
    """How displacements travel: as they are, or in blocks of 128 that share a scale"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.fragments >= 1, "fragments", "it must be 1 or more")
        self.require(
            0 <= self.delay <= self.inner_steps, "delay", f"it must lie in 0 .. inner_steps = {self.inner_steps}"
        )
        self.require(0.0 <= self.mix < 1.0, "mix", "it must lie in [0, 1)")

    def needs_comm_streams(self) -> bool:
        return self.code != "float32"

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "streaming_diloco",
            wire=self.code,
            inner_steps=self.inner_steps,
            fragments=self.fragments,
            delay=self.delay,
            outer_momentum=self.outer_momentum,
            offload=("anchor",) if self.host else (),
            optimizer=optimizer.lower(),
        )


class StreamingDiloco(LocalUpdates):
    """A fragment at a time; what arrives is mixed with what the replica has made of it meanwhile."""

    def __init__(self, context: MethodContext, options: StreamingDilocoOptions) -> None:
        schedule = FragmentSchedule(options.inner_steps, options.fragments, options.delay, options.mix)
        outer = OuterOptimizer(options.outer_lr, options.outer_momentum)
        super().__init__(context, options, schedule, outer, averaged_by(options.code), options.host)

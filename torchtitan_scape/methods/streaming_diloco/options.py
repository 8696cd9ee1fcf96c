"""Options and cost of Streaming DiLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.local_options import Code, FragmentSchedule, LocalOptions, whole_displacements
from torchtitan_scape.methods.options import MethodOptions


@dataclass
class StreamingDilocoOptions(LocalOptions):
    """[sync.streaming_diloco]: read with method = "streaming_diloco"."""

    section: ClassVar[str] = "sync.streaming_diloco"
    main_options = ("inner_steps", "fragments", "delay", "code")

    inner_steps: int = 100
    """Steps of a round, in which every parameter is exchanged once"""

    outer_lr: float = 0.4
    """Constant learning rate of the anchor, which replicas share and which follows the mean of their displacements"""

    fragments: int = 5
    """Parts that are exchanged one after the other, evenly distributed over a round: layers are distributed over all
    but the first, which has the remaining parameters"""

    delay: int = 1
    """Steps from the start of an exchange to the use of its result, from 0 to inner_steps"""

    mix: float = 0.5
    """Share of a replica's own parameters that is kept when a result is used; the rest comes from the anchor"""

    code: Code = "e2m1"
    """Encoding of the displacements: FP32, or a code of blocks of 128 entries that share a scale"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.fragments >= 1, "fragments", "it must be 1 or more")
        self.require(
            0 <= self.delay <= self.inner_steps, "delay", f"it must lie in 0 .. inner_steps = {self.inner_steps}"
        )
        self.require(0.0 <= self.mix < 1.0, "mix", "it must lie in [0, 1)")

    def schedule(self) -> FragmentSchedule:
        return FragmentSchedule(self.inner_steps, self.fragments, self.delay, self.mix)

    def averaging(self) -> MethodOptions:
        return whole_displacements(self.code)

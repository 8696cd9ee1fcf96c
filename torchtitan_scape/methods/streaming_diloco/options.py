"""Options of Streaming DiLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.local_options import Code, FragmentSchedule, WholeOptions


@dataclass
class StreamingDilocoOptions(WholeOptions):
    """[sync.streaming_diloco]: DiLoCo, one fragment of the model at a time."""

    section: ClassVar[str] = "sync.streaming_diloco"
    main_options = ("inner_steps", "fragments", "delay", "code")

    inner_steps: int = 100
    """Steps per round; every parameter is exchanged once per round"""

    outer_lr: float = 0.4
    """Constant learning rate of the outer step, which updates the shared anchor by the mean displacement"""

    fragments: int = 5
    """Number of fragments, which are exchanged one after the other at equal intervals in a round: layers are
    distributed over all but the first, which contains the remaining parameters"""

    delay: int = 1
    """Steps from the start of an exchange to the use of its result, from 0 to inner_steps"""

    mix: float = 0.5
    """Weight of a replica's own parameters when a result is applied, in [0, 1); the anchor has the remaining weight"""

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

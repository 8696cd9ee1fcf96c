"""Options of 1-bit Adam."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels

WARMUP = 0.15  # share of the run
UPDATES_OF_A_NEW_VARIANCE = 100  # at least, after a checkpoint without one


@dataclass
class OnebitAdamOptions(MethodOptions):
    """[sync.onebit_adam]: momentum in one bit, with a frozen variance (1-bit Adam)."""

    section: ClassVar[str] = "sync.onebit_adam"
    main_options = ("code",)

    warmup_steps: int = -1
    """Last step that updates the variance, 1 or more, or -1 for 15 % of training.steps. Later steps send the momentum
    in `code` and do not change the variance"""

    code: Literal["int8", "int4", "e2m1", "2bit", "1bit"] = "1bit"
    """Encoding of the momentum on the outermost level, in both directions, with error feedback at both ends"""

    block: int = 128
    """Entries that share BF16 scales, a power of two from 32 to 1024; every parameter starts a new block"""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "it must be 1 or more, or -1 for 15 % of training.steps"
        self.require(self.warmup_steps == -1 or self.warmup_steps >= 1, "warmup_steps", rule)
        self.require(self.block in (32, 64, 128, 256, 512, 1024), "block", "it must be a power of two from 32 to 1024")

    def exchange(self) -> QuantizedOptions:
        """Return the options of the exchange of the momentum."""
        return QuantizedOptions(code=self.code, block=self.block)

    def last_update(self, total_steps: int) -> int:
        """Return the last step that updates the variance.

        Args:
            total_steps: Steps of the run; 0 if unknown.

        Raises:
            ValueError: The default depends on the steps of the run, and these are unknown.
        """
        known = self.warmup_steps > 0 or total_steps > 0
        self.require(known, "warmup_steps", "the steps of the run are unknown: set it to 1 or more, or total_steps")
        return self.warmup_steps if self.warmup_steps > 0 else max(1, round(WARMUP * total_steps))

    def needs_comm_streams(self) -> bool:
        return True

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return the exchange of the momentum of all parameters. The warm-up is not part of it."""
        return self.exchange().collective_calls(model, levels, chunk_entries)

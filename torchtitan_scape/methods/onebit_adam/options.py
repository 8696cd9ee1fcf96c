"""Options of 1-bit Adam."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.ring_bytes import LevelSize

WARMUP = 0.15  # share of the run
UPDATES_OF_A_NEW_VARIANCE = 100  # at least, after a checkpoint without one


@dataclass
class OnebitAdamOptions(MethodOptions):
    """[sync.onebit_adam]: momentum in one bit, with a frozen variance (1-bit Adam, 0/1 Adam)."""

    section: ClassVar[str] = "sync.onebit_adam"
    main_options = ("code",)

    warmup_steps: int = -1
    """Last step that updates the variance, 1 or more, or -1 for 15 % of training.steps. Later steps send the momentum
    in `code` and do not change the variance"""

    variance_updates: int = 0
    """Updates of the variance before their interval doubles, as in 0/1 Adam (kappa, 16 there): steps of the warm-up
    between two updates send the momentum in `code`. 0 updates it in every step of the warm-up, as in 1-bit Adam"""

    code: Literal["int8", "int4", "e2m1", "2bit", "1bit"] = "1bit"
    """Encoding of the momentum on the outermost level, in both directions, with error feedback at both ends"""

    block: int = 128
    """Entries that share BF16 scales, a power of two from 32 to 1024; every parameter starts a new block"""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "it must be 1 or more, or -1 for 15 % of training.steps"
        self.require(self.warmup_steps == -1 or self.warmup_steps >= 1, "warmup_steps", rule)
        self.require(self.variance_updates >= 0, "variance_updates", "it must be 0 (every step) or more")
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

    def updates_variance(self, number: int, last: int) -> bool:
        """Return whether step `number`, from 1, updates the variance; `last` is the last step that does.

        The interval between two updates is 2^floor(j / kappa) after the update j, from 0 (0/1 Adam, policy for T_v).
        """
        if number > last or not self.variance_updates:
            return number <= last
        _, past, interval = self._interval_at(number)
        return past % interval == 0

    def updates_until(self, number: int, last: int) -> int:
        """Return how many of the steps 1 to `number` update the variance."""
        number = min(number, last)
        if not self.variance_updates or number < 1:
            return number
        before, past, interval = self._interval_at(number)
        return before + past // interval + 1

    def _interval_at(self, number: int) -> tuple[int, int, int]:
        """Return (updates at shorter intervals, steps since the first update at this interval, the interval)."""
        doublings = ((number - 1) // self.variance_updates + 1).bit_length() - 1
        first = self.variance_updates * (2**doublings - 1)
        return self.variance_updates * doublings, number - 1 - first, 2**doublings

    def needs_comm_streams(self) -> bool:
        return True

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        """Return the exchange of the momentum of all parameters. The warm-up is not part of it."""
        return self.exchange().collective_calls(model, levels, chunk_entries)

"""Options of NoLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, pair_mean_chunked


@dataclass
class NolocoOptions(MethodOptions):
    """[sync.noloco]: local steps, then an average over random pairs of replicas, without an all-reduce."""

    section: ClassVar[str] = "sync.noloco"
    main_options = ("inner_steps",)
    per_replica_weights = True

    inner_steps: int = 50
    """Local steps between two exchanges with a partner"""

    outer_lr: float = 0.7
    """Constant learning rate of the outer step: the factor of the pair's mean displacement"""

    outer_momentum: float = 0.5
    """Momentum of the outer step, in [0, 1); 0 for none"""

    averaging_rate: float = 0.7
    """Factor by which the slow weights move to the mean of the pair in an outer step, above 0 and below
    2 + outer_momentum^2"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.inner_steps >= 1, "inner_steps", "it must be 1 or more")
        self.require(self.outer_lr > 0.0, "outer_lr", "it must be positive")
        self.require(0.0 <= self.outer_momentum < 1.0, "outer_momentum", "it must lie in [0, 1)")
        limit = 2.0 + self.outer_momentum**2
        self.require(
            0.0 < self.averaging_rate < limit,
            "averaging_rate",
            f"it must be above 0 and below 2 + outer_momentum^2 = {limit:g}, beyond which replicas drift apart",
        )

    def steps_per_round(self) -> int:
        return self.inner_steps

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return one exchange of all parameters with a partner per round. Full exchanges are not included."""
        return [pair_mean_chunked(model.entries, levels, chunk_entries, self.exchange_share())]

    def exchange_share(self) -> float:
        return 1.0 / self.inner_steps

"""Options and cost of NoLoCo."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import GradientCost, pair_mean_chunked
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.ring_bytes import LevelSize


@dataclass
class NolocoOptions(MethodOptions):
    """[sync.noloco]: local steps, then an average over random pairs of replicas, without an all-reduce."""

    section: ClassVar[str] = "sync.noloco"
    main_options = ("inner_steps",)

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

    def label(self) -> str:
        return f"{self.method_name()} {self.inner_steps:g}"

    def cost(self) -> "NolocoCost":
        return NolocoCost(self)


@dataclass(frozen=True)
class NolocoCost(GradientCost):
    """One exchange of all parameters with a partner per round. Full exchanges are not included."""

    options: NolocoOptions
    per_replica_weights = True

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        return [pair_mean_chunked(model.entries, levels, chunk_entries, 1.0 / self.options.inner_steps)]

    def traffic_per_parameter(self) -> float:
        """Return the mean bytes per parameter and step over a round, by the operators of an exchange.

        Message: 12 to read slow and fast weights and write it. Mean: 20. Spread of the replicas: 60 to form the message
        again, subtract the mean, and sum the squares in FP64. Outer step: 20 for the scaled difference, 20 for the
        momentum, 12 for the slow weights, 8 to copy them.
        """
        momentum = 20.0 if self.options.outer_momentum else 0.0
        return (12.0 + 20.0 + 60.0 + 20.0 + momentum + 12.0 + 8.0) / self.options.inner_steps

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        n = 4.0 * model.entries
        kinds = {"slow weights": n} | ({"slow momentum": n} if self.options.outer_momentum else {})
        return kinds | ({"chunks in flight": self.chunk_memory(model, replicas)} if replicas > 1 else {})

    @property
    def chunk_bytes(self) -> float:
        """Message and received message, and for one of two chunks three temporary values of the outer step."""
        return 4.0 + 4.0 + 6.0

    def simulated_memory(self, model: LocalModel, replicas: int, optimizer: dict[str, float]) -> dict[str, float]:
        kinds = optimizer | self.device_memory(model, replicas)
        return {kind: replicas * nbytes for kind, nbytes in kinds.items()}

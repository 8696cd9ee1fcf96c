"""Options of CO2."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.local_options import FragmentSchedule, LocalOptions
from torchtitan_scape.methods.options import MethodOptions


@dataclass
class Co2Options(LocalOptions):
    """[sync.co2]: local steps, with an average that overlaps with the next round."""

    section: ClassVar[str] = "sync.co2"
    main_options = ("inner_steps",)

    inner_steps: int = 48
    """Local steps of a round. The exchange of a round runs during the next one"""

    outer_lr: float = 1.0
    """Constant learning rate of the outer step, which updates the shared anchor by the outer momentum"""

    outer_momentum: float = 0.2
    """Momentum of the outer step without Nesterov's correction, in [0, 1). The published code has 0 up to 16 replicas,
    0.2 up to 32, 0.5 up to 64 and 0.6 above"""

    gap_penalty: bool = True
    """Divide a mean displacement by the staleness gap: 1 plus the norm of the last outer step relative to that of the
    mean displacement"""

    momentum_clip: float = 1.0
    """Bound on the magnitude of every entry of the outer momentum; 0 for none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.momentum_clip >= 0.0, "momentum_clip", "it must be 0 or more, with 0 for no bound")

    def schedule(self) -> FragmentSchedule:
        return FragmentSchedule(self.inner_steps, delay=self.inner_steps, restart=True)

    def averaging(self) -> MethodOptions:
        return DenseOptions()

    def stores_momentum(self) -> bool:
        return self.gap_penalty or super().stores_momentum()

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the mean traffic over a round: the penalty reads the momentum once more."""
        each, mean = super().host_link_traffic(model, replicas)
        momentum = self.host_memory(model, replicas).get("outer momentum", 0.0)
        return each, mean + (momentum / self.inner_steps if self.gap_penalty else 0.0)

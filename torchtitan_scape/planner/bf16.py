"""BF16 gradients, which the planner compares with the methods of this trainer. Plain arithmetic: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import GradientCost
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall, padded_size
from torchtitan_scape.topology.ring_bytes import LevelSize


@dataclass
class Bf16Options(MethodOptions):
    """Not a section of a recipe: the trainer does not have this method."""

    section: ClassVar[str] = "sync.bf16"

    def cost(self) -> "Bf16Cost":
        return Bf16Cost()


class Bf16Cost(GradientCost):
    """All gradients in BF16, on every level."""

    supports_overlap = True
    per_replica = ()

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        # Two BF16 elements take the place of one of FP32.
        return [CollectiveCall("all_reduce", padded_size(-(-model.entries // 2), levels))]

    def traffic_per_parameter(self) -> float:
        """Convert to BF16 and back: 12 bytes."""
        return 12.0

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return {"BF16 gradients": 2.0 * model.entries}

"""Options and cost of dense FP32 gradients, the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from topology.calls import CollectiveCall
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import GradientCost, all_reduce_stream
from torchtitan_scape.methods.options import MethodOptions


@dataclass
class DenseOptions(MethodOptions):
    """[sync.dense]: gradients in FP32, uncompressed (the baseline). It has no options."""

    section: ClassVar[str] = "sync.dense"

    def cost(self) -> "DenseCost":
        return DenseCost()


class DenseCost(GradientCost):
    """One all-reduce of all gradients in FP32, in chunks."""

    supports_overlap = True
    per_replica = ()  # simulated replicas sum their gradients before the method runs

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        return [all_reduce_stream(model.sizes, levels, chunk_entries)]

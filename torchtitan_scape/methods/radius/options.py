"""Options of Radius."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel, count_entries
from torchtitan_scape.kernels.scape.blocks import entries_per_block
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.partition import chunk_limit, chunk_of_payload
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, all_reduce_chunked, replicas_of


@dataclass
class RadiusOptions(MethodOptions):
    """[sync.radius]: gradients on a mask that is kept for many steps."""

    section: ClassVar[str] = "sync.radius"
    main_options = ("density", "interval")

    density: float = 0.4
    """Share of the entries in the mask, in (0, 1]"""

    interval: int = 200
    """Steps between two refreshes. A refresh sends all gradients and residuals, and selects the next mask"""

    start: int = -1
    """Steps are dense until the first refresh at or after this step; -1 for one fifth of training.steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.4")
        self.require(self.interval >= 1, "interval", "it must be 1 or more")
        self.require(self.start >= -1, "start", "it must be 0 or more, or -1 for one fifth of training.steps")

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return an all-reduce of the entries in the mask and, at a refresh, of all entries."""
        payload, share = self.payload(model), 1.0 / self.interval
        of_payload = chunk_entries or max(chunk_limit(payload, replicas_of(levels)), chunk_of_payload(payload))
        return [
            all_reduce_chunked(payload, levels, of_payload, 1.0 - share),
            all_reduce_chunked(model.entries, levels, chunk_entries, share),
        ]

    def payload(self, model: LocalModel) -> int:
        """Return the entries that a step between two refreshes sends."""
        sizes = self._compressed_sizes(model)
        return sum(mask_counts(sizes, self.density)) + model.entries - sum(sizes)

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        compressed = sum(self._compressed_sizes(model))
        return {"residual": 4.0 * compressed, "masks": compressed / 8} if compressed else {}

    def _compressed_sizes(self, model: LocalModel) -> list[int]:
        return [count_entries([shape]) for shape in model.matrices()]


def mask_counts(sizes: Sequence[int], density: float) -> list[int]:
    """Return the number of mask entries of each tensor."""
    return [entries_per_block(density, size) if size else 0 for size in sizes]

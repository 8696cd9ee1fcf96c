"""Options of Radius."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, count_entries
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall, all_reduce_chunked, replicas_of
from torchtitan_scape.topology.partition import chunk_limit, chunk_of_payload
from torchtitan_scape.topology.ring_bytes import LevelSize

BLOCK = 1024  # entries of a block if the largest of every block are selected


@dataclass
class RadiusOptions(MethodOptions):
    """[sync.radius]: gradients on a mask that is kept for many steps."""

    section: ClassVar[str] = "sync.radius"
    main_options = ("density", "interval", "selection")

    density: float = 0.4
    """Share of the entries in the mask, in (0, 1]"""

    interval: int = 200
    """Steps between two refreshes. A refresh sends all gradients and residuals, and selects the next mask"""

    start: int = -1
    """Steps are dense until the first refresh at or after this step; -1 for one fifth of training.steps"""

    selection: Literal["tensor", "block"] = "tensor"
    """Select the largest updates of every tensor, or of every block of 1024 entries"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged uncompressed although they have two or more dimensions"""

    clip_refresh: Literal["literal", "fresh"] = "literal"
    """Clip a refresh by the norm of everything that it applies, up to `interval` steps' gradients at once ("literal"),
    or by the norm of the step's own mean gradient ("fresh"); the latter sends the residuals separately, one more
    message per refresh"""

    release_scale: float = 1.0
    """Factor on the optimizer's step of entries outside the mask, applied at a refresh: such an entry has accumulated
    up to `interval` gradients, but receives a single optimizer step. The paper uses 1; interval x (1 - beta1)
    compensates for the accumulation"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.4")
        self.require(self.interval >= 1, "interval", "it must be 1 or more")
        self.require(self.start >= -1, "start", "it must be 0 or more, or -1 for one fifth of training.steps")
        self.require(self.release_scale >= 1.0, "release_scale", "it must be 1 (the paper's) or more")

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        """Return an all-reduce of the entries in the mask and, at a refresh, of all entries."""
        masked, *others = self.exchanges(model)
        of_payload = chunk_entries or max(chunk_limit(masked[0], replicas_of(levels)), chunk_of_payload(masked[0]))
        calls = [all_reduce_chunked(masked[0], levels, of_payload, masked[1])]
        return calls + [all_reduce_chunked(entries, levels, chunk_entries, share) for entries, share in others]

    def exchanges(self, model: LocalModel) -> list[tuple[int, float]]:
        """Return (entries, share of the steps) of each exchange."""
        sizes = self._compressed_sizes(model)
        compressed, share = sum(sizes), 1.0 / self.interval
        payload = sum(mask_counts(sizes, self.density, self.selection)) + model.entries - compressed
        exchanges = [(payload, 1.0 - share), (model.entries, share)]
        return exchanges + ([(compressed, share)] if self.clip_refresh == "fresh" else [])

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        compressed = sum(self._compressed_sizes(model))
        return {"residual": 4.0 * compressed, "masks": compressed / 8} if compressed else {}

    def _compressed_sizes(self, model: LocalModel) -> list[int]:
        return [count_entries([shape]) for shape in model.matrices(self.dense_names)]


def mask_counts(sizes: Sequence[int], density: float, selection: str) -> list[int]:
    """Return the number of mask entries of each tensor.

    Args:
        selection: "block" for k entries of every block, fewer if the last block is shorter; or "tensor".
    """
    layout = BlockLayout(tuple(sizes), BLOCK, 1)
    return [layout.nnz(i, density, selection) for i in range(len(sizes))]

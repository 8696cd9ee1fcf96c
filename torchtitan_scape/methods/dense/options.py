"""Options and cost of dense FP32 gradients, the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import GradientCost, all_reduce_stream
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.partition import chunk_limit, chunks_of
from torchtitan_scape.topology.ring_bytes import LevelSize

_COPIES = 16.0  # bytes to copy an FP32 entry to a chunk and back


@dataclass
class DenseOptions(MethodOptions):
    """[sync.dense]: gradients in FP32, uncompressed (the baseline). It has no options."""

    section: ClassVar[str] = "sync.dense"

    def cost(self) -> "DenseCost":
        return DenseCost()


class DenseCost(GradientCost):
    """One all-reduce of all gradients in FP32, in chunks, which are fewer where gradients are exchanged in place."""

    supports_overlap = True
    compresses = False
    per_replica = ()  # simulated replicas sum their gradients before the method runs

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        return [all_reduce_stream(model.sizes, levels, chunk_entries)]

    def memory_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return no traffic: on one level gradients are exchanged in place."""
        return 0.0, 0.0

    def buffer_traffic(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes of the copies of chunks with parts of several gradients, and of a second reduction and
        gather: 5 per parameter.
        """
        chunks = chunks_of(model.sizes, chunk_limit(model.entries, replicas)) if replicas > 1 else []
        copied = sum(s.length for chunk in chunks if len(chunk.slices) > 1 for s in chunk.slices)
        return 5.0 * model.entries + _COPIES * copied

    def overlap_traffic(self, model: LocalModel, replicas: int) -> float:
        """Return the traffic of the copies, because all chunks have buffers during the backward pass."""
        return _COPIES * model.entries if replicas > 1 else 0.0

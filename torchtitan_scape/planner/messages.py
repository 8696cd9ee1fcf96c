"""What replicas send each other, as the cost model prices it. Plain arithmetic: no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from kernels.codec.formats import BLOCK as CODED_BLOCK
from topology.links import Stage, Tiers, all_gather_stages, all_reduce_stages, reduce_scatter_stages
from torchtitan_scape.methods.topk.blocks import Shapes, chunks_by_size, coded_by


@dataclass(frozen=True)
class PlannedMessage:
    """A collective of all replicas.

    nbytes: what each of them brings to it, FP32 where it is added up.
    wire: how sums cross the outermost level. block: entries that share scales there.
    hidden: it goes beside the next forward and backward pass.
    share: of the steps that have it.
    chunks: FP32 entries of the exchanges that it goes in, with how many there are of each; empty for a single one. One
        is on its way while another waits for an answer, so that they take the latency of one.
    """

    collective: Literal["reduce", "scatter", "gather"]
    nbytes: float
    wire: str = "float32"
    hidden: bool = False
    share: float = 1.0
    block: int = CODED_BLOCK
    chunks: tuple[tuple[int, int], ...] = ()

    def stages(self, tiers: Tiers, flat: bool = False) -> list[Stage]:
        """Of a step, in the mean."""
        if self.chunks:
            each = [replace(self, nbytes=4.0 * n, chunks=()).stages(tiers, flat) for n, _ in self.chunks]
            times = [count for _, count in self.chunks]
            return [
                replace(same[0], sent=sum(count * stage.sent for count, stage in zip(times, same, strict=True)))
                for same in zip(*each, strict=True)
            ]
        stages = self._stages(tiers, flat)
        return stages if self.share == 1.0 else [s.of_a_share(self.share) for s in stages]

    def _stages(self, tiers: Tiers, flat: bool) -> list[Stage]:
        match self.collective:
            case "reduce":
                return all_reduce_stages(tiers, self.nbytes, coded_by(self.wire, self.block), flat)
            case "scatter":
                return reduce_scatter_stages(tiers, self.nbytes, coded_by(self.wire), flat)
            case "gather":
                return all_gather_stages(tiers, self.nbytes, flat)


def coded_message(shapes: Shapes, replicas: int, wire: str, block: int = CODED_BLOCK) -> PlannedMessage:
    """The mean of all entries in a block code, in the chunks that they go in."""
    chunks = tuple(chunks_by_size(shapes, replicas, block).items())
    return PlannedMessage("reduce", 4.0 * sum(n * k for n, k in chunks), wire, block=block, chunks=chunks)

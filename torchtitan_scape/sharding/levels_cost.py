"""Closed form of the traffic and memory of three-level sharding (arXiv:2501.04266, with this project's deviations).

Weights are sharded over w ranks, gradients over the g ranks of a node, masters and optimizer states over R = g * N
ranks. n is the number of entries. Padding is neglected, as are norms and biases, which are never quantized. Plain
arithmetic: no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_scape.sharding.cost import FlatRow, mean_gathers
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.links import Links, stage_seconds
from torchtitan_scape.topology.ring_bytes import Stage


@dataclass(frozen=True)
class LevelsPlan:
    """Sharding degrees, and the bytes per entry of each message; `coded` returns those of a block code.

    Attributes:
        weights, gradients, nodes: Degrees w, g, N.
        gathered: Bytes per entry of all-gathered weights.
        reduced: Bytes per entry of reduce-scattered gradients.
        summed: Bytes per entry of gradients summed between nodes; 0 if a method of the replicate axis exchanges them.
        update: Bytes per entry of the weight update.
        secondary: A rank keeps its part of the gathered weights as a message.
        stored: Bytes per entry of the weights that FSDP2 stores.
    """

    weights: int
    gradients: int
    nodes: int
    gathered: float = 2.0
    reduced: float = 4.0
    summed: float = 4.0
    update: float = 4.0
    secondary: bool = False
    stored: float = 2.0

    @property
    def sums(self) -> bool:
        """Whether gradients are summed between nodes here, so that optimizer states are sharded over the nodes."""
        return self.summed > 0

    def shards(self, layout: Layout) -> int:
        """Return the ranks over which masters and optimizer states are sharded."""
        return self.gradients * (self.nodes if self.sums else 1)

    def sent(self, rows: Sequence[FlatRow], layout: Layout, micro_batches: int) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends per step, as the mean over ranks, by (link level, kind).

        Args:
            layout: Layout whose shard axis has the g ranks.
            micro_batches: Micro-batches per step.
        """
        n, sent_bytes = _entries(rows, layout), dict[tuple[str, str], float]()
        per_micro_batch = self.micro_batch_bytes(n, mean_gathers(rows))
        for times, bytes_of in ((micro_batches, per_micro_batch), (1, self.step_bytes(n))):
            for (over, kind), sent in bytes_of.items():
                if sent:
                    key = self._level(over, layout), kind
                    sent_bytes[key] = sent_bytes.get(key, 0.0) + times * sent
        return sent_bytes

    def seconds(self, rows: Sequence[FlatRow], layout: Layout, links: Links, micro_batches: int) -> tuple[float, float]:
        """Return the seconds per step of the traffic that (overlaps with compute, does not).

        Each row incurs the latency of its stages.
        """
        n, gathers, groups = _entries(rows, layout), mean_gathers(rows), len(rows)
        w, g, seconds = self.weights, self.gradients, []
        steps = {"pair": w - 1, "node": g // w - 1, "network": self.nodes - 1}
        per_micro_batch = self.micro_batch_bytes(n, gathers)
        for times, bytes_of in ((gathers, per_micro_batch), (1.0, self.step_bytes(n))):
            stages = [
                Stage(self._level(over, layout), groups * steps[over] * (times if kind == "weights" else 1.0), sent)
                for (over, kind), sent in bytes_of.items()
                if sent
            ]
            seconds.append(sum(stage_seconds(stages, links)))
        return micro_batches * seconds[0], seconds[1]

    def _level(self, over: str, layout: Layout) -> str:
        """Return the level of the link from the first rank to another rank of its pair, node or network."""
        ends = {"pair": self.weights - 1, "node": self.weights, "network": self.gradients}
        return layout.level(0, ends[over])

    def micro_batch_bytes(self, n: float, gathers: float = 2.0) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends per micro-batch by (scope, kind), as the mean over ranks.

        The scope is "pair" within the w ranks, or "node" for the rest of the node.

        Args:
            n: Number of entries.
            gathers: All-gathers of an entry per micro-batch: 2 if its module is resharded after the forward pass.
        """
        w, g = self.weights, self.gradients
        return {
            ("pair", "weights"): gathers * n * self.gathered * (w - 1) / w,
            ("pair", "gradients"): self.reduced * n * (w - 1) / g,
            ("node", "gradients"): self.reduced * n * (g - w) / g,
        }

    def step_bytes(self, n: float) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends once per step by (scope, kind); the scope may also be "network"."""
        w, g = self.weights, self.gradients
        between_nodes = n / g * (self.nodes - 1) / self.nodes if self.sums else 0.0
        return {
            ("network", "gradients"): self.summed * between_nodes,
            ("network", "update"): self.update * between_nodes,
            ("node", "update"): self.update * n * (g - w) / (w * g),
        }

    def memory(self, optimizer: dict[str, float], rows: Sequence[FlatRow], layout: Layout) -> dict[str, float]:
        """Return the bytes per rank by kind.

        Args:
            optimizer: Bytes by kind of the method and the optimizer on one of `shards` shards, whose parameters are the
                masters. Kinds other than parameters and gradients are copied.
        """
        n = _entries(rows, layout)
        kinds = {"parameters": self.stored * n / self.weights, "gradients": 4.0 * n / self.gradients}
        kinds["masters"] = optimizer["parameters"]
        kinds |= {kind: value for kind, value in optimizer.items() if kind not in ("parameters", "gradients")}
        if self.sums:
            kinds["summed gradients"] = optimizer["gradients"]
        if self.secondary:
            kinds["secondary partition"] = self.gathered * n / self.weights
        return kinds


def _entries(rows: Sequence[FlatRow], layout: Layout) -> float:
    """Return the entries of all ranks of a replica."""
    return float(len(layout.shard_group(0)) * sum(row.entries for row in rows))


def coded(bits: int, block: int) -> float:
    """Return the bytes per entry of a block code with FP32 scales."""
    return bits / 8 + 4 / block

"""What three levels send and hold, in closed form (arXiv:2501.04266, ours where `sharding.levels` differs).

Weights lie on w ranks, gradients on g of a node, masters and the optimizer's states on R = g * N. n is the number of
entries; padding, and norms and biases, which are never coded, are left out. Plain arithmetic: no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.layout import Layout
from topology.links import Stage
from torchtitan_scape.core.workloads import Shape


@dataclass(frozen=True)
class LevelsPlan:
    """Degrees, and bytes an entry of what goes over the wire; `coded` has those of a block code.

    weights, gradients, nodes: w, g, N. gathered: of weights; reduced: of gradients, of one hop over all g ranks, or of
    two, over w and then over g / w. summed: of gradients across nodes; 0 where a method of the replicate axis exchanges
    pieces. told: of the update. secondary: ranks that keep a partition of what was gathered; 0 for none.
    kept: bytes an entry of weights as FSDP2 has them.
    """

    weights: int
    gradients: int
    nodes: int
    gathered: float = 2.0
    reduced: tuple[float, ...] = (4.0,)
    summed: float = 4.0
    told: float = 4.0
    secondary: int = 0
    kept: float = 2.0

    @property
    def sums(self) -> bool:
        """Whether gradients are summed across nodes here, so that states are spread over them."""
        return self.summed > 0

    def sent(self, n: float, gathers: float, micro_batches: int, layout: Layout) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends in a step, in the mean over ranks, by (level of the link, kind).

        layout: whose shard axis has the g ranks. gathers: as in `micro_batch_bytes`.
        """
        found: dict[tuple[str, str], float] = {}
        each = self.micro_batch_bytes(n, gathers, micro_batches)
        for times, bytes_of in ((micro_batches, each), (1, self.step_bytes(n))):
            for (over, kind), sent in bytes_of.items():
                if sent:
                    key = self._level(over, layout), "weights" if kind == "kept" else kind
                    found[key] = found.get(key, 0.0) + times * sent
        return found

    def stages(
        self, n: float, gathers: float, groups: int, layout: Layout, micro_batches: int = 1
    ) -> tuple[list[Stage], list[Stage]]:
        """Of a micro-batch, in a step's mean, and of what a step has besides; each of the `groups` pays its latency."""
        w, g, found = self.weights, self.gradients, []
        steps = {"pair": w - 1, "node": g // w - 1, "network": self.nodes - 1}
        each = self.micro_batch_bytes(n, gathers, micro_batches)
        for times, bytes_of in ((gathers, each), (1.0, self.step_bytes(n))):
            found.append(
                [
                    Stage(self._level(over, layout), groups * steps[over] * (times if kind == "weights" else 1.0), sent)
                    for (over, kind), sent in bytes_of.items()
                    if sent
                ]
            )
        return found[0], found[1]

    def _level(self, over: str, layout: Layout) -> str:
        """Of a link from the first rank to another of its pair, node, or network."""
        ends = {"pair": self.weights - 1, "node": self.weights, "network": self.gradients}
        return layout.level(0, ends[over])

    def micro_batch_bytes(self, n: float, gathers: float = 2.0, micro_batches: int = 1) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends by (what it goes over, kind), in the mean over ranks and over the micro-batches of a
        step: within a "pair" of w ranks, or over the rest of the "node".

        gathers: of an entry in a micro-batch, 2 where its module is resharded after the forward pass.
        """
        w, g = self.weights, self.gradients
        found = {("pair", "weights"): gathers * n * self.gathered * (w - 1) / w}
        if self.secondary:  # the first gather alone is over the w ranks, and that once an update
            first = 1 / micro_batches
            again = (gathers - first) * n * self.gathered * (self.secondary - 1) / self.secondary
            found = {("pair", "weights"): found["pair", "weights"] / gathers * first}
            # Round the ring of a node one link in w leads out of a pair.
            out = 1 / w if self.secondary > w else 0.0
            found |= {("pair", "kept"): (1 - out) * again, ("node", "kept"): out * again}
        if len(self.reduced) == 1:
            found["pair", "gradients"] = self.reduced[0] * n * (w - 1) / g
            found["node", "gradients"] = self.reduced[0] * n * (g - w) / g
        else:
            found["pair", "gradients"] = self.reduced[0] * n * (w - 1) / w
            found["node", "gradients"] = self.reduced[1] * n * (g - w) / (w * g)
        return found

    def step_bytes(self, n: float) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends once a step, likewise, and over the "network"."""
        w, g = self.weights, self.gradients
        across = n / g * (self.nodes - 1) / self.nodes if self.sums else 0.0
        return {
            ("network", "gradients"): self.summed * across,
            ("network", "update"): self.told * across,
            ("node", "update"): self.told * n * (g - w) / (w * g),
        }

    @property
    def spread(self) -> int:
        """Ranks over which masters and states lie: of each parameter one of so many shares."""
        return self.gradients * (self.nodes if self.sums else 1)

    def memory(self, shapes: Sequence[Shape], optimizer: dict[str, float]) -> dict[str, float]:
        """Bytes that a rank holds by kind. optimizer: of a method on one of `spread` shares, whose parameters are
        the masters; kinds that are not the method's stay as they are."""
        n = float(sum(map(math.prod, shapes)))
        kinds = {"parameters": self.kept * n / self.weights, "gradients": 4.0 * n / self.gradients}
        kinds["masters"] = optimizer["parameters"]
        kinds |= {kind: value for kind, value in optimizer.items() if kind not in ("parameters", "gradients")}
        if self.sums:
            kinds["summed gradients"] = optimizer["gradients"]
        if self.secondary:
            kinds["secondary partition"] = self.gathered * n / self.secondary
        return kinds


def coded(bits: int, block: int) -> float:
    """Bytes an entry of a block code with FP32 scales."""
    return bits / 8 + 4 / block

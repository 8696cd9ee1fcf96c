"""[sharding.levels]: weights, gradients and optimizer states on three levels of links.

No `from __future__ import annotations` in a file with a section: TorchTitan tells sections apart by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from topology.layout import Layout
from torchtitan_scape.core.options import Options

STEP_BLOCK = 256  # entries that share a scale in what goes over the wire once a step


@dataclass
class LevelsOptions(Options):
    """[sharding.levels]: the low-bandwidth partition of Frontier (arXiv:2501.04266). Weights lie on few ranks with the
    fastest links, gradients on those of a node, FP32 masters and the optimizer's states on all."""

    section: ClassVar[str] = "sharding.levels"

    weights: int = 0
    """Ranks over which weights are sharded, and gathered: 2 for the GCDs of an MI250X; 0 turns the levels off"""

    gradients: int = 0
    """Ranks over which gradients are sharded: the degree of the shard axis, all of a node; 0 turns the levels off"""

    sum: Literal["float32", "int8"] = "float32"
    """How gradients are summed across nodes, once a step: as they are, or in a block code of 8 bits, decoded and added
    in node order. For [sync] method = "dense"; others exchange what nodes have in their own way"""

    update: Literal["int8", "bfloat16", "float32"] = "int8"
    """How weights follow the masters after a step: by differences in a block code of 8 bits, whose rounding error is in
    the next difference, or by values. What FSDP keeps of weights is in [training] mixed_precision_param"""

    secondary: int = 0
    """Ranks over which the weights of a forward pass are kept, as coded, for the backward pass: 0 for none, which
    gathers them again from the same ranks; else `weights` or `gradients`, as the paper has it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "gradients"):
            self.require(getattr(self, name) >= 0, name, "it must be 0 (no levels) or more")
        if bool(self.weights) != bool(self.gradients):
            off = "weights" if not self.weights else "gradients"
            self.require(False, off, "both degrees are wanted, or none of them")
        if self.gradients == 1:
            self.require(False, "gradients", "one rank has nobody to share with; set the ranks of a node, 2 or more")
        if self.secondary not in (0, self.weights, self.gradients):
            rule = f"it must be 0, or one of the degrees {self.weights} and {self.gradients}"
            self.require(False, "secondary", rule)
        if self.secondary and self.weights == 1:
            self.require(False, "secondary", "with weights = 1 nothing is gathered; set it to 0")

    @property
    def active(self) -> bool:
        return self.weights > 0

    def check(self, layout: Layout) -> None:
        """Whether units nest, and stay inside nodes. Raises ValueError with the degrees that would do."""
        if layout.context * layout.tensor * layout.pipeline > 1:
            raise ValueError(
                f"[{self.section}] weights = {self.weights} with context, tensor or pipeline parallelism: three levels "
                "shard by data alone; set their degrees to 1"
            )
        node = layout.ranks_per_node
        if node % self.gradients:
            rule = f"units of it must not span nodes: with {node} ranks each, {_divisors(node)} would do"
            self.require(False, "gradients", rule)
        if layout.shard != self.gradients:
            rule = (
                f"it must be the degree of the shard axis, which is {layout.shard}; set "
                f"parallelism.data_parallel_shard_degree = {self.gradients} and data_parallel_replicate_degree = "
                f"{layout.world_size // self.gradients}"
            )
            self.require(False, "gradients", rule)
        if self.gradients % self.weights:
            rule = f"it must divide gradients = {self.gradients}: {_divisors(self.gradients)} would do"
            self.require(False, "weights", rule)

    def inner(self, layout: Layout) -> Layout:
        """As FSDP2 sees it: weights on the shard axis, all that hold the same ones on the replicate axis."""
        if not self.active:
            return layout
        return replace(layout, replicate=layout.world_size // self.weights, shard=self.weights)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

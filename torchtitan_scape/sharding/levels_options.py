"""TOML section [sharding.levels]: weights, gradients and optimizer states sharded over three levels of links.

No `from __future__ import annotations` in a file with a section: TorchTitan recognizes sections by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torchtitan_scape.core.options import Options
from torchtitan_scape.topology.layout import Layout

STEP_BLOCK = 256  # Entries that share a scale in the messages sent once per step.


@dataclass
class LevelsOptions(Options):
    """[sharding.levels]: sharding over three levels of links (arXiv:2501.04266). Weights are sharded over a few ranks
    with the fastest links, gradients over those of a node, FP32 masters and optimizer states over all.
    """

    section: ClassVar[str] = "sharding.levels"

    weights: int = 0
    """Ranks over which weights are sharded and all-gathered: 2 for the GCDs of an MI250X; 0 disables the levels"""

    gradients: int = 0
    """Ranks over which gradients are sharded: the degree of the shard axis, which spans a node; 0 disables the
    levels"""

    sum_code: Literal["float32", "int8"] = "float32"
    """Encoding of the sum of gradients between nodes, once per step: FP32, or an 8-bit block code, decoded and summed
    in node order. For [sync] method = "dense"; other methods use their own exchange between nodes"""

    update_code: Literal["int8", "bfloat16", "float32"] = "int8"
    """Update of the weights from the masters after a step: by differences in an 8-bit block code, whose rounding error
    is part of the next difference, or by values. The dtype of the weights is [training] mixed_precision_param"""

    secondary: int = 0
    """Ranks over which the encoded weights of a forward pass are kept for the backward pass: 0 encodes them again; else
    `weights`, as in the paper"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "gradients"):
            self.require(getattr(self, name) >= 0, name, "it must be 0 (no levels) or more")
        if bool(self.weights) != bool(self.gradients):
            off = "weights" if not self.weights else "gradients"
            self.require(False, off, "set both degrees, or set both to 0")
        if self.gradients == 1:
            self.require(False, "gradients", "one rank shards nothing; set the number of ranks of a node, 2 or more")
        rule = f"it must be 0, or the degree of the weights, {self.weights}"
        self.require(self.secondary in (0, self.weights), "secondary", rule)
        if self.secondary and self.weights == 1:
            self.require(False, "secondary", "with weights = 1 nothing is gathered; set it to 0")

    @property
    def active(self) -> bool:
        return self.weights > 0

    def check(self, layout: Layout) -> None:
        """Check that the sharding groups nest and stay within nodes.

        Raises:
            ValueError: They do not; the message lists degrees that are valid.
        """
        if layout.context * layout.tensor * layout.pipeline > 1:
            raise ValueError(
                f"[{self.section}] weights = {self.weights} with context, tensor or pipeline parallelism: three-level "
                "sharding supports only data parallelism; set the other degrees to 1"
            )
        node = layout.ranks_per_node
        if node % self.gradients:
            rule = f"sharding groups must not span nodes: with {node} ranks per node, set one of {_divisors(node)}"
            self.require(False, "gradients", rule)
        if layout.shard != self.gradients:
            rule = (
                f"it must be the degree of the shard axis, which is {layout.shard}; set "
                f"parallelism.data_parallel_shard_degree = {self.gradients} and data_parallel_replicate_degree = "
                f"{layout.world_size // self.gradients}"
            )
            self.require(False, "gradients", rule)
        if self.gradients % self.weights:
            rule = f"it must divide gradients = {self.gradients}: set one of {_divisors(self.gradients)}"
            self.require(False, "weights", rule)

    def inner(self, layout: Layout) -> Layout:
        """Return FSDP2's layout: weights on the shard axis, all ranks with the same weights on the replicate axis."""
        if not self.active:
            return layout
        return replace(layout, replicate=layout.world_size // self.weights, shard=self.weights)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

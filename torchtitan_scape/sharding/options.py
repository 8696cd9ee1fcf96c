"""TOML sections [sharding] and [sharding.levels]: replacements for FSDP2's own collectives, and three-level sharding.

No `from __future__ import annotations` in a file with a section: TorchTitan recognizes sections by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torchtitan_scape.core.options import Options
from torchtitan_scape.sharding.cost import GRADIENTS_BLOCK, WEIGHTS_BLOCK, LevelsPlan, ShardPlan, coded
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology.layout import Layout

CODES = {"dense": (), "int8": ("int8",), "int4": ("int4",), "int8+int4": ("int8", "int4")}

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


@dataclass
class ShardingOptions(Options):
    """[sharding]: replacements for FSDP2's own collectives. Off by default. The parts of ZeRO++ (arXiv:2306.10209) are
    separate options.
    """

    section: ClassVar[str] = "sharding"

    weights_code: Literal["dense", "int8"] = "dense"
    """Encoding of all-gathered matrices: that of FSDP2, or an 8-bit block code (qwZ). Validation uses the quantized
    weights; checkpoints contain the FP32 shards"""

    secondary: bool = False
    """Send weights between nodes once per update; every rank keeps the encoded messages until the next update (hpZ)"""

    gradients_code: Literal["dense", "int8", "int4", "int8+int4", "tagc"] = "dense"
    """Encoding of reduce-scattered gradients of matrices: that of FSDP2, or a block code, decoded and summed in rank
    order (qgZ); "int8+int4" uses 8 bits within the node and 4 bits between nodes; "tagc" sends the largest entries and
    keeps the rest as a residual"""

    tagc: TagcShardingOptions = field(default_factory=TagcShardingOptions)

    levels: LevelsOptions = field(default_factory=LevelsOptions)

    @property
    def active(self) -> bool:
        """Whether any of FSDP2's own collectives is replaced."""
        return self.weights_code != "dense" or self.gradients_code != "dense" or self.secondary

    @property
    def hop_codes(self) -> tuple[str, ...]:
        """Names of the gradient codes per hop, innermost first; the last one also applies to the hops after it."""
        return CODES.get(self.gradients_code, ())

    @property
    def sparse(self) -> bool:
        """Whether gradients are reduced by TAGC."""
        return self.gradients_code not in CODES

    @property
    def cut_block(self) -> int:
        """Alignment, in entries, of the row slices of three-level sharding: no slice boundary divides a block."""
        block = GRADIENTS_BLOCK if self.gradients_code != "dense" else 1
        return max(block, STEP_BLOCK if "int8" in (self.levels.sum_code, self.levels.update_code) else 1)

    def hops_over(self, layout: Layout) -> int:
        """Return 2, within the node and then between nodes, if there are several ranks on each of several nodes; else
        1, over all ranks at once.
        """
        nodes = layout.by_node(layout.shard_group(0))
        even = len({len(ranks) for group in layout.shard_groups() for ranks in layout.by_node(group)}) == 1
        return 2 if even and len(nodes) > 1 and len(nodes[0]) > 1 else 1

    def check(self, layout: Layout) -> None:
        """Check the options against the parallelism degrees.

        Raises:
            ValueError: An option has no effect with these degrees; the message names the degree to change.
        """
        if self.levels.active:
            self._check_levels(layout)
        elif self.active:
            self._check_hops(layout)

    def _check_hops(self, layout: Layout) -> None:
        nodes, ranks = layout.by_node(layout.shard_group(0)), layout.shard * layout.context
        if ranks == 1:
            raise ValueError(
                f"[sharding] weights_code = {self.weights_code!r}, gradients_code = {self.gradients_code!r} with one "
                "rank on the shard axis: FSDP sends nothing there; raise parallelism.data_parallel_shard_degree, or "
                "omit [sharding]"
            )
        hops, more_nodes, described = self.hops_over(layout), _more_nodes(layout), _describe(nodes)
        two_hops = more_nodes or (
            "set parallelism.data_parallel_shard_degree to a multiple of the ranks per node, so that the shard axis "
            "has the same number of ranks, two or more, on each of several nodes"
        )
        if self.secondary:
            fix = more_nodes or "raise parallelism.data_parallel_shard_degree"
            self.require(len(nodes) > 1, "secondary", f"it saves bytes between nodes, but {described}; {fix}")
            self.require(
                hops == 2 or len(nodes[0]) == 1, "secondary", f"it needs two hops, and {described}; {two_hops}"
            )
        rule = f"two codes need two hops, but {described}; set 'int8' or 'int4', or {two_hops}"
        self.require(len(self.hop_codes) <= hops, "gradients_code", rule)
        if self.sparse:
            rule = f"the residuals differ between replicas, so one replica is supported, not {layout.replicate}"
            fix = "set data_parallel_replicate_degree = 1, or take [sync] method = 'tagc' and gradients_code = 'dense'"
            self.require(layout.replicate == 1, "gradients_code", f"{rule}; {fix}")

    def _check_levels(self, layout: Layout) -> None:
        levels = self.levels
        levels.check(layout)
        rule = "with [sharding.levels] weights = 1 nothing is gathered; set it to 'dense'"
        self.require(levels.weights > 1 or self.weights_code == "dense", "weights_code", rule)
        rule = "weights stay within the node; set it to false, or use [sharding.levels] secondary"
        self.require(not self.secondary, "secondary", rule)
        rule = "gradients of [sharding.levels] stay within the node; set 'int8' or 'int4'"
        self.require(len(self.hop_codes) < 2, "gradients_code", rule)

    def planned(
        self, layout: Layout, param_dtype: str, *, sums: bool = True, on_cpu: bool = False
    ) -> ShardPlan | LevelsPlan:
        """Return the closed form of the shard axis.

        Args:
            layout: Layout of the run.
            param_dtype: Dtype of the weights in the forward pass.
            sums: The hooks of three levels sum gradients between nodes, not a method of the replicate axis.
            on_cpu: Dense gradients use an all-to-all instead of a ring, as on gloo.
        """
        weight_bytes, levels = 4 if param_dtype == "float32" else 2, self.levels
        if not levels.active:
            return ShardPlan(
                weights=self.weights_code,
                secondary=self.secondary,
                gradients=self.hop_codes,
                hops=self.hops_over(layout) if self.active else 1,
                weight_bytes=weight_bytes,
                exchanged=on_cpu,
                sparse=self.tagc if self.sparse else None,
            )
        (reduced,) = [coded(int(name.removeprefix("int")), GRADIENTS_BLOCK) for name in self.hop_codes] or [4.0]
        update = {"bfloat16": 2.0, "float32": 4.0}.get(levels.update_code, coded(8, STEP_BLOCK))
        return LevelsPlan(
            levels.weights,
            levels.gradients,
            layout.replicate,
            gathered=float(weight_bytes) if self.weights_code == "dense" else coded(8, WEIGHTS_BLOCK),
            reduced=reduced,
            summed=(coded(8, STEP_BLOCK) if levels.sum_code == "int8" else 4.0) if sums else 0.0,
            update=update,
            secondary=levels.secondary > 0,
            stored=float(weight_bytes),
        )

    def remarks(self, layout: Layout, validates: bool) -> list[str]:
        """Return the lines about sharding to log at the start of a run."""
        lines = []
        dense = [name for name in ("weights", "gradients") if getattr(self, f"{name}_code") == "dense"]
        if not layout.shard_axis_inside_node and dense:
            names = " and ".join(dense)
            lines.append(f"the shard axis crosses nodes: FSDP's dense collectives ({names}) will use the network")
        if self.weights_code != "dense" and validates:
            lines.append(
                f"validation uses the weights as all-gathered, in {self.weights_code}; checkpoints contain FP32"
            )
        return lines


def _more_nodes(layout: Layout) -> str:
    """Return the fix if all ranks are on one node, and "" otherwise. A dry run has one process, and no launcher."""
    if layout.nodes > 1:
        return ""
    return (
        f"start more than one node; a dry run places all {layout.world_size} ranks on one, unless "
        "topology.ranks_per_node or topology.machine sets fewer ranks per node"
    )


def _describe(nodes: tuple[tuple[int, ...], ...]) -> str:
    """Return the number of nodes of the shard axis and their sizes, in words."""
    sizes = sorted({len(ranks) for ranks in nodes})
    return f"the shard axis has {len(nodes)} node(s) of {' or '.join(map(str, sizes))} rank(s)"


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

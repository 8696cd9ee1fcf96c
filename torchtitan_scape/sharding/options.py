"""[sharding]: what FSDP2's own collectives become.

No `from __future__ import annotations` in a file with a section: TorchTitan tells sections apart by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from topology.layout import Layout
from torchtitan_scape.core.options import Options
from torchtitan_scape.sharding.cost import ShardPlan
from torchtitan_scape.sharding.levels_cost import LevelsPlan, coded
from torchtitan_scape.sharding.levels_options import STEP_BLOCK, LevelsOptions
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions

CODES = {"dense": (), "int8": ("int8",), "int4": ("int4",), "int8+int4": ("int8", "int4")}
BLOCKS = (32, 64, 128, 256, 512, 1024)


@dataclass
class ShardingOptions(Options):
    """[sharding]: what FSDP2's own collectives become. Nothing by default; ZeRO++ (arXiv:2306.10209) by its parts."""

    section: ClassVar[str] = "sharding"

    weights: Literal["dense", "int8"] = "dense"
    """How matrices are gathered: as FSDP2 does, or in a block code of 8 bits (qwZ). A validation sees what was coded;
    checkpoints have the FP32 shards"""

    weights_block: int = 256
    """Entries that share a scale, a power of two from 32 to 1024"""

    secondary: bool = False
    """Weights cross nodes once an update, and every rank keeps what came to it, as coded, until the next (hpZ)"""

    gradients: Literal["dense", "int8", "int4", "int8+int4", "tagc"] = "dense"
    """How gradients of matrices are reduced: as FSDP2 does, or in a block code, decoded and added in rank order (qgZ);
    "int8+int4" has 8 bits inside the node and 4 across nodes; "tagc" sends the largest, and keeps the rest"""

    gradients_block: int = 128
    """As `weights_block`"""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Of gradients; stochastic rounding has no bias and 1.4 to 1.6 times the error, and a resumed run repeats it"""

    hadamard: bool = True
    """With 4 bits, gradients are turned by a Hadamard matrix, 32 entries at a time, before they are coded"""

    hops: Literal["auto", 1, 2] = "auto"
    """2 goes by way of the ranks of a node, 1 over all ranks at once; "auto" is 2 where a node holds several ranks of
    several nodes"""

    tagc: TagcShardingOptions = field(default_factory=TagcShardingOptions)

    levels: LevelsOptions = field(default_factory=LevelsOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights_block", "gradients_block"):
            self.require(getattr(self, name) in BLOCKS, name, f"it must be one of {', '.join(map(str, BLOCKS))}")

    @property
    def active(self) -> bool:
        """Whether anything but FSDP2's own collectives is asked for."""
        return self.weights != "dense" or self.gradients != "dense" or self.secondary

    @property
    def gradient_codes(self) -> tuple[str, ...]:
        """Of the hops, from the inside out; the last one of those that follow."""
        return CODES.get(self.gradients, ())

    @property
    def sparse(self) -> bool:
        """Whether gradients are reduced by TAGC."""
        return self.gradients not in CODES

    @property
    def turns(self) -> bool:
        return self.hadamard and "int4" in self.gradient_codes

    @property
    def cut_block(self) -> int:
        """Entries that no cut of a row divides, where there are three levels."""
        coded = [self.gradients_block] if self.gradients != "dense" else []
        return max([*coded, STEP_BLOCK if "int8" in (self.levels.sum, self.levels.update) else 1])

    def plan(self, nodes: int, sums: bool, dtype: str) -> LevelsPlan | None:
        """Three levels as the closed forms know them; None where there are none.

        sums: gradients are summed across nodes here, not by a method of the replicate axis. dtype: of FSDP's weights.
        """
        if not self.levels.active:
            return None
        codes = tuple(coded(int(name.removeprefix("int")), self.gradients_block) for name in self.gradient_codes)
        kept, told = 2.0 if dtype == "bfloat16" else 4.0, {"bfloat16": 2.0, "float32": 4.0}
        return LevelsPlan(
            self.levels.weights,
            self.levels.gradients,
            nodes,
            gathered=kept if self.weights == "dense" else coded(8, self.weights_block),
            reduced=(codes or (4.0,)) * (2 if self.hops == 2 and len(codes) < 2 else 1),
            summed=(coded(8, STEP_BLOCK) if self.levels.sum == "int8" else 4.0) if sums else 0.0,
            told=told.get(self.levels.update, coded(8, STEP_BLOCK)),
            secondary=self.levels.secondary,
            kept=kept,
        )

    def hops_over(self, layout: Layout) -> int:
        """Circles that rows go over: 1 or 2. Raises ValueError where they cannot, or where there is nothing to do."""
        nodes = layout.by_node(layout.shard_group(0))
        even = len({len(ranks) for group in layout.shard_groups() for ranks in layout.by_node(group)}) == 1
        two = even and len(nodes) > 1 and len(nodes[0]) > 1
        if self.hops == 2 and not two:
            rule = f"two need several ranks on each of several nodes; {_lie(nodes)}; set 1 or 'auto'"
            self.require(False, "hops", rule)
        return 1 if self.hops == 1 or not two else 2

    def check(self, layout: Layout) -> None:
        """Refuses what these degrees leave nothing to do for. Raises ValueError with the degree to raise."""
        if not self.active:
            return
        nodes, ranks = layout.by_node(layout.shard_group(0)), layout.shard * layout.context
        if ranks == 1:
            raise ValueError(
                f"[sharding] weights = {self.weights!r}, gradients = {self.gradients!r} with one rank on the shard "
                "axis: FSDP sends nothing there; raise parallelism.data_parallel_shard_degree, or leave [sharding] out"
            )
        hops = self.hops_over(layout)
        if self.secondary:
            if len(nodes) == 1:
                rule = f"it saves bytes between nodes, and {_lie(nodes)}; raise data_parallel_shard_degree"
                self.require(False, "secondary", rule)
            if hops == 1 and len(nodes[0]) > 1:
                self.require(False, "secondary", f"it needs two hops, and {_lie(nodes)}; leave hops at 'auto'")
        if len(self.gradient_codes) > hops:
            self.require(False, "gradients", f"two codes need two hops, and {_lie(nodes)}; set 'int8' or 'int4'")
        if self.sparse:
            rule = f"what is kept differs from replica to replica, and there are {layout.replicate}"
            fix = "set data_parallel_replicate_degree = 1, or take [sync] method = 'tagc' and gradients = 'dense'"
            self.require(layout.replicate == 1, "gradients", f"{rule}; {fix}")
            self.tagc.check_among(ranks)

    def planned(self, layout: Layout, param_dtype: str, on_cpu: bool) -> ShardPlan:
        """What the planner knows of these options. param_dtype: in which weights are computed with."""
        return ShardPlan(
            weights=self.weights,
            weights_block=self.weights_block,
            secondary=self.secondary,
            gradients=self.gradient_codes,
            gradients_block=self.gradients_block,
            hops=self.hops_over(layout) if self.active and not self.levels.active else 1,
            weight_bytes=4 if param_dtype == "float32" else 2,
            exchanged=on_cpu,
            sparse=self.tagc.planned(layout.shard * layout.context) if self.sparse else None,
        )

    def remarks(self, layout: Layout, validates: bool) -> list[str]:
        """What a run should say at its start."""
        said = []
        dense = [name for name in ("weights", "gradients") if getattr(self, name) == "dense"]
        if not layout.shard_axis_inside_node and dense:
            what = " and ".join(dense)
            said.append(f"the shard axis crosses nodes: FSDP's dense collectives ({what}) will run over the network")
        if self.weights != "dense" and validates:
            said.append(f"validations see weights as they are gathered, in {self.weights}; checkpoints have FP32")
        return said


def _lie(nodes: tuple[tuple[int, ...], ...]) -> str:
    sizes = sorted({len(ranks) for ranks in nodes})
    return f"the shard axis has {len(nodes)} node(s) of {' or '.join(map(str, sizes))} rank(s)"

"""[sharding.tagc]: what TAGC on the shard axis is told.

No `from __future__ import annotations` in a file with a section: TorchTitan tells sections apart by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kernels.scape.blocks import entries_per_block
from kernels.tagc.formats import BLOCK, sends_offsets
from torchtitan_scape.core.options import LAYOUT, Options
from torchtitan_scape.sharding.tagc_cost import SparsePlan

FULLEST = 0.6  # share of a sketch's cells that the union may fill; peeling ends at 0.818, in sketches of many blocks
LEAST_BLOCKS = 512  # of a sketch: few blocks may not come apart though there are cells enough


@dataclass
class TagcShardingOptions(Options):
    """[sharding.tagc]: read with gradients = "tagc" (arXiv:2504.05638)."""

    section: ClassVar[str] = "sharding.tagc"

    sparsity: float = 0.9
    """Share of the entries that a rank does not choose, in [0, 1), of every block of 1024; they are kept for later"""

    codec: Literal["packed", "sketch"] = "packed"
    """How values travel: at the places that any rank chose, in their order; or, as published, in a count sketch"""

    ratio: float = 10.0
    """Of a sketch: entries for each of its cells, 1 or more"""

    index: Literal["auto", "bits", "offsets", "bit_sum", "nibble_sum"] = "auto"
    """How ranks learn of all choices: bits that owners unite, coded offsets that are gathered, or whichever is shorter;
    as published, sums of bytes (wrong where two ranks choose the same) or of four bits an entry"""

    left_over: Literal["keep", "estimate"] = "keep"
    """What peeling would not find in a sketch stays with the ranks; or is estimated, as published"""

    fill: bool = True
    """A rank sends what it has wherever any rank chose; else, as published, its own choice alone"""

    micro: Literal["last", "each"] = "last"
    """The last micro-batch of a step sends the sum of all; or, as published, each its own"""

    selection: Literal["block", "table"] = "block"
    """The largest of every block; or, as published, what is above one of 25 thresholds: with the sketch alone, as its
    number is not known beforehand"""

    layers: Literal["non_attention", "all"] | list[str] = field(default="non_attention", metadata=LAYOUT)
    """Which matrices are compressed: those outside attention, all, or those with one of these names in their own"""

    min_entries: int = field(default=65536, metadata=LAYOUT)
    """Smaller parameters are sent whole"""

    reproduce: bool = False
    """Takes published settings that lose entries"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 <= self.sparsity < 1.0, "sparsity", "it must lie in [0, 1), for example 0.9")
        self.require(self.ratio >= 1.0, "ratio", "it must be 1 or more, for example 10")
        self.require(self.min_entries >= 1, "min_entries", "it must be 1 (all matrices) or more")
        if self.selection == "table":
            self.require(self.codec == "sketch", "selection", "it goes with codec = 'sketch' alone; take 'block'")
            self.require(self.index != "offsets", "index", "offsets need selection = 'block'; take 'auto' or 'bits'")

    @property
    def density(self) -> float:
        """Share of the entries that a rank chooses."""
        return 1.0 - self.sparsity

    @property
    def chosen(self) -> int:
        """Entries of a block that a rank chooses."""
        return entries_per_block(self.density, BLOCK)

    def index_among(self, ranks: int) -> str:
        """The form of the index: "bits", "offsets", "bit_sum" or "nibble_sum"."""
        if self.index != "auto":
            return self.index
        return "offsets" if self.selection == "block" and sends_offsets(self.density, ranks) else "bits"

    def planned(self, ranks: int) -> SparsePlan:
        """What the planner knows of these options."""
        index = self.index_among(ranks)
        width, ratio = 4 if index == "nibble_sum" else 1, self.ratio if self.codec == "sketch" else 0.0
        return SparsePlan(self.density, index, width, ratio, self.micro == "each", self.compresses)

    def check_among(self, ranks: int) -> None:
        """Refuses what so many ranks of the shard axis lose entries by. Raises ValueError."""
        if self.reproduce:
            return
        unless = "or set reproduce = true to have it as published"
        self.require(self.index != "bit_sum", "index", f"the sum of bytes loses entries; take 'auto', {unless}")
        counts = self.index != "nibble_sum" or ranks <= 15
        self.require(counts, "index", f"four bits count 15 ranks, and there are {ranks}; take 'auto', {unless}")
        if self.codec != "sketch":
            return
        self.require(self.left_over == "keep", "left_over", f"estimates are not what was sent; take 'keep', {unless}")
        union = min(1.0, ranks * self.density)
        fills = union * self.ratio
        most = FULLEST / self.ratio / ranks
        self.require(
            fills <= FULLEST,
            "sparsity",
            f"{ranks} ranks may choose {union:.3g} of the entries, {fills:.3g} for each cell of a "
            f"sketch with ratio {self.ratio:g}, which {FULLEST} can be; raise it to {1.0 - most:.4f}, lower ratio, "
            f"take codec = 'packed', {unless}",
        )

    def compresses(self, name: str, dims: int, entries: int) -> bool:
        """Whether a parameter is; dims and entries: of all of it."""
        if dims < 2 or entries < self.min_entries:
            return False
        if isinstance(self.layers, list):
            return any(f".{own}." in f".{name}." for own in self.layers)
        return self.layers == "all" or not any("attention" in part or "attn" in part for part in name.split("."))

"""TOML section [sharding.tagc]: options of TAGC on the shard axis.

No `from __future__ import annotations` in a file with a section: TorchTitan recognizes sections by
`is_dataclass(field.type)`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan_scape.core.options import LAYOUT, Options
from torchtitan_scape.core.workloads import Shape
from torchtitan_scape.kernels.scape.blocks import entries_per_block
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK, capacity, index_bytes, sends_offsets, sketch_rows

MAX_LOAD = 0.6  # Share of a sketch's cells that the union may fill; peeling fails above 0.818 in large sketches.
MIN_BLOCKS = 512  # Blocks of a sketch: peeling may fail in a smaller sketch even if it has enough cells.


@dataclass
class TagcShardingOptions(Options):
    """[sharding.tagc]: options of [sharding] gradients_code = "tagc". The method is TAGC (arXiv:2504.05638)."""

    section: ClassVar[str] = "sharding.tagc"

    sparsity: float = 0.9
    """Share of the entries that a rank does not select, in [0, 1), of every block of 1024; they stay in the residual"""

    code: Literal["packed", "sketch"] = "packed"
    """Encoding of values: packed in the order of the index, or, as published, in a count sketch"""

    ratio: float = 10.0
    """Entries per cell of a sketch, 1 or more"""

    index_code: Literal["auto", "bits", "offsets", "bit_sum"] = "auto"
    """Encoding of the selections: bitmaps combined by their owners, encoded offsets that are all-gathered, or ("auto")
    the shorter of the two; as published, sums of bytes (wrong if two ranks select the same entry)"""

    left_over: Literal["keep", "estimate"] = "keep"
    """Entries that peeling cannot recover from a sketch stay in the residual ("keep"), or are estimated, as
    published"""

    fill: bool = True
    """A rank sends its values at the whole index; else, as published, only at its own selection"""

    micro: Literal["last", "each"] = "last"
    """The last micro-batch of a step sends the sum of all ("last"), or, as published, each sends its own ("each")"""

    selection: Literal["block", "table"] = "block"
    """The largest entries of every block; or, as published, those above one of 25 thresholds: only with the sketch,
    because their number is not known in advance"""

    layers: Literal["non_attention", "all"] | list[str] = field(default="non_attention", metadata=LAYOUT)
    """Matrices that are compressed: those outside attention, all, or those whose name contains one of these
    components"""

    min_entries: int = field(default=65536, metadata=LAYOUT)
    """Smaller parameters are sent whole"""

    reproduce: bool = False
    """Allow published settings that lose entries"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 <= self.sparsity < 1.0, "sparsity", "it must lie in [0, 1), for example 0.9")
        self.require(self.ratio >= 1.0, "ratio", "it must be 1 or more, for example 10")
        self.require(self.min_entries >= 1, "min_entries", "it must be 1 (all matrices) or more")
        if self.selection == "table":
            self.require(self.code == "sketch", "selection", "it requires code = 'sketch'; set 'block'")
            self.require(
                self.index_code != "offsets", "index_code", "offsets need selection = 'block'; set 'auto' or 'bits'"
            )

    @property
    def density(self) -> float:
        """Share of the entries that a rank selects."""
        return 1.0 - self.sparsity

    @property
    def chosen(self) -> int:
        """Entries of a block that a rank selects."""
        return entries_per_block(self.density, BLOCK)

    def index_among(self, ranks: int) -> str:
        """Return the encoding of the index: "bits", "offsets" or "bit_sum"."""
        if self.index_code != "auto":
            return self.index_code
        return "offsets" if self.selection == "block" and sends_offsets(self.density, ranks) else "bits"

    def check_among(self, ranks: int) -> None:
        """Refuse options that lose entries with this number of ranks on the shard axis, unless `reproduce` is set.

        Raises:
            ValueError: With the option's value and the fix.
        """
        if self.reproduce:
            return
        unless = "or set reproduce = true to use the published variant"
        self.require(
            self.index_code != "bit_sum", "index_code", f"the sum of bytes loses entries; set 'auto', {unless}"
        )
        if self.code != "sketch":
            return
        self.require(
            self.left_over == "keep", "left_over", f"estimates differ from what was sent; set 'keep', {unless}"
        )
        union = min(1.0, ranks * self.density)
        load = union * self.ratio
        max_density = MAX_LOAD / self.ratio / ranks
        self.require(
            load <= MAX_LOAD,
            "sparsity",
            f"{ranks} ranks may select {union:.3g} of the entries, {load:.3g} per cell of a sketch with "
            f"ratio {self.ratio:g}, but at most {MAX_LOAD} is allowed; raise it to {1.0 - max_density:.4f}, "
            f"lower ratio, set code = 'packed', {unless}",
        )

    def compresses(self, name: str, dims: int, entries: int) -> bool:
        """Return whether a parameter is compressed, given its name and the dimensions and entries of the whole
        parameter.
        """
        if dims < 2 or entries < self.min_entries:
            return False
        if isinstance(self.layers, list):
            return any(f".{layer}." in f".{name}." for layer in self.layers)
        return self.layers == "all" or not any("attention" in part or "attn" in part for part in name.split("."))

    # ------------------------------------------------------------------------------------- planned bytes

    def blocks(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> int:
        """Return the number of compressed blocks of a row, from the shapes of a rank's shards."""
        sizes = (math.prod(shape) for shape in self._compressed(shapes, names, ranks))
        return sum(-(-size // BLOCK) for size in sizes)

    def gathered(self, blocks: int, ranks: int) -> float:
        """Return the bytes of the index that a rank contributes to the all-gather."""
        if self.index_among(ranks) == "offsets":
            return index_bytes(self.density, ranks * blocks)
        return blocks * BITMAP

    def exchanged(self, blocks: int, ranks: int) -> float:
        """Return the bytes of the index that a rank sends to the owners of its parts."""
        return 0.0 if self.index_among(ranks) == "offsets" else ranks * self.gathered(blocks, ranks)

    def values(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Return the bytes that a rank sends to the owners of rows, including parameters that are not compressed."""
        blocks = self.blocks(shapes, names, ranks)
        raw = sum(map(math.prod, shapes)) - sum(map(math.prod, self._compressed(shapes, names, ranks)))
        if self.code == "sketch":
            sent = sketch_rows(blocks, self.ratio) * BLOCK if blocks else 0
        else:
            sent = blocks * capacity(self.density, ranks)
        return 4.0 * ranks * (sent + raw)

    def _compressed(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> list[Shape]:
        pairs = zip(shapes, names, strict=True)
        return [shape for shape, name in pairs if self.compresses(name, len(shape), ranks * math.prod(shape))]

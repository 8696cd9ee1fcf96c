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
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK, capacity, index_bytes, sends_offsets


@dataclass
class TagcShardingOptions(Options):
    """[sharding.tagc]: options of [sharding] gradients_code = "tagc". The method is TAGC (arXiv:2504.05638)."""

    section: ClassVar[str] = "sharding.tagc"

    sparsity: float = 0.9
    """Share of the entries that a rank does not select, in [0, 1), of every block of 1024; they stay in the residual"""

    layers: Literal["non_attention", "all"] | list[str] = field(default="non_attention", metadata=LAYOUT)
    """Matrices that are compressed: those outside attention, all, or those whose name contains one of these
    components"""

    min_entries: int = field(default=65536, metadata=LAYOUT)
    """Smaller parameters are sent whole"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 <= self.sparsity < 1.0, "sparsity", "it must lie in [0, 1), for example 0.9")
        self.require(self.min_entries >= 1, "min_entries", "it must be 1 (all matrices) or more")

    @property
    def density(self) -> float:
        """Share of the entries that a rank selects."""
        return 1.0 - self.sparsity

    @property
    def chosen(self) -> int:
        """Entries of a block that a rank selects."""
        return entries_per_block(self.density, BLOCK)

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
        if sends_offsets(self.density, ranks):
            return index_bytes(self.density, ranks * blocks)
        return blocks * BITMAP

    def exchanged(self, blocks: int, ranks: int) -> float:
        """Return the bytes of the index that a rank sends to the owners of its parts."""
        return 0.0 if sends_offsets(self.density, ranks) else ranks * self.gathered(blocks, ranks)

    def values(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Return the bytes that a rank sends to the owners of rows, including parameters that are not compressed."""
        blocks = self.blocks(shapes, names, ranks)
        raw = sum(map(math.prod, shapes)) - sum(map(math.prod, self._compressed(shapes, names, ranks)))
        return 4.0 * ranks * (blocks * capacity(self.density, ranks) + raw)

    def _compressed(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> list[Shape]:
        pairs = zip(shapes, names, strict=True)
        return [shape for shape, name in pairs if self.compresses(name, len(shape), ranks * math.prod(shape))]

"""Closed form of the traffic and memory of TAGC on the shard axis. Plain arithmetic: no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_scape.core.workloads import Shape
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK, capacity, index_bytes, sketch_rows


@dataclass(frozen=True)
class SparsePlan:
    """Options of TAGC, as the closed form needs them.

    Attributes:
        density: Share of the entries that a rank selects.
        index: "offsets" are all-gathered; otherwise bitmaps are combined by the owners of their parts and all-gathered.
        ratio: Entries per cell of a sketch; 0 for packed values.
        each: Every micro-batch is exchanged.
        compresses: Whether a parameter is compressed, as a function of (name, dimensions, entries).
    """

    density: float
    index: str
    ratio: float
    each: bool
    compresses: Callable[[str, int, int], bool]

    def blocks(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> int:
        """Return the number of compressed blocks of a row."""
        return sum(
            -(-math.prod(s) // BLOCK)
            for s, name in zip(shapes, names, strict=True)
            if self._is_compressed(s, name, ranks)
        )

    def gathered(self, blocks: int, ranks: int) -> float:
        """Return the bytes of the index that a rank contributes to the all-gather."""
        if self.index == "offsets":
            return index_bytes(self.density, ranks * blocks)
        return blocks * BITMAP

    def exchanged(self, blocks: int, ranks: int) -> float:
        """Return the bytes of the index that a rank sends to the owners of its parts."""
        return 0.0 if self.index == "offsets" else ranks * self.gathered(blocks, ranks)

    def values(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Return the bytes that a rank sends to the owners of rows, including parameters that are not compressed."""
        blocks = self.blocks(shapes, names, ranks)
        raw = sum(
            math.prod(s) for s, name in zip(shapes, names, strict=True) if not self._is_compressed(s, name, ranks)
        )
        if self.ratio:
            sent = sketch_rows(blocks, self.ratio) * BLOCK if blocks else 0
        else:
            sent = blocks * capacity(self.density, ranks)
        return 4.0 * ranks * (sent + raw)

    def kept(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Return the bytes of the residual, which covers the rows of all ranks."""
        return 4.0 * ranks * self.blocks(shapes, names, ranks) * BLOCK

    def _is_compressed(self, shape: Shape, name: str, ranks: int) -> bool:
        return self.compresses(name, len(shape), ranks * math.prod(shape))

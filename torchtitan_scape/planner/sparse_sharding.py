"""What TAGC sends and keeps on the shard axis, in closed form. Plain arithmetic: no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.tagc.formats import BITMAP, BLOCK, capacity, index_bytes, sketch_rows
from torchtitan_scape.core.workloads import Shape


@dataclass(frozen=True)
class SparsePlan:
    """density: share of its entries that a rank chooses. index: "offsets" that are gathered, or else bits of which
    owners unite a part; `width` of an entry. ratio: of a sketch, 0 for packed values. each: every micro-batch sends.
    compresses: of a parameter's name, dimensions and entries.
    """

    density: float
    index: str
    width: int
    ratio: float
    each: bool
    compresses: Callable[[str, int, int], bool]

    def blocks(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> int:
        """Of what is compressed of a row."""
        return sum(
            -(-math.prod(s) // BLOCK) for s, name in zip(shapes, names, strict=True) if self._takes(s, name, ranks)
        )

    def gathered(self, blocks: int, ranks: int) -> float:
        """Own bytes of the index that are gathered."""
        if self.index == "offsets":
            return index_bytes(self.density, ranks * blocks)
        return self.width * blocks * BITMAP

    def exchanged(self, blocks: int, ranks: int) -> float:
        """Bytes of the index that go to the owners of their parts."""
        return 0.0 if self.index == "offsets" else ranks * self.gathered(blocks, ranks)

    def values(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Bytes that go to the owners of rows, what is not compressed included."""
        blocks = self.blocks(shapes, names, ranks)
        raw = sum(math.prod(s) for s, name in zip(shapes, names, strict=True) if not self._takes(s, name, ranks))
        if self.ratio:
            sent = sketch_rows(blocks, self.ratio) * BLOCK if blocks else 0
        else:
            sent = blocks * capacity(self.density, ranks)
        return 4.0 * ranks * (sent + raw)

    def kept(self, shapes: Sequence[Shape], names: Sequence[str], ranks: int) -> float:
        """Bytes of the residual: of the rows of all ranks."""
        return 4.0 * ranks * self.blocks(shapes, names, ranks) * BLOCK

    def _takes(self, shape: Shape, name: str, ranks: int) -> bool:
        return self.compresses(name, len(shape), ranks * math.prod(shape))

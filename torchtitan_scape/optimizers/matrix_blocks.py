"""Contiguous blocks of rows or columns that Muon orthogonalizes one by one, such as query, key and value."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, matching

# By name or pattern: the number of equal blocks of rows, or the sizes of blocks of rows or columns.
MatrixSplit = Mapping[str, int | Sequence[int]]
ROWS, COLUMNS = -2, -1  # dimensions of a matrix or a stack of matrices


@dataclass(frozen=True)
class MatrixBlocks:
    """The division of a matrix (a, b), or of every matrix of a stack, along one dimension.

    Attributes:
        shape: (a, b).
        sizes: Rows or columns of every block; a single block is the whole matrix.
        dim: `ROWS` or `COLUMNS`.
    """

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    dim: int = ROWS

    @classmethod
    def whole(cls, shard: Shard) -> "MatrixBlocks":
        rows, columns = shard.whole_shape[-2:]
        return cls((rows, columns), (rows,))

    def parts(self, local: Tensor, first_row: int = 0) -> Iterator[tuple[Tensor, float]]:
        """Yield views of the blocks, and the scales that give their updates a root mean square of 0.2 at a learning
        rate of 1: 0.2 sqrt(max(rows, columns)) of the block.

        Args:
            local: (n, b), rows of the matrix from `first_row` on, which may be a part of a block; or a stack.
        """
        if len(self.sizes) == 1:
            yield local, _step_scale(self.shape)
            return
        first, end, begin = (first_row if self.dim == ROWS else 0), 0, 0
        for size in self.sizes:
            begin, end = end, end + size
            low, high = max(begin, first), min(end, first + local.shape[self.dim])
            shape = (size, self.shape[1]) if self.dim == ROWS else (self.shape[0], size)
            if low < high:
                yield local.narrow(self.dim, low - first, high - low), _step_scale(shape)

    def whole_parts(self, matrix: Tensor) -> Sequence[Tensor]:
        """Return views of the blocks of a whole matrix or stack."""
        return [matrix] if len(self.sizes) == 1 else torch.split(matrix, self.sizes, self.dim)  # type: ignore[no-any-return, no-untyped-call]


def _step_scale(shape: Sequence[int]) -> float:
    return 0.2 * math.sqrt(max(shape))


def blocks_of(hidden: Sequence[Shard], split: MatrixSplit | None) -> dict[int, MatrixBlocks]:
    """Return the blocks of Muon's matrices, by id of the parameter, in the order of `hidden`.

    Raises:
        ValueError: A pattern matches none of them, two match the same, or the sizes do not fit.
    """
    found = {id(shard.parameter): MatrixBlocks.whole(shard) for shard in hidden}
    by: dict[int, str] = {}
    split = {} if split is None else split
    if not isinstance(split, Mapping) or not all(isinstance(pattern, str) for pattern in split):
        raise ValueError(
            f"split, of type {type(split).__name__}, must be a dictionary from names or patterns to blocks, such as "
            "{'*.c_attn.weight': 3}"
        )
    for pattern, blocks in split.items():
        matches = matching(hidden, pattern)
        if not matches:
            raise ValueError(
                f"split contains {pattern!r}, which matches none of Muon's matrices, such as {hidden[0].name!r}; * is "
                "a wildcard, and matrices= chooses further ones"
            )
        for shard in matches:
            i = id(shard.parameter)
            if i in by:
                raise ValueError(f"{by[i]!r} and {pattern!r} of split both match {shard.name!r}; keep one of them")
            by[i] = pattern
            found[i] = _divided(shard.name, found[i].shape, blocks)
    return found


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _divided(name: str, shape: tuple[int, int], blocks: int | Sequence[int]) -> MatrixBlocks:
    rows, columns = shape
    given = f"split of {name!r}, a matrix of ({rows}, {columns}), is {blocks!r}"
    if _is_count(blocks):
        if blocks > 1 and columns == blocks * rows:
            width = columns // blocks
            raise ValueError(
                f"{given}, which divides rows; the columns seem to be the fused ones, as in transformers' Conv1D: pass "
                f"the sizes {(width,) * blocks}"
            )
        if rows % blocks:
            raise ValueError(f"{given}; it must divide the rows, or be the sizes of all blocks")
        return MatrixBlocks(shape, (rows // blocks,) * blocks)
    sizes = tuple(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else ()
    if not sizes or not all(map(_is_count, sizes)):
        raise ValueError(
            f"{given} of type {type(blocks).__name__}; it must be a number of equal blocks of rows, or the sizes of "
            "all blocks, positive integers. Blocks are contiguous; leave out matrices whose query, key and value are "
            "interleaved"
        )
    if sum(sizes) not in shape:
        raise ValueError(f"{given}, {sum(sizes)} together; the sizes must add up to its rows or its columns")
    return MatrixBlocks(shape, sizes, ROWS if sum(sizes) == rows else COLUMNS)

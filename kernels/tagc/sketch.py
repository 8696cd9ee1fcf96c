"""Layout of a count sketch: each block of a tensor is added to three rows of cells, chosen by hashes of its index."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_scape.kernels.tagc.formats import sketch_rows

HASHES = 3
ATTEMPTS = 16  # maximum attempts to find a unique set of rows for a block; with many blocks some sets are shared
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sketch:
    """Layout of a count sketch of blocks of 1024 entries: entry i of a block is added to cell i of three rows, signed.

    The hash with seed i is murmur3 of the block's index; its top bit is the sign, as published. It selects a row in
    the i-th third of the rows, so that no block uses a row twice, which peeling could not resolve. A block with the
    same three rows as an earlier one uses the next three seeds, because peeling cannot separate entries with the same
    cells.

    Attributes:
        rows: Number of rows of cells.
        block_rows: int32 (3, blocks), the rows of each block.
        signs: FP32 (3, blocks).
    """

    rows: int
    block_rows: Tensor
    signs: Tensor

    @classmethod
    def of(cls, blocks: int, ratio: float, device: torch.device, variant: int = 0) -> "Sketch":
        """Return the layout of a sketch with about `blocks` / `ratio` rows, at least three.

        variant: selects the seeds; entries that cannot be separated in one variant can be in another.
        """
        rows = sketch_rows(blocks, ratio)
        ends = [i * rows // HASHES for i in range(HASHES + 1)]
        hashed = torch.empty(HASHES, blocks, dtype=torch.int64, device="cpu")
        pending = torch.arange(blocks, device="cpu")
        for attempt in range(ATTEMPTS):
            for i in range(HASHES):
                hashed[i, pending] = murmur3(pending, HASHES * (ATTEMPTS * variant + attempt) + i)
            chosen = torch.stack([ends[i] + (h & 0x7FFFFFFF) % (ends[i + 1] - ends[i]) for i, h in enumerate(hashed)])
            pending = _repeated((chosen[0] * rows + chosen[1]) * rows + chosen[2])
        signs = 1.0 - 2.0 * (hashed >> 31).float()
        return cls(rows, chosen.int().to(device), signs.to(device))

    def repeated(self, count: int) -> "Sketch":
        """Return the layout of `count` separate sketches of as many tensors, one after the other."""
        first_rows = torch.arange(count, dtype=torch.int32, device=self.block_rows.device)[:, None] * self.rows
        block_rows = (self.block_rows[:, None] + first_rows).flatten(1)
        return Sketch(count * self.rows, block_rows, self.signs.repeat(1, count))

    @cached_property
    def members(self) -> Tensor:
        """The blocks of each row, int32 (rows, most): signed block index plus one, in order, padded with zeros."""
        blocks = self.block_rows.shape[1]
        rows = self.block_rows.cpu().view(-1).long()
        order = rows.argsort(stable=True)  # stable: the blocks of a row stay in order
        sizes = rows.bincount(minlength=self.rows)
        column = torch.arange(rows.numel(), device="cpu") - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        found = torch.zeros(self.rows, int(sizes.max()) if rows.numel() else 0, dtype=torch.int32, device="cpu")
        signed = (order % max(1, blocks) + 1) * self.signs.cpu().view(-1)[order].long()
        found[rows[order], column] = signed.int()
        return found.to(self.block_rows.device)

    def each_hash(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the hashes: rows, int32 (blocks,), and signs, FP32 (blocks, 1)."""
        return zip(self.block_rows, self.signs.unsqueeze(2), strict=True)

    def each_member(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the columns of `members`: blocks, int32 (rows,), and signs, FP32 (rows, 1), 0 for padding."""
        for column in self.members.t():
            yield (column.abs() - 1).clamp(min=0), column.sign().float().unsqueeze(1)


def _repeated(keys: Tensor) -> Tensor:
    """Return the indices of the keys, int64 (n,), that occurred at a lower index before."""
    order = keys.argsort(stable=True)
    return order[1:][keys[order][1:] == keys[order][:-1]]


def murmur3(keys: Tensor, seed: int) -> Tensor:
    """Return MurmurHash3 (x86, 32 bits) of int64 keys below 2^32, taken as four bytes, as int64 (n,)."""
    h = _rotate_left(keys * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    h = (_rotate_left(seed ^ h, 13) * 5 + 0xE6546B64 & _WORD) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & _WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & _WORD
    return h ^ h >> 16


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits | x >> 32 - bits) & _WORD

"""Where a count sketch adds the blocks of a tensor: three rows of cells a block, by hashes of its number."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.tagc.formats import sketch_rows

HASHES = 3
ATTEMPTS = 16  # to find rows of its own for a block; where there are more blocks than choices some share theirs
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sketch:
    """The cells of blocks of 1024 entries: a block's lane i goes into lane i of three rows, with a sign in each.

    The hash with seed i is murmur3 of the block's number; its top bit is the sign, as published. It points into the
    i-th third of the rows, so that no block has the same row twice, which peeling could not undo; and a block whose
    rows are those of an earlier one takes the next three seeds: two entries with the same cells would never come apart.

    rows: of cells. places: int32 (3, blocks), signs: FP32 (3, blocks).
    """

    rows: int
    places: Tensor
    signs: Tensor

    @classmethod
    def of(cls, blocks: int, ratio: float, device: torch.device, turn: int = 0) -> "Sketch":
        """Of so many blocks in about 1 / ratio as many rows, at least three.

        turn: another one has other seeds: what does not come apart in one sketch does in the next.
        """
        rows = sketch_rows(blocks, ratio)
        ends = [i * rows // HASHES for i in range(HASHES + 1)]
        hashed = torch.empty(HASHES, blocks, dtype=torch.int64)
        again = torch.arange(blocks)
        for attempt in range(ATTEMPTS):
            for i in range(HASHES):
                hashed[i, again] = murmur3(again, HASHES * (ATTEMPTS * turn + attempt) + i)
            places = torch.stack([ends[i] + (h & 0x7FFFFFFF) % (ends[i + 1] - ends[i]) for i, h in enumerate(hashed)])
            again = _repeated((places[0] * rows + places[1]) * rows + places[2])
        signs = 1.0 - 2.0 * (hashed >> 31).float()
        return cls(rows, places.int().to(device), signs.to(device))

    @cached_property
    def members(self) -> Tensor:
        """int32 (rows, most): the blocks of each row in their order, plus 1 and with their sign; then zeros."""
        blocks = self.places.shape[1]
        rows = self.places.cpu().view(-1).long()
        order = rows.argsort(stable=True)  # a row belongs to one hash, so that its blocks stay in their order
        sizes = rows.bincount(minlength=self.rows)
        column = torch.arange(rows.numel()) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        found = torch.zeros(self.rows, int(sizes.max()) if rows.numel() else 0, dtype=torch.int32)
        signed = (order % max(1, blocks) + 1) * self.signs.cpu().view(-1)[order].long()
        found[rows[order], column] = signed.int()
        return found.to(self.places.device)

    def each_hash(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows int32 (blocks,) and signs FP32 (blocks, 1), hash by hash."""
        return zip(self.places, self.signs.unsqueeze(2), strict=True)

    def each_member(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks int32 (rows,) and signs FP32 (rows, 1): the first of all rows, and so on; 0 where there is none."""
        for column in self.members.t():
            yield (column.abs() - 1).clamp(min=0), column.sign().float().unsqueeze(1)


def _repeated(keys: Tensor) -> Tensor:
    """Positions of what stood before, of int64 (n,)."""
    order = keys.argsort(stable=True)
    return order[1:][keys[order][1:] == keys[order][:-1]]


def murmur3(keys: Tensor, seed: int) -> Tensor:
    """int64 (n,): MurmurHash3 (32 bits, x86) of int64 keys below 2^32, as words of four bytes."""
    h = _turned(keys * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    h = (_turned(seed ^ h, 13) * 5 + 0xE6546B64 & _WORD) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & _WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & _WORD
    return h ^ h >> 16


def _turned(x: Tensor, bits: int) -> Tensor:
    return (x << bits | x >> 32 - bits) & _WORD

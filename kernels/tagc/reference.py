"""TAGC passes in plain PyTorch: the specification, and the CPU implementation.

Entries are divided into blocks of 1024; a short last block is padded with zeros. Bitmaps are packed, entry i in bit
i % 8 of byte i // 8, and have whole blocks: uint8 (blocks * 128,). The index is the bitmap that all ranks share.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.common.dry_run import in_dry_run
from torchtitan_scape.kernels.common.launching import to_device
from torchtitan_scape.kernels.common.torch_common import add_in_order_, masked_copy_
from torchtitan_scape.kernels.scape.blocks import offset_bytes
from torchtitan_scape.kernels.scape.reference import (
    decode_offsets,
    encode_offsets,
    mask_indices,
    offsets_to_mask,
    pack_bits,
    select_rows,
    unpack_bits,
)
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK, sketch_rows

ROUNDS = 64  # maximum rounds of peeling
# Thresholds of the selection "table", from the published code.
THRESHOLDS = (1e-20, 1e-15, 1e-10, 1e-8, *(m * 10.0**e for e in range(-7, 0) for m in (1.0, 2.0, 5.0)))
HASHES = 3  # of a count sketch
ATTEMPTS = 16  # maximum attempts to find a unique set of rows for a block; with many blocks some sets are shared
_WORD = 0xFFFFFFFF


# -------------------------------------------------------------------------------- selected indices


def union_of_bitmaps(maps: Tensor) -> Tensor:
    """Return the bitwise OR of the rows of uint8 (ranks, bytes), uint8 (bytes,)."""
    while len(maps) > 1:  # by halves, so that few launches suffice
        half = len(maps) // 2
        combined = maps[:half] | maps[half : 2 * half]
        maps = torch.cat((combined, maps[2 * half :])) if len(maps) % 2 else combined
    return maps[0]


def sum_bytes(maps: Tensor) -> Tensor:
    """Return the sum of the rows of uint8 (ranks, bytes) modulo 256, uint8 (bytes,).

    The published code applies it to bitmaps, where a bit that two ranks set carries into the next bit.
    """
    return maps.sum(0, dtype=torch.uint8)


def select_above(rows: Tensor, sparsity: float) -> Tensor:
    """Return the bitmaps of the entries of each row, FP32 (rows, blocks * 1024), with |x| >= a threshold of the row.

    The threshold is the largest of `THRESHOLDS` with less than a fraction `sparsity` of the row's entries below it. If
    there is none, all nonzero entries are selected.

    Returns:
        uint8 (rows * blocks * 128,).
    """
    thresholds = to_device(torch.tensor(THRESHOLDS, dtype=torch.float32, device="cpu"), rows.device)
    reached = torch.bucketize(rows.abs(), thresholds, out_int32=True, right=True)  # number of thresholds <= |x|
    # Binary search for the number of thresholds that satisfy the condition, because the entries below them increase.
    valid = torch.zeros(len(rows), 1, dtype=torch.int32, device=rows.device)
    for step in (16, 8, 4, 2, 1):
        below = (reached < valid + step).sum(1, keepdim=True)
        # As FP32: PyTorch compares integers and a number in the default dtype.
        valid += (below.float() < sparsity * rows.shape[1]).int() * step
    return pack_bits(torch.where(valid > 0, reached >= valid, rows != 0).view(-1))


def select(x: Tensor, k: int) -> Tensor:
    """Return the bitmap of the k largest |x| of each block; ties go to the lower index. x: FP32 (n,)."""
    return offsets_to_mask(select_rows(in_blocks(x), k), BLOCK)


def to_offsets(bits: Tensor, k: int) -> Tensor:
    """Encode a bitmap with k set bits per block as offsets. The length is `formats.index_bytes`."""
    blocks = bits.numel() // BITMAP
    coded = encode_offsets(mask_indices(bits, blocks * BLOCK, blocks * k).view(blocks, k) % BLOCK, BLOCK)
    return pad(coded, (0, padded_bytes(coded.numel()) - coded.numel()))


def union_of_offsets(coded: Tensor, blocks: int, k: int) -> Tensor:
    """Decode the offsets of all ranks, uint8 (ranks, bytes), and return the bitwise OR of their bitmaps."""
    rows = coded[:, : offset_bytes(blocks, k, BLOCK)]
    together = max(1, BLOCK // k)  # ranks that are decoded at once; more need more memory than the entries themselves
    masks = []
    for part in rows.split(together):
        offsets = decode_offsets(part.reshape(-1), len(part) * blocks, k, BLOCK).view(len(part), blocks, k)
        masks.append(offsets_to_mask(offsets.transpose(0, 1).reshape(blocks, -1), BLOCK))
    return union_of_bitmaps(torch.stack(masks))


def pack(
    x: Tensor,
    index: Tensor,
    own: Tensor,
    capacity: int,
    out: Tensor,
    rest: Tensor | None = None,
    applied: Tensor | None = None,
) -> None:
    """Move the entries of x at the index to a packed payload. Every entry is in exactly one of both, unchanged.

    Args:
        x: FP32 (n,); sent entries are set to zero, unless `rest` is given.
        index: Bitmap of all ranks. The first `capacity` entries of each block are packed.
        own: Bitmap of the entries that this rank sends; `index` itself to send all of them.
        capacity: Packed entries of a block.
        out: FP32 (blocks, capacity), written: the values of a block in ascending order of their indices, then zeros.
        rest: FP32 (n,), becomes x without the sent entries if `applied`.
        applied: bool ().
    """
    packed, position = packed_positions(index, capacity)
    sent = packed if own is index else packed & unpack_bits(own, packed.numel()).view(packed.shape)
    values = in_blocks(x)
    # One additional slot receives the entries that are not packed.
    slots = out.new_zeros(out.shape[0], capacity + 1)
    slots.scatter_(1, torch.where(packed, position, capacity), torch.where(sent, values, 0.0))
    out.copy_(slots[:, :capacity])
    left = torch.where(sent, 0.0, values).view(-1)[: x.numel()]
    if rest is None or applied is None:
        x.copy_(left)
    else:
        masked_copy_(rest, left, applied)


def expand(packed: Tensor, index: Tensor, out: Tensor) -> None:
    """Write the sum of packed payloads to `out`, FP32 (n,), at the index, and zero elsewhere.

    packed: FP32 (ranks, blocks, capacity), payloads of `pack`, which are added in rank order.
    """
    total = torch.zeros_like(packed[0])
    add_in_order_(total, packed)
    valid, position = packed_positions(index, packed.shape[2])
    values = torch.where(valid, total.gather(1, position.clamp_(max=packed.shape[2] - 1)), 0.0)
    out.copy_(values.view(-1)[: out.numel()])


# -------------------------------------------------------------------------------- count sketch


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
        members = torch.zeros(self.rows, int(sizes.max()) if rows.numel() else 0, dtype=torch.int32, device="cpu")
        signed = (order % max(1, blocks) + 1) * self.signs.cpu().view(-1)[order].long()
        members[rows[order], column] = signed.int()
        return members.to(self.block_rows.device)

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


def fold(x: Tensor, own: Tensor, sketch: Sketch, out: Tensor) -> None:
    """Write a count sketch of the entries of x in the bitmap `own` to `out`, FP32 (rows, 1024).

    x: FP32 (blocks * 1024,); blocks are added in order.
    """
    values = torch.where(unpack_bits(own, x.numel()), x, 0.0).view(-1, BLOCK)
    out.zero_()
    for block, sign in sketch.each_member():
        out += torch.where(sign != 0, values.index_select(0, block) * sign, 0.0)


def peel(state: Tensor, cells: Tensor | None, values: Tensor | None, sketch: Sketch) -> None:
    """Recover entries in rounds: read those that are alone in one of their cells, and subtract them from all three.

    Args:
        state: As in `states_of`, written.
        cells: FP32 (rows, 1024), written; None to update only the states.
        values: FP32 (blocks, 1024), receives the recovered values.
        sketch: Layout of the sketch.
    """
    count = torch.zeros(sketch.rows, BLOCK, dtype=torch.int32, device=state.device)
    for block, sign in sketch.each_member():
        count += (state.index_select(0, block) * sign.abs()).int()
    for _ in range(ROUNDS):
        state.masked_fill_(state == 2, 3)
        left = state == 1
        for rows, signs in sketch.each_hash():
            alone = left & (count.index_select(0, rows) == 1)
            state.masked_fill_(alone, 2)
            left &= ~alone
            if cells is not None and values is not None:
                values.copy_(torch.where(alone, cells.index_select(0, rows) * signs, values))
        if state.is_cpu and not in_dry_run() and not (state == 2).any():
            return
        for block, sign in sketch.each_member():
            removed = (state.index_select(0, block) == 2) & (sign != 0)
            count -= removed.int()
            if cells is not None and values is not None:
                cells -= torch.where(removed, values.index_select(0, block) * sign, 0.0)


def solvable(bits: Tensor, sketch: Sketch, peel: Callable[..., None] = peel) -> Tensor:
    """Return the bitmap of the entries that peeling recovers from a sketch of the entries in `bits`.

    It depends on `bits` and the sketch only, not on the values. peel: `peel` of this module or of `triton_passes`.
    """
    state = states_of(bits)
    peel(state, None, None, sketch)
    return pack_bits((state > 1).view(-1))


def unfold(
    cells: Tensor, bits: Tensor, sketch: Sketch, estimate: bool, out: Tensor, peel: Callable[..., None] = peel
) -> None:
    """Recover the entries in `bits` from their sketch, to `out`, FP32 (blocks * 1024,); zero elsewhere.

    Args:
        cells: FP32 (rows, 1024), the sketch; overwritten.
        bits: Bitmap of the entries in the sketch.
        sketch: Layout of the sketch.
        estimate: Set entries that peeling cannot recover to the median of their three cells; otherwise to zero.
        out: Written.
        peel: See `solvable`.
    """
    state, values = states_of(bits), out.zero_().view(-1, BLOCK)
    peel(state, cells, values, sketch)
    if estimate:
        values.copy_(torch.where(state == 1, estimates(cells, sketch), values))


# ----------------------------------------------------------------------------------------------------- helpers


def in_blocks(x: Tensor) -> Tensor:
    """Return x (n,) as (blocks, 1024), a view if no padding is needed."""
    return pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def packed_positions(index: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return for every entry whether it is packed, bool, and its position in its block, int64 (blocks, 1024)."""
    bits = unpack_bits(index, 8 * index.numel()).view(-1, BLOCK)
    position = bits.cumsum(1).sub_(1)
    return bits & (position < capacity), position.clamp_(min=0)


def states_of(bits: Tensor) -> Tensor:
    """Return the initial states of peeling, uint8 (blocks, 1024): 0 not in the sketch, 1 in the sketch.

    Peeling sets 2 for entries that were recovered in the current round, and 3 in an earlier one.
    """
    return unpack_bits(bits, 8 * bits.numel()).view(torch.uint8).view(-1, BLOCK)


def estimates(cells: Tensor, sketch: Sketch) -> Tensor:
    """Return the median of the three cells of every entry, FP32 (blocks, 1024)."""
    a, b, c = (cells.index_select(0, rows) * signs for rows, signs in sketch.each_hash())
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))

"""TAGC's reference passes, for several ranks in one process, against plain implementations."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.tagc.checks import values
from torchtitan_scape.kernels.scape.reference import pack_bits, unpack_bits
from torchtitan_scape.kernels.tagc import formats, reference
from torchtitan_scape.kernels.tagc.formats import BLOCK
from torchtitan_scape.kernels.tagc.reference import (
    THRESHOLDS,
    Sketch,
    murmur3,
    select_above,
    sum_bytes,
    union_of_bitmaps,
)


def bools(bits: Tensor, n: int) -> list[bool]:
    return unpack_bits(bits, n).tolist()


def selected(x: Tensor, k: int) -> list[bool]:
    """Return the k largest of every block; ties go to the lower index, and the last block is padded with zeros."""
    found = [False] * (-(-x.numel() // BLOCK) * BLOCK)
    padded = x.abs().tolist() + [0.0] * (len(found) - x.numel())
    for first in range(0, len(found), BLOCK):
        order = sorted(range(first, first + BLOCK), key=lambda i: (-padded[i], i))
        for i in order[:k]:
            found[i] = True
    return found


def in_rank_order(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for one in tensors:
        total += one
    return total


@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_of_every_block_are_selected(ties: bool) -> None:
    x = values(BLOCK + 300, 0, ties)
    for k in (1, 102, 400, BLOCK):
        assert bools(reference.select(x, k), 2 * BLOCK) == selected(x, k)


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize(("ranks", "n", "k"), [(1, 100, 3), (3, 2 * BLOCK + 77, 51), (4, BLOCK, 300)])
def test_payload_and_residual_are_the_input(ranks: int, n: int, k: int, fill: bool) -> None:
    """Bitwise on every rank; the owner receives the exact sum of the sent entries in rank order."""
    given = [values(n, seed) for seed in range(ranks)]
    own = [reference.select(x, k) for x in given]
    index, slots = union_of_bitmaps(torch.stack(own)), formats.capacity(k / BLOCK, ranks)
    union = torch.tensor([any(choices) for choices in zip(*(selected(x, k) for x in given), strict=True)])[:n]
    assert torch.equal(unpack_bits(index, n), union)
    packed, sent = torch.empty(ranks, -(-n // BLOCK), slots), []
    for x, choice, out in zip(given, own, packed, strict=True):
        left = x.clone()
        reference.pack(left, index, index if fill else choice, slots, out)
        packed_entries = union if fill else union & unpack_bits(choice, n)
        sent.append(torch.where(packed_entries, x, 0.0))
        assert torch.equal(sent[-1] + left, x) and not left[packed_entries].any()
    found = torch.empty(n)
    reference.expand(packed, index, found)
    assert torch.equal(found, in_rank_order(sent))


def test_full_density_sends_everything() -> None:
    given = [values(BLOCK + 10, seed) for seed in range(3)]
    index = union_of_bitmaps(torch.stack([reference.select(x, BLOCK) for x in given]))
    packed = torch.empty(3, 2, formats.capacity(1.0, 3))
    for x, out in zip(given, packed, strict=True):
        left = x.clone()
        reference.pack(left, index, index, BLOCK, out)
        assert not left.any()
    found = torch.empty(BLOCK + 10)
    reference.expand(packed, index, found)
    assert torch.equal(found, in_rank_order(given))


@pytest.mark.parametrize("k", [13, 205])
def test_the_index_is_the_union_of_all_choices(k: int) -> None:
    """As bitmap and as offsets. The published sum of bytes drops and adds entries."""
    own = torch.stack([reference.select(values(8 * BLOCK, seed), k) for seed in range(3)])
    union = torch.stack([unpack_bits(bits, 8 * BLOCK) for bits in own]).any(0)
    coded = torch.stack([reference.to_offsets(bits, k) for bits in own])
    assert coded.shape[1] == formats.index_bytes(k / BLOCK, 8)
    for index in (union_of_bitmaps(own), reference.union_of_offsets(coded, 8, k)):
        assert torch.equal(unpack_bits(index, 8 * BLOCK), union)
    summed = unpack_bits(sum_bytes(own), 8 * BLOCK)
    assert (union & ~summed).any() and (summed & ~union).any()


def test_offsets_are_used_where_they_are_shorter() -> None:
    """102 offsets in 1024 need 67 bytes, which is less than the bitmap for two or three ranks, but not for four."""
    assert [formats.sends_offsets(0.1, ranks) for ranks in (2, 3, 4)] == [True, True, False]
    assert [formats.sends_offsets(0.0125, ranks) for ranks in (2, 18, 19)] == [True, True, False]
    assert formats.capacity(0.1, 2) == 204 and formats.capacity(0.1, 11) == BLOCK
    assert formats.bitmap_bytes(3, 5) == 400 and formats.index_bytes(0.1, 3) == 3 * 67 + 7


# ---------------------------------------------------------------------------------------------------- the sketch


def test_hashes_are_murmur3() -> None:
    keys = torch.tensor([0, 0x87654321])
    assert murmur3(keys, 0).tolist() == [0x2362F9DE, 0xF55B516B]
    assert murmur3(keys[1:], 0x5082EDEE).tolist() == [0x2362F9DE]


def test_a_repeated_sketch_is_that_of_every_tensor() -> None:
    """Sketches and recoverable entries of three tensors at once have the bits of those of each tensor."""
    sketch = Sketch.of(40, 2.0, torch.device("cpu"))
    given = torch.stack([values(40 * BLOCK, seed) for seed in range(3)])
    bits = torch.stack([reference.select(x, 300) for x in given])
    repeated, cells = sketch.repeated(3), torch.empty(3, sketch.rows, BLOCK)
    reference.fold(given.view(-1), bits.view(-1), repeated, cells.view(-1, BLOCK))
    for x, own, one in zip(given, bits, cells, strict=True):
        alone = torch.empty_like(one)
        reference.fold(x, own, sketch, alone)
        assert torch.equal(one, alone)
    alone = torch.cat([reference.solvable(own, sketch) for own in bits])
    assert torch.equal(reference.solvable(bits.view(-1), repeated), alone) and alone.any() and not alone.equal(bits)


@pytest.mark.parametrize("blocks", [1, 40])
def test_members_are_the_inverse_of_block_rows(blocks: int) -> None:
    sketch = Sketch.of(blocks, 4.0, torch.device("cpu"))
    assert sketch.rows == max(3, -(-blocks // 4))
    expected: list[list[int]] = [[] for _ in range(sketch.rows)]
    for block in range(blocks):
        rows = sketch.block_rows[:, block].tolist()
        assert len(set(rows)) == 3
        for row, sign in zip(rows, sketch.signs[:, block].tolist(), strict=True):
            expected[row].append(int(sign) * (block + 1))
    assert [[m for m in row if m] for row in sketch.members.tolist()] == expected


def peeled(bits: Tensor, sketch: Sketch) -> Tensor:
    """Return the entries that peeling recovers, column by column, one at a time: the order does not matter."""
    there = unpack_bits(bits, 8 * bits.numel()).view(-1, BLOCK)
    found = torch.zeros_like(there)
    for column in range(BLOCK):
        left = set(there[:, column].nonzero().view(-1).tolist())
        while True:
            rows = [row for block in left for row in sketch.block_rows[:, block].tolist()]
            alone = [
                block for block in left if any(rows.count(row) == 1 for row in sketch.block_rows[:, block].tolist())
            ]
            if not alone:
                break
            left.remove(alone[0])
            found[alone[0], column] = True
    return found


@pytest.mark.parametrize(("k", "ratio"), [(40, 2.0), (300, 2.0), (700, 1.0), (1024, 1.0)])
def test_recoverable_entries_are_known_in_advance(k: int, ratio: float) -> None:
    """Without these entries, all others are recovered exactly, however full the sketch is."""
    blocks, ranks = 9, 2
    sketch, given = Sketch.of(blocks, ratio, torch.device("cpu")), [values(blocks * BLOCK, s, True) for s in (0, 1)]
    index = union_of_bitmaps(torch.stack([reference.select(x, k) for x in given]))
    solvable = reference.solvable(index, sketch)
    assert torch.equal(unpack_bits(solvable, blocks * BLOCK).view(-1, BLOCK), peeled(index, sketch))
    cells = torch.empty(ranks, sketch.rows, BLOCK)
    for x, one in zip(given, cells, strict=True):
        reference.fold(x, solvable, sketch, one)
    found = torch.empty(blocks * BLOCK)
    reference.unfold(in_rank_order(list(cells)), solvable, sketch, False, found)
    sent = [torch.where(unpack_bits(solvable, x.numel()), x, 0.0) for x in given]
    assert torch.equal(found, in_rank_order(sent))  # the values are integers, so sums are exact


def test_a_sparse_sketch_is_lossless() -> None:
    """With half an entry per cell, every entry of the union is recovered, up to rounding."""
    sketch = Sketch.of(512, 2.0, torch.device("cpu"))
    given = [values(512 * BLOCK, seed) for seed in (0, 1)]
    index = union_of_bitmaps(torch.stack([reference.select(x, 130) for x in given]))
    assert torch.equal(reference.solvable(index, sketch), index)
    cells = torch.zeros(sketch.rows, BLOCK)
    for x in given:
        one = torch.empty_like(cells)
        reference.fold(x, index, sketch, one)
        cells += one
    found = torch.empty(512 * BLOCK)
    reference.unfold(cells, index, sketch, False, found)
    sums = torch.where(unpack_bits(index, found.numel()), given[0] + given[1], 0.0)
    assert float((found - sums).norm() / sums.norm()) < 1e-6
    assert float((found == sums).float().mean()) > 0.9


def test_other_seeds_recover_the_remaining_entries() -> None:
    """With few rows, some entries share all their cells, and would never be recovered from the same sketch."""
    left = pack_bits(torch.rand(64 * BLOCK, generator=torch.Generator().manual_seed(0)) < 0.05)
    counts = []
    for variant in range(4):
        left = left & ~reference.solvable(left, Sketch.of(64, 10.0, torch.device("cpu"), variant))
        counts.append(int(unpack_bits(left, 64 * BLOCK).sum()))
    assert counts[0] > 1000 and all(2 * later < before for before, later in itertools.pairwise(counts))


def test_the_published_estimate_is_the_median_of_three_cells() -> None:
    blocks = 12
    sketch, x = Sketch.of(blocks, 2.0, torch.device("cpu")), values(blocks * BLOCK, 3)
    index = pack_bits(torch.ones(blocks * BLOCK, dtype=torch.bool))
    assert not reference.solvable(index, sketch).any()  # every cell has several entries
    cells, found = torch.empty(sketch.rows, BLOCK), torch.empty(blocks * BLOCK)
    reference.fold(x, index, sketch, cells)
    estimates = torch.stack([cells[rows.long()] * signs for rows, signs in sketch.each_hash()])
    reference.unfold(cells.clone(), index, sketch, True, found)
    assert torch.equal(found.view(-1, BLOCK), estimates.median(0).values)


# ------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.9875])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4])
def test_a_threshold_of_the_table_leaves_less_than_the_sparsity(sparsity: float, scale: float) -> None:
    rows = values(4 * BLOCK, 4).view(2, -1) * torch.tensor([[scale], [1.0]])
    rows[0, 5] = 0.0
    expected = []
    for x in rows:  # each row has a threshold of its own
        below = [float((x.abs() < torch.tensor(t)).float().mean()) for t in THRESHOLDS]
        fitting = [t for t, share in zip(THRESHOLDS, below, strict=True) if share < sparsity]
        expected.append(x.abs() >= torch.tensor(fitting[-1]) if fitting else x != 0)
    assert torch.equal(unpack_bits(select_above(rows, sparsity), rows.numel()), torch.cat(expected))

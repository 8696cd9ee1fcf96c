"""TAGC's reference passes, for several ranks in one process, against plain implementations."""

import pytest
import torch
from torch import Tensor

from tests.kernels.tagc.checks import values
from torchtitan_scape.kernels.scape.reference import unpack_bits
from torchtitan_scape.kernels.tagc import formats, reference
from torchtitan_scape.kernels.tagc.formats import BLOCK
from torchtitan_scape.kernels.tagc.reference import union_of_bitmaps


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
    """As bitmap and as offsets."""
    own = torch.stack([reference.select(values(8 * BLOCK, seed), k) for seed in range(3)])
    union = torch.stack([unpack_bits(bits, 8 * BLOCK) for bits in own]).any(0)
    coded = torch.stack([reference.to_offsets(bits, k) for bits in own])
    assert coded.shape[1] == formats.index_bytes(k / BLOCK, 8)
    for index in (union_of_bitmaps(own), reference.union_of_offsets(coded, 8, k)):
        assert torch.equal(unpack_bits(index, 8 * BLOCK), union)


def test_offsets_are_used_where_they_are_shorter() -> None:
    """102 offsets in 1024 need 67 bytes, which is less than the bitmap for two or three ranks, but not for four."""
    assert [formats.sends_offsets(0.1, ranks) for ranks in (2, 3, 4)] == [True, True, False]
    assert [formats.sends_offsets(0.0125, ranks) for ranks in (2, 18, 19)] == [True, True, False]
    assert formats.capacity(0.1, 2) == 204 and formats.capacity(0.1, 11) == BLOCK
    assert formats.bitmap_bytes(3, 5) == 400 and formats.index_bytes(0.1, 3) == 3 * 67 + 7

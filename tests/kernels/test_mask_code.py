"""Elias-Fano code of in-block offsets: bits, sizes in closed form, and decoding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout, offset_bytes, offset_code
from torchtitan_scape.kernels.scape.reference import decode_offsets, encode_offsets


def literal_code(offsets: list[int], low: int, block_size: int) -> list[int]:
    """Return a block's code bit by bit: unary counts of the high parts, separated by zeros, then the low bits."""
    unary = []
    for high in range(-(-block_size // 2**low)):
        unary += [1] * sum(offset >> low == high for offset in offsets) + [0]
    unary = unary[:-1] if block_size > 2**low else []
    return unary + [offset >> i & 1 for offset in offsets for i in range(low)]


def draw(blocks: int, k: int, block_size: int, seed: int) -> Tensor:
    """Draw ascending offsets, some of them repeated."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, block_size, (blocks, k), generator=generator).sort(dim=1).values


@pytest.mark.parametrize("block_size", [8, 24, 64, 128, 1024, 32768])
def test_blocks_round_trip(block_size: int) -> None:
    """For k from one to the block size: the code is the shortest over all numbers of low bits."""
    width = math.ceil(math.log2(block_size))
    for k in {1, 2, 3, 5, block_size // 8, block_size // 5, block_size // 2, block_size - 1, block_size}:
        code = offset_code(k, block_size)
        unary = [k + math.ceil(block_size / 2**low) - 1 for low in range(width)] + [0]
        sizes = [math.ceil((bits + k * low) / 8) for low, bits in enumerate(unary)]
        assert code.nbytes == min(sizes) and code.low == sizes.index(min(sizes))
        assert code.nbytes <= math.ceil(k * width / 8)
        offsets = draw(3, k, block_size, k)
        coded = encode_offsets(offsets, block_size)
        assert coded.numel() == offset_bytes(3, k, block_size) == 3 * code.nbytes
        assert torch.equal(decode_offsets(coded, 3, k, block_size), offsets)


@given(st.sampled_from([8, 24, 64, 128]), st.integers(0, 3), st.integers(1, 128), st.integers(0, 2**32))
@settings(max_examples=30)
def test_bits_are_those_of_elias_and_fano(block_size: int, blocks: int, k: int, seed: int) -> None:
    k = min(k, block_size)
    code, offsets = offset_code(k, block_size), draw(blocks, k, block_size, seed)
    coded = encode_offsets(offsets, block_size)
    for row, own in zip(offsets.tolist(), coded.view(blocks, code.nbytes).tolist(), strict=True):
        bits = [byte >> j & 1 for byte in own for j in range(8)]
        expected = literal_code(row, code.low, block_size)
        assert bits == expected + [0] * (len(bits) - len(expected))
    assert torch.equal(decode_offsets(coded, blocks, k, block_size), offsets)


@pytest.mark.parametrize(
    ("block_size", "k", "nbytes"),
    [(1024, 10, 11), (1024, 51, 40), (1024, 102, 67), (128, 6, 5), (64, 3, 3), (16, 2, 1), (256, 1, 1)],
)
def test_bytes_of_a_block(block_size: int, k: int, nbytes: int) -> None:
    assert offset_bytes(7, k, block_size) == 7 * nbytes


def test_the_bitmap_is_used_where_it_is_smaller() -> None:
    """In blocks of 1024, 255 offsets need 128 bytes, as the bitmap, and 250 offsets need fewer."""
    layout = BlockLayout((5000,), 1024, 2)
    for density, sends, nbytes in ((250 / 1024, True, 126), (255 / 1024, False, 128), (0.5, False, 128)):
        assert layout.sends_offsets(density, "block") == sends
        assert layout.selection_bytes(density, "block") == 3 * nbytes
    assert not BlockLayout((5000,), 1024, 1).sends_offsets(0.01, "block")


@pytest.mark.parametrize(("n", "k"), [(20, 1), (20, 8), (17, 3), (16, 8)])
def test_a_short_block_selects_the_positions_after_its_end(n: int, k: int) -> None:
    """Offsets are distinct, so that decoding can add bits. The positions after the end are no entries of a bitmap."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(0))
    offsets = reference.select_blocks(values, k, 8)
    coded = encode_offsets(offsets, 8)
    assert torch.equal(decode_offsets(coded, len(offsets), k, 8), offsets)
    tail = n - 8 * (len(offsets) - 1)
    if k > tail:
        assert offsets[-1].tolist() == [*range(k)]
    assert bool((offsets.diff(dim=1) > 0).all())
    expected = n // 8 * k + min(k, n % 8)
    assert int(reference.unpack_bits(reference.offsets_to_mask(offsets, 8), n).sum()) == expected
    bitmap = reference.offsets_to_mask(offsets, 8, n)
    assert int(reference.unpack_bits(bitmap, 8 * bitmap.numel()).sum()) == expected


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=3),
    st.sampled_from([8, 24, 128, 1024]),
    st.sampled_from([2, 16, 64]),
    st.sampled_from([0.5, 0.1, 0.05, 0.01]),
)
def test_sent_selections_are_padded_to_16_bytes(
    sizes: list[int], block_size: int, replicas: int, density: float
) -> None:
    layout = BlockLayout(tuple(sizes), block_size, replicas)
    nbytes, padded = layout.selection_bytes(density, "block"), layout.wire_bytes(density, "block")
    assert padded % 16 == 0 and 0 <= padded - nbytes < 16
    k = max(1, round(density * block_size))
    assert nbytes == layout.run_blocks * min(offset_code(k, block_size).nbytes, block_size // 8)

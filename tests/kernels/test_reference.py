"""SCAPE's reference passes against plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.kernels.dense.reference import finite
from torchtitan_scape.kernels.scape import reference


@given(st.lists(st.booleans(), min_size=0, max_size=70))
def test_bits_round_trip(bits: list[bool]) -> None:
    padded = torch.tensor(bits + [False] * (-len(bits) % 8), dtype=torch.bool)
    packed = reference.pack_bits(padded)
    assert packed.numel() == padded.numel() // 8
    assert reference.unpack_bits(packed, len(bits)).tolist() == bits
    expected = [sum(bit << i for i, bit in enumerate(padded[j : j + 8].tolist())) for j in range(0, len(padded), 8)]
    assert packed.tolist() == expected


# Few distinct values, so that ties are common; including denormals and signed zeros.
_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 3e38, 0.5])


@given(st.lists(_VALUES, min_size=1, max_size=50), st.integers(1, 8))
def test_block_selection_is_exact(values: list[float], k: int) -> None:
    size = 8
    offsets = reference.select_blocks(torch.tensor(values), k, size)
    bits = reference.unpack_bits(reference.offsets_to_mask(offsets, size), len(values))
    expected = []
    for start in range(0, len(values), size):
        block = range(start, min(start + size, len(values)))
        expected += sorted(sorted(block, key=lambda j: (-abs(values[j]), j))[:k])
    assert bits.nonzero().view(-1).tolist() == expected
    assert reference.offsets_to_mask(offsets, size).numel() == -(-len(values) // size)


@given(st.lists(_VALUES, min_size=1, max_size=50), st.data())
def test_largest_is_exact(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda j: (-abs(values[j]), j))[:k])
    assert reference.select_largest(torch.tensor(values), k).nonzero().view(-1).tolist() == expected
    assert int(reference.select_largest(torch.tensor([*values, torch.nan, torch.nan]), k).sum()) == k


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_identifies_the_tensor(bad: float) -> None:
    gradients = [torch.ones(3), torch.ones(5), torch.empty(0)]
    assert finite(gradients).tolist() == [True, True, True]
    gradients[1][4] = bad
    assert finite(gradients).tolist() == [True, False, True]


def test_finite_has_a_limit() -> None:
    gradients = [torch.tensor([1.0, value]) for value in (3.99, 4.0, -4.0, torch.nan)]
    assert finite(gradients, 4.0).tolist() == [True, False, False, False]


def _mask(n: int, generator: torch.Generator, density: float) -> torch.Tensor:
    bits = torch.rand(n, generator=generator) < density
    bits[0] = True
    return bits


@given(st.integers(0, 2**32), st.integers(1, 100), st.booleans(), st.booleans(), st.booleans())
def test_pack_preserves_every_entry(seed: int, n: int, all_in_use: bool, all_before: bool, in_place: bool) -> None:
    """The payload on A and the state off A are mt, bitwise."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.ones(n, dtype=torch.bool) if all_in_use else _mask(n, generator, 0.3)
    before = torch.ones(n, dtype=torch.bool) if all_before else _mask(n, generator, 0.3)
    packed = reference.pack_bits(torch.nn.functional.pad(before, (0, -n % 8)))
    state = torch.randn(n, generator=generator)
    gradient = torch.randn(n, generator=generator)
    moment, old = gradient.clone(), state.clone()
    previous = None if all_before else packed
    reference.new_moment_(moment, state, previous, 0.9, 1.0)
    expected = gradient * (1.0 - 0.9) + torch.where(before, old * 0.9, old)
    assert torch.equal(moment, expected)

    indices = None if all_in_use else used.nonzero().view(-1)
    nnz = int(used.sum())
    payload = moment[:nnz] if in_place else torch.empty(nnz)
    last = None if in_place else torch.empty(nnz)
    reference.pack_(moment, state, indices, previous, payload, last, torch.tensor(True))
    assert torch.equal(torch.where(used, 0.0, state).masked_scatter(used, payload), expected)
    assert torch.equal(state[used], torch.where(before, old, 0.0)[used])
    assert last is None or torch.equal(last, state[used])


@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans())
def test_a_skipped_step_changes_no_state(seed: int, n: int, all_in_use: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    used, before = _mask(n, generator, 0.3), _mask(n, generator, 0.3)
    indices = None if all_in_use else used.nonzero().view(-1)
    previous = reference.pack_bits(torch.nn.functional.pad(before, (0, -n % 8)))
    state, moment = torch.randn(n, generator=generator), torch.full((n,), float("nan"))
    old, payload = state.clone(), torch.empty(n if indices is None else indices.numel())
    reference.pack_(moment, state, indices, previous, payload, None, torch.tensor(False))
    reference.write_(state, indices, torch.full_like(payload, float("nan")), torch.tensor(False))
    assert torch.equal(state, old)

"""Histograms, moments, overlap and shadow residual compared with plain implementations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_scape.observe.figures import (
    LINEAR,
    LOWEST,
    PER_OCTAVE,
    IndexFrequency,
    ShadowResidual,
    distribution,
    largest,
    norm,
    overlap,
)

SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(st.lists(SINGLE, min_size=1, max_size=40))
def test_every_entry_is_in_its_bins(values: list[float]) -> None:
    found = distribution(tensor(values))
    width = 2.0 ** (found.exponent + 1) / LINEAR
    edges = -(2.0**found.exponent) + width * np.arange(LINEAR + 1)
    assert found.linear.tolist() == np.histogram(values, edges)[0].tolist()
    assert int(found.linear.sum()) == found.entries == len(values)
    magnitudes = np.abs([value for value in values if value])
    exact = np.float32(2.0 ** (np.arange(found.log2.numel() + 1) / PER_OCTAVE % 1 - 1))  # In FP32, like the magnitudes.
    octaves = exact.astype(np.float64) * 2.0 ** (np.arange(found.log2.numel() + 1) // PER_OCTAVE + LOWEST + 1)
    assert found.log2.tolist() == np.histogram(magnitudes, octaves)[0].tolist()
    assert found.zeros == len(values) - len(magnitudes)


def test_histograms_of_shards_and_of_other_exponents_add_up() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    small, all_of_it = distribution(values[values.abs() < 2**-12]), distribution(values)
    shift = all_of_it.exponent - small.exponent
    assert shift > 0
    coarse = small.linear.view(-1, 2**shift).sum(1)  # Its bins merge into those of the larger exponent.
    middle = slice(LINEAR // 2 - coarse.numel() // 2, LINEAR // 2 + coarse.numel() // 2)
    rest = distribution(values[values.abs() >= 2**-12])
    assert rest.exponent == all_of_it.exponent
    summed = rest.linear.clone()
    summed[middle] += coarse
    assert torch.equal(summed, all_of_it.linear) and torch.equal(rest.log2 + small.log2, all_of_it.log2)


def test_moments() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 3e-5 + 1e-5
    found, exact = distribution(values), values.double()
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert found.deviation == pytest.approx(float(exact.std(unbiased=False)), rel=1e-12)
    assert found.kurtosis == pytest.approx(3.0, abs=0.1)
    assert found.within_tenth == float((exact.abs() <= exact.std(unbiased=False) / 10).double().mean())
    zeros = distribution(torch.zeros(5))
    assert (zeros.zeros, zeros.deviation, zeros.within_tenth) == (5, 0.0, 1.0) and math.isnan(zeros.kurtosis)


def test_the_largest_and_their_overlap() -> None:
    a, b = tensor([3, -4, 0.5, 0, 2, 1, 0, 0, 0, 0]), tensor([0, 9, 0, 0, 8, 0.1, -7, 0, 0, 0])
    assert largest(a, 0.3).nonzero().view(-1).tolist() == [0, 1, 4]
    assert overlap(largest(a, 0.3), largest(b, 0.3)) == pytest.approx(2 / 3)
    # Zeros are excluded, and ties go to the lower index.
    assert int(largest(a, 1.0).sum()) == 5 and largest(torch.ones(10), 0.2).nonzero().view(-1).tolist() == [0, 1]
    assert math.isnan(overlap(largest(torch.zeros(10), 0.3), largest(b, 0.3)))


def test_the_overlap_of_independent_values_is_the_density() -> None:
    a, b = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    assert overlap(largest(a, 0.1), largest(b, 0.1)) == pytest.approx(0.1, abs=0.01)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=7, max_size=7), min_size=1, max_size=6))
def test_sent_and_residual_add_up_to_the_input(steps: list[list[float]]) -> None:
    shadow = ShadowResidual(torch.zeros(7))
    for gradient in map(tensor, steps):
        before = shadow.residual.clone()
        shadow.add(gradient, 0.3)
        assert torch.equal(shadow.sent + shadow.residual, before + gradient)
        assert not bool(((shadow.sent != 0) & (shadow.residual != 0)).any()) and int((shadow.sent != 0).sum()) <= 2
        if bool((shadow.sent != 0).any()):
            assert shadow.residual.abs().max() <= shadow.sent[shadow.sent != 0].abs().min()


def test_norms_are_added_in_fp64() -> None:
    assert norm(torch.full((3,), 1e-30)) == pytest.approx(3**0.5 * 1e-30, rel=1e-6)


def test_index_frequencies_count_the_steps_of_each_entry() -> None:
    counted = IndexFrequency(torch.zeros(10))
    for values in ([5.0, 4, 0, 0, 0, 0, 0, 0, 0, 0], [5.0, 0, -4, 0, 0, 0, 0, 0, 0, 0], [0.0] * 10):
        counted.add(torch.tensor(values), 0.2)
    assert counted.counts.tolist() == [2, 1, 1, 0, 0, 0, 0, 0, 0, 0]  # zeros are never selected
    assert counted.histogram().tolist() == [7, 2, 1, 0] and counted.steps == 3

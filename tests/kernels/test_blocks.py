"""Layout of blocks and runs, and the density schedule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.toy import make_scape
from torchtitan_scape.kernels.scape.blocks import BlockLayout, density_at, entries_per_block


@given(
    st.lists(st.integers(0, 300), min_size=0, max_size=8),
    st.sampled_from([8, 16, 64]),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.5, 0.1, 0.01]),
)
def test_runs_cover_every_entry_once(sizes: list[int], block_size: int, replicas: int, density: float) -> None:
    """Including fewer blocks than replicas, empty tensors and tensors of one entry."""
    layout = BlockLayout(tuple(sizes), block_size, replicas)
    assert layout.total_blocks == sum(math.ceil(n / block_size) for n in sizes)
    assert layout.run_blocks == math.ceil(layout.total_blocks / replicas)
    for i, n in enumerate(sizes):
        covered = [j for r in range(replicas) for j in range(*layout.owned(i, r))]
        assert covered == list(range(n))
        starts = range(0, n, block_size)
        k = max(1, round(density * block_size))
        expected = n if density == 1.0 else sum(min(k, min(block_size, n - s)) for s in starts)
        assert layout.nnz(i, density, "block") == expected


def test_density_schedule() -> None:
    assert density_at(1, 0.01, 0) == 0.01
    assert [density_at(t, 0.01, 2) for t in (0, 1, 2, 3)] == pytest.approx([1.0, 0.1, 0.01, 0.01])
    assert density_at(7, 1.0, 10) == 1.0


@pytest.mark.parametrize("density, k", [(1.0, 1024), (0.1, 102), (0.01, 10), (1e-9, 1), (0.0004, 1)])
def test_entries_per_block(density: float, k: int) -> None:
    assert entries_per_block(density, 1024) == k


def test_a_density_below_one_entry_per_block_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """40 + 3 real entries in blocks of 16: three and one."""
    parameters = [nn.Parameter(torch.ones(4, 10)), nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(5))]
    optimizer = make_scape(parameters, lr=0.1, block_size=16, density=0.001)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    (message,) = [r.getMessage() for r in caplog.records]
    assert "density 0.001 is less than one entry per block of 16" in message
    assert "which is a density of 0.093" in message
    caplog.clear()
    make_scape(parameters, lr=0.1, block_size=16, density=0.04)
    assert not caplog.records

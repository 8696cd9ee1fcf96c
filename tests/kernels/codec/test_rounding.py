"""The Hadamard transform against its definition, and sums of several messages."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.codec.checks import NAN
from torchtitan_scape.kernels.codec.reference import BlockCode


def test_the_transform_is_hadamard_and_its_own_inverse() -> None:
    code, x = BlockCode("int4", 32, torch.float32), torch.randn(3 * 32, generator=torch.Generator().manual_seed(1))
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(32)] for i in range(32)], dtype=np.float64)
    expected = torch.from_numpy(signs @ x.view(3, 32).double().numpy().T / math.sqrt(32)).T.reshape(-1)
    transformed = x.clone()
    code.hadamard_(transformed)
    torch.testing.assert_close(transformed.double(), expected, rtol=0, atol=1e-6)
    code.hadamard_(transformed)
    torch.testing.assert_close(transformed, x, rtol=0, atol=1e-6)
    x[5] = NAN
    code.hadamard_(x)
    assert x[:32].isnan().all() and x[32:].isfinite().all()  # the block remains recognizable as not finite
    with pytest.raises(ValueError, match="multiple of 32"):
        code.hadamard_(torch.zeros(33))


def test_several_rows_and_several_sums_equal_single_ones() -> None:
    """The messages of all ranks are encoded at once, and summed at once."""
    code, x = BlockCode("int8", 32), torch.randn(4, 96, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([code.encode(row[None]) for row in x])
    assert torch.equal(code.encode(x), alone)
    sums, total = torch.empty(2, 96), torch.empty(96)
    code.decode_and_sum(alone.view(2, 2, -1), sums)
    for number, found in enumerate(sums):
        code.decode_and_sum(alone.view(2, 2, -1)[:, number], total)
        assert torch.equal(found, total)

"""Sums in row order: bits of `ordered.add_in_order_` on a CPU."""

import pytest
import torch

from torchtitan_scape.kernels.common.tensors import add_in_order_


@pytest.mark.parametrize("rows", [0, 1, 2, 64])
@pytest.mark.parametrize("shape", [(50_000,), (3, 1000)])
def test_rows_are_added_in_order(rows: int, shape: tuple[int, ...]) -> None:
    """Also of rows that are not contiguous, with NaN, infinities and zeros of both signs, on several threads."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(rows, *shape[:-1], shape[-1] + 7, generator=generator)[..., :-7]
    given *= torch.randint(-20, 20, given.shape, generator=generator).float().exp2()
    start = torch.randn(shape, generator=generator)
    start[..., :9], given[..., :9] = -0.0, -0.0
    if rows > 1:
        given[0, ..., 9], given[1, ..., 9], given[1, ..., 10] = torch.inf, -torch.inf, torch.nan
    expected, found, threads = start.clone(), start.clone(), torch.get_num_threads()
    for row in given:
        expected += row
    torch.set_num_threads(2)
    try:
        add_in_order_(found, given)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))

"""Parameters whose storage is replaced between two steps, as by a conversion or a load."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.toy import DENSE, SPARSE, draw, flat, gradient, make_scape


def check_replaced_storage(kernels: str, **options: Any) -> None:
    """Parameters whose storage is replaced between two steps are updated as others are, and rates may change."""

    def work(replaces: bool) -> Tensor:
        parameters = [nn.Parameter(p) for p in draw(0, SPARSE[:2] + DENSE)]
        optimizer = make_scape(parameters, lr=1e-2, density=0.3, block_size=16, kernels=kernels, **options)
        for step in range(4):
            for p, g in zip(parameters, gradient(step, 0, SPARSE[:2] + DENSE), strict=True):
                p.grad = g
                if replaces and step == 2:
                    p.data = p.data.clone()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        return flat([p.detach() for p in parameters])

    assert torch.equal(work(True), work(False))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_parameters_may_get_another_storage(update: str) -> None:
    check_replaced_storage("torch", update=update)

"""Parameters whose storage is replaced between two steps, as by a conversion or a load."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.exchange_checks import sparta
from tests.toy import DENSE, SPARSE, draw, flat, gradient, make_scape


def check_scape(kernels: str, **options: Any) -> None:
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


def check_sparta(kernels: str) -> None:
    """The groups of the first step are exchanged again after the replacement."""
    options = {"steps": 4, "code": "1bit_unbiased", "interval": 2, "warmup_steps": 0}
    one, other = (sparta("cpu", kernels, 2, torch.float32, replaced=step, **options) for step in (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_scape_updates_a_new_storage(update: str) -> None:
    check_scape("torch", update=update)


def test_sparta_exchanges_a_new_storage() -> None:
    check_sparta("torch")

"""Sign descent: its formula and its state."""

import torch
from torch import nn

from torchtitan_scape.optimizers.elementwise import SignSGD


def test_steps_follow_signs_without_moments() -> None:
    start = torch.tensor([1.0, -2.0, 3.0])
    theta, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = SignSGD([("theta", theta), ("other", other)], lr=0.1, weight_decay=0.5)
    theta.grad = torch.tensor([1e-20, -50.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(theta.detach(), start * 0.95 - 0.1 * torch.tensor([1.0, -1.0, 0.0]))
    assert torch.equal(other.detach(), start)
    assert [dict(optimizer.state[p]) for p in (theta, other)] == [{"step": 1.0}, {"step": 0.0}]


def test_found_inf_skips_the_step() -> None:
    theta = nn.Parameter(torch.ones(2))
    optimizer = SignSGD([theta], lr=0.1)
    theta.grad = torch.tensor([torch.nan, 1.0])
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(theta.detach(), torch.ones(2)) and float(optimizer.state[theta]["step"]) == 0.0

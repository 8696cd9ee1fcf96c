"""Dense AdamS against its formula, entry by entry in float64."""

import math

import torch
from torch import nn

from torchtitan_scape import AdamS


def test_follows_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3, generator=generator))
    optimizer = AdamS([("w", parameter)], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    theta, m = parameter.detach().double().clone(), torch.zeros(5, 3, dtype=torch.float64)
    for t in range(1, 21):
        g = torch.randn(5, 3, generator=generator)
        parameter.grad = g.clone()
        optimizer.step()
        v = 0.95 * m**2 + 0.05 * g.double() ** 2
        m = 0.9 * m + 0.1 * g.double()
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        theta = theta - 0.01 * (u + 0.1 * theta)
        torch.testing.assert_close(parameter.detach().double(), theta, rtol=1e-6, atol=1e-6)


def test_first_step_is_the_learning_rate() -> None:
    """With bias correction the first step is lr * sign(g) for any gradient magnitude."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1e-3, -50.0])
    AdamS([parameter], lr=0.1, weight_decay=0.0).step()
    assert all(math.isclose(abs(x), 0.1, rel_tol=1e-4) for x in parameter.tolist())


def test_param_groups_may_be_empty() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = AdamS([{"params": []}, {"params": [parameter]}, {"params": [], "lr": 1.0}], lr=0.1, weight_decay=0.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(parameter, torch.tensor(-0.1))


def test_state_keeps_its_dtypes_when_resumed() -> None:
    def make() -> tuple[nn.Parameter, AdamS]:
        parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        return parameter, AdamS([parameter], lr=0.1)

    (first, saved), (second, resumed) = make(), make()
    first.grad = torch.full((5,), 0.3, dtype=torch.bfloat16)
    saved.step()
    resumed.load_state_dict(saved.state_dict())
    state = resumed.state[second]
    assert state["exp_avg"].dtype == torch.float32 and state["step"].dtype == torch.float64
    assert torch.equal(state["exp_avg"], saved.state[first]["exp_avg"])


def test_a_later_group_is_trained() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamS([first], lr=0.1)
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones(2)
    optimizer.step()
    assert bool((second < 1).all()) and torch.equal(first.detach(), torch.ones(2))


def test_found_inf_skips_the_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamS([parameter], lr=0.1)
    parameter.grad = torch.full((3,), float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert float(optimizer.state[parameter]["step"]) == 0.0
    assert torch.equal(optimizer.state[parameter]["exp_avg"], torch.zeros(3))

"""Optimizers for parts of the parameters take steps as the one that they replace, and call its hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.methods.owned import optimizer_of_parts
from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.pytorch import create_state

KINDS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "AdamS": AdamS,
    "SignSGD": SignSGD,
    "Muon": lambda named, lr: Muon(named, lr, matrices=["p"]),
}


def step(parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
    parameter.grad = torch.arange(12.0).view(3, 4).sin()
    optimizer.step()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_step_moves_the_part_and_calls_the_pre_hooks(kind: str, is_scheduled: bool) -> None:
    """Also if a scheduler of learning rates was built before, which replaces the `step` of its optimizer."""
    whole, part, expected = (nn.Parameter(torch.ones(3, 4)) for _ in range(3))
    optimizer = KINDS[kind]([("p", whole)], lr=0.1)
    if is_scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    made = optimizer_of_parts(optimizer, [Shard("p", part, 0)], {"p": whole})
    assert made is not None
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))  # `ReplicaOptimizer` runs it
    create_state(made)
    assert not calls
    step(part, made)
    step(expected, KINDS[kind]([("p", expected)], lr=0.1))
    assert torch.equal(part, expected) and not torch.equal(part, torch.ones(3, 4))
    assert torch.equal(whole, torch.ones(3, 4)) and calls == ["before"]


def test_subclasses_with_a_step_of_their_own_are_refused() -> None:
    class Own(AdamS):
        def step(self, closure: Any = None) -> Any:
            return None

    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="Own has a step of its own"):
        optimizer_of_parts(Own([parameter]), [Shard("p", nn.Parameter(torch.ones(3)), 0)], {"p": parameter})

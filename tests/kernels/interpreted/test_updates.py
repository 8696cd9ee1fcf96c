"""Optimizer steps in Triton's interpreter, against PyTorch; started like test_interpreted.py."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from torchtitan_scape import AdamS, Muon, replicate
from torchtitan_scape.topology.in_process import SimulatedReplicas

SHAPES = {
    "layers.0.attention.weight": (12, 8),
    "layers.0.wqkv.weight": (24, 8),
    "layers.1.experts.weight": (3, 6, 8),
    "layers.1.norm.weight": (8,),
    "output.weight": (20, 8),
}
STEPS, NAN_AT, UNUSED_AT = 6, 2, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda named, _: torch.optim.AdamW(
        [{"params": named[:2], "weight_decay": 0.3}, {"params": named[2:]}], fused=True
    ),
    "AdamS": lambda named, kernels: AdamS(named, lr=1e-2, kernels=kernels),
    "Muon": lambda named, kernels: Muon(
        named,
        lr=1e-2,
        fused=True,
        kernels=kernels,
        matrices=["layers.*.weight"],
        split={"*.wqkv.weight": 3, "*.attention.weight": (3, 5)},
    ),
}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(name: str, kernels: str) -> list[Tensor]:
    """Return parameters, state and norms. One step is skipped, one parameter once has no gradient; rates change."""
    model = nn.Module()
    for parameter, values in draw(0).items():
        model.register_parameter(parameter.replace(".", "_"), nn.Parameter(values))
    named = [(n, p) for n, p in zip(SHAPES, model.parameters(), strict=True)]
    inner = OPTIMIZERS[name](named, kernels)
    optimizer = replicate(model, inner, {"method": "dense"}, kernels=kernels, max_norm=1.0)
    found = []
    for step in range(STEPS):
        for (n, p), gradient in zip(named, draw(step + 1).values(), strict=True):
            p.grad = gradient * (torch.nan if step == NAN_AT and n == "output.weight" else 1.0 + step)
        if step == UNUSED_AT:
            named[0][1].grad = None
        optimizer.step()
        found.append(optimizer.grad_norm.clone())
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
    state = [value for p in model.parameters() for _, value in sorted(inner.state[p].items())]
    return [*found, *(p.detach() for p in model.parameters()), *state]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_pytorch(name: str) -> None:
    """Muon's directions may round to another BF16 number."""
    atol = 5e-4 if name == "Muon" else 2e-5
    for ours, theirs in zip(train(name, "triton"), train(name, "torch"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, equal_nan=True)


def test_hooks_and_own_steps_of_the_optimizer_are_not_changed() -> None:
    """Hooks of a step run, and a later step of the optimizer alone does not multiply by the last clip factor."""
    calls = list[str]()
    weight = nn.Parameter(torch.ones(64))
    model = nn.ParameterList([weight])
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    inner.register_step_post_hook(lambda *_: calls.append("adamw"))
    optimizer = replicate(model, inner, {"method": "dense"}, kernels="triton", max_norm=1e-3)
    for _ in range(2):
        weight.grad = torch.ones(64)
        optimizer.step()
    assert calls == ["adamw"] * 2
    adams = AdamS([("weight", weight)], kernels="triton")
    optimizer = replicate(model, adams, {"method": "dense"}, kernels="triton", max_norm=1e-3)
    norms = list[float]()
    hook = adams.register_step_pre_hook(lambda *_: norms.append(float(weight.grad.norm())))  # type: ignore[union-attr]
    for _ in range(2):
        weight.grad = torch.ones(64)
        optimizer.step()
        hook.remove()
    assert norms == [pytest.approx(1e-3)]  # of the clipped gradient
    before = adams.state[weight]["exp_avg"].clone()
    adams.step()
    torch.testing.assert_close(adams.state[weight]["exp_avg"], 0.9 * before + 0.1 * torch.ones(64))


def test_gradients_above_the_range_of_fp16_are_clipped_before_they_are_stored() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.float16))
    model = nn.ParameterList([weight])
    optimizer = replicate(
        model,
        lambda named: torch.optim.AdamW(named, fused=True),
        {"method": "dense"},
        SimulatedReplicas(2),
        kernels="triton",
        max_norm=1.0,
        reduction="sum",
    )
    for _ in range(2):
        weight.grad = torch.full((64,), 40000.0, dtype=torch.float16)
        optimizer.stash_replica_gradients()
    optimizer.step()
    assert weight.isfinite().all() and not weight.eq(1.0).all()

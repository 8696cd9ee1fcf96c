"""Optimizers of other projects: they count steps as numbers and in their param groups, and may change weights alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.pool import Pool
from tests.replica.own_loop import make_model, train, weights


class Counting(torch.optim.Optimizer):
    """Adam with a number as counter, a param group with an estimate that decays, and weights within bounds."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.99), eps=1e-8, factor=1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["factor"] *= 0.9
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - one)
                state["square"].lerp_(p.grad.square(), 1 - two)
                rate = group["lr"] * group["factor"] / (1 - one ** state["step"]) + 1e-3 / group["calls"]
                p.sub_(rate * state["mean"] / ((state["square"] / (1 - two ** state["step"])).sqrt() + group["eps"]))
                p.clamp_(-0.15, 0.15)


class Wrapping(torch.optim.SGD):
    """Contains another optimizer of the same parameters, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"])


KINDS: dict[str, Any] = {
    "Counting": Counting,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
}


def build(kind: str, method: str) -> tuple[nn.Module, Any]:
    from torchtitan_scape import replicate

    model = make_model()
    return model, replicate(model, KINDS[kind](model.parameters()), method, dist.group.WORLD, total_steps=20)


def differences(folder: str, method: str) -> dict[str, bool]:
    """Return whether runs with a save before the first step, and resumed after five, end with the same bits."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    model, optimizer = build("Counting", method)
    train(model, optimizer, range(8))
    optimizer.finish_previous_step()
    other, saving = build("Counting", method)
    dcp.save(checkpoint_states(other, saving), checkpoint_id=f"{folder}/0")
    train(other, saving, range(5))
    dcp.save(checkpoint_states(other, saving), checkpoint_id=f"{folder}/5")
    of_rank = {"model": {k: v.clone() for k, v in other.state_dict().items()}, "optimizer": saving.state_dict()}
    torch.save(of_rank, f"{folder}/{dist.get_rank()}.pt")
    train(other, saving, range(5, 8))
    found = {"save": other}
    found["load"], resumed = build("Counting", method)
    load_checkpoint(f"{folder}/5", found["load"], resumed)
    train(found["load"], resumed, range(5, 8))
    found["file"], resumed = build("Counting", method)
    of_rank = torch.load(f"{folder}/{dist.get_rank()}.pt")
    found["file"].load_state_dict(of_rank["model"])
    resumed.load_state_dict(of_rank["optimizer"])
    train(found["file"], resumed, range(5, 8))
    return {name: torch.equal(weights(model), weights(each)) for name, each in found.items()}


def updates_of_owners() -> Tensor:
    """Return the weights of steps whose gradients and updates are exchanged in FP32, minus those of dense."""
    models = []
    for method in ("dense", "quantized_update"):
        model, optimizer = build("Counting", method)
        for step in range(6):
            optimizer.request_full_exchange()
            train(model, optimizer, range(step, step + 1))
        models.append(model)
    return weights(models[0]) - weights(models[1])


def all_resume(folder: str) -> tuple[list[dict[str, bool]], float]:
    methods = ("dense", "quantized_update", "sparta")
    return [differences(f"{folder}/{method}", method) for method in methods], float(updates_of_owners().abs().max())


def test_their_counters_are_kept(pool2: Pool, tmp_path: Path) -> None:
    """Bias corrections began anew, and saves before the first step counted one and moved weights."""
    for method in ("dense", "quantized_update", "sparta"):
        (tmp_path / method).mkdir()
    for equal, difference in pool2(all_resume, str(tmp_path)):
        assert all(all(each.values()) for each in equal), equal
        assert difference < 1e-6


def into_owners(folder: str) -> tuple[list[Tensor], str]:
    """Return the weights after a load of the state of replicas that differ, for each optimizer.

    The second result is the line about a load of pending gradients, whose optimizer has a moment of an unknown name.
    """
    from torchtitan_scape import checkpoint_states, load_checkpoint

    found = []
    for kind in KINDS:
        model, optimizer = build(kind, "sparta")
        train(model, optimizer, range(4))
        dcp.save(checkpoint_states(model, optimizer), checkpoint_id=f"{folder}/{kind}")
        model, optimizer = build(kind, "quantized_update")
        load_checkpoint(f"{folder}/{kind}", model, optimizer)
        train(model, optimizer, range(4, 6))
        found.append(weights(model))
    model, optimizer = build("Counting", "quantized_update")
    train(model, optimizer, range(4))
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=f"{folder}/pending")
    return found, load_checkpoint(f"{folder}/pending", *build("Counting", "dense"))


def test_owners_load_the_mean_of_state_that_they_alone_keep(pool2: Pool, tmp_path: Path) -> None:
    """The means of momentum buffers are collective, also on replicas that keep none of them."""
    (first, text), (second, _) = pool2(into_owners, str(tmp_path))
    assert "pending gradients are lost" in text
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_owners_refuse_an_optimizer_inside_another() -> None:
    from torchtitan_scape import replicate

    model = make_model()
    with pytest.raises(ValueError, match="Wrapping contains another optimizer, AdamW"):
        replicate(model, Wrapping(model.parameters()), "quantized_update")

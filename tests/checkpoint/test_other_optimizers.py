"""Optimizers of other projects: they count steps as numbers and in their param groups, and may change weights alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.pool import Pool
from tests.replica.own_loop import loss_of, make_model, train, weights


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


class Relative(torch.optim.Optimizer):
    """Has neither a learning rate nor a first moment, as Adafactor of transformers; its eps must stay a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=None, eps=torch.tensor(1e-8)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert isinstance(group["eps"], Tensor)
            for p in group["params"]:
                state = self.state[p]
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.1)
                state["step"] = state.get("step", 0) + 1
                p.sub_(0.01 / state["step"] * p.grad / (square.sqrt() + group["eps"]))


class LowBit(torch.optim.SGD):
    """Has state in eight bits, as torchao's optimizers, whose tensors have few operators."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        from torchao.optim.subclass_8bit import OptimState8bit

        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("codes", OptimState8bit.zeros(p.shape, True, 2))


KINDS: dict[str, Any] = {
    "Relative": Relative,
    "LowBit": lambda p: LowBit(p, lr=0.1),
    "Counting": Counting,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
}


def build(kind: str, method: str) -> tuple[nn.Module, Any]:
    from torchtitan_scape import replicate

    model = make_model()
    optimizer = KINDS[kind](model.parameters())
    return model, replicate(model, optimizer, method, dist.group.WORLD, total_steps=20, consistency_interval=4)


def differences(folder: str, method: str, kind: str = "Counting") -> dict[str, bool]:
    """Return whether runs that save before the first step, or resume there or after five, end with the same bits."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    model, optimizer = build(kind, method)
    train(model, optimizer, range(8))
    optimizer.finish_previous_step()
    other, saving = build(kind, method)
    dcp.save(checkpoint_states(other, saving), checkpoint_id=f"{folder}/0")
    train(other, saving, range(5))
    dcp.save(checkpoint_states(other, saving), checkpoint_id=f"{folder}/5")
    of_rank = {"model": {k: v.clone() for k, v in other.state_dict().items()}, "optimizer": saving.state_dict()}
    torch.save(of_rank, f"{folder}/{dist.get_rank()}.pt")
    train(other, saving, range(5, 8))
    found = {"save": other}
    for begin in (0, 5):
        name = f"load {begin}"
        found[name], resumed = build(kind, method)
        load_checkpoint(f"{folder}/{begin}", found[name], resumed)
        train(found[name], resumed, range(begin, 8))
    found["file"], resumed = build(kind, method)
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
    found = [differences(f"{folder}/{method}", method) for method in methods]
    found += [differences(f"{folder}/{method}", method, "Relative") for method in methods[:2]]
    found += [differences(f"{folder}/dense", "dense", kind) for kind in ("AdamW", "SGD", "NAdam")]
    return found, float(updates_of_owners().abs().max())


def test_their_counters_are_kept(pool2: Pool, tmp_path: Path) -> None:
    """Bias corrections began anew, and saves before the first step counted one and moved weights."""
    for method in ("dense", "quantized_update", "sparta"):
        (tmp_path / method).mkdir()
    for equal, difference in pool2(all_resume, str(tmp_path)):
        assert all(all(each.values()) for each in equal), equal
        assert difference < 1e-6


def test_states_in_eight_bits_resume(pool2: Pool, tmp_path: Path) -> None:
    """The comparison of replicas, saves and loads ended with a NotImplementedError."""
    pytest.importorskip("torchao")
    for equal in pool2(differences, str(tmp_path), "dense", "LowBit"):
        assert all(equal.values()), equal


def into_owners(folder: str) -> tuple[list[Tensor], str]:
    """Return the weights after a load of the state of replicas that differ, for each optimizer.

    The second result is the line about a load of pending gradients, whose optimizer has a moment of an unknown name.
    """
    from torchtitan_scape import checkpoint_states, load_checkpoint

    found = []
    for kind in ("Counting", "SGD", "AMSGrad"):
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


def test_momentum_whose_first_gradient_is_not_dampened(tmp_path: Path) -> None:
    """State that existed before the first step dampened it, as it did after a save or a load."""
    from torchtitan_scape import checkpoint_states, load_checkpoint, replicate

    def built(method: str = "dense", momentum: float = 0.9) -> tuple[nn.Module, Any]:
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, dampening=0.5)
        return model, replicate(model, sgd, method)

    for method in ("quantized_update", "sparta"):
        with pytest.raises(ValueError, match=r"SGD with dampening .* set dampening = 0"):
            built(method)
        built(method, momentum=0.0)
    model, optimizer = built()
    saved = checkpoint_states(model, optimizer)
    with pytest.raises(ValueError, match="saves before the first step"):
        saved["optimizer"].state_dict()
    plain = make_model()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    ends = []
    for step in range(4):
        if step == 2:
            dcp.save(saved, checkpoint_id=tmp_path)
            model, optimizer = built()
            load_checkpoint(str(tmp_path), model, optimizer)
        for each, stepping in ((model, optimizer), (plain, sgd)):
            loss_of(each, step, 0).backward()  # type: ignore[arg-type]
            stepping.step()
            stepping.zero_grad()
        ends.append(torch.equal(weights(model), weights(plain)))
    assert ends == [True] * 4
    other = torch.optim.AdamW((model := make_model()).parameters())
    optimizer = replicate(model, other, "dense")
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=tmp_path / "other")
    with pytest.raises(ValueError, match="loads from another method or optimizer"):
        load_checkpoint(str(tmp_path / "other"), *built())


def test_owners_refuse_an_optimizer_inside_another() -> None:
    from torchtitan_scape import replicate

    model = make_model()
    with pytest.raises(ValueError, match="Wrapping contains another optimizer, AdamW"):
        replicate(model, Wrapping(model.parameters()), "quantized_update")

"""The updates of owners, which other replicas do not have in full, in checkpoints of own training loops."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.checkpoint.test_own_loop import build
from tests.methods.steps import of_all_replicas
from tests.pool import Pool
from tests.replica.own_loop import make_model, train, weights


def weights_after(path: str, into: str, steps: int) -> tuple[Tensor, float]:
    """Load, take steps with zero gradients and no learning rate, and return weights and residual norm."""
    from torchtitan_scape import load_checkpoint

    model, optimizer = build(into, 1)
    load_checkpoint(path, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    optimizer.finish_previous_step()
    return weights(model), optimizer.metrics().get("residual_norm", 0.0)


def update_of_owners(path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Save a run of quantized updates; return the weights of the model, and the unsent updates of all owners."""
    from torchtitan_scape import checkpoint_states

    model, optimizer = build("quantized_update", 1)
    train(model, optimizer, range(6))
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=path)
    unsent = next(one for one in optimizer.methods[0].checkpoint_states("exact") if one.kind == "unsent_update")
    return weights(model), of_all_replicas(optimizer.methods[0], unsent)


@pytest.mark.parametrize("into", ["quantized_update", "dense", "scape"])
def test_one_replica_receives_the_updates_of_owners(into: str, pool1: Pool, pool2: Pool, tmp_path: Path) -> None:
    """And applies them once, in the first step or at once."""
    (sent, unsent), _ = pool2(update_of_owners, str(tmp_path))
    exact = sent - torch.cat([unsent[name].view(-1) for name, _ in make_model().named_parameters()])
    for steps in (1, 3):
        found, residual = pool1(weights_after, str(tmp_path), into, steps)[0]
        assert (found - exact).abs().max() < 1e-6
        assert residual == 0.0 or into == "scape"  # which selects a part of what it received


KINDS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AMSGrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,  # has state of two shapes, each of some parameters only
}


def of_kind(kind: str, method: str) -> tuple[nn.Module, Any]:
    from torchtitan_scape import replicate

    model = make_model()
    model[1].register_parameter("scale", nn.Parameter(torch.ones(())))
    return model, replicate(model, KINDS[kind](model.parameters()), {"method": method}, dist.group.WORLD)


def state_of_optimizer(optimizer: Any) -> dict[str, float]:
    """Return the norms of all state by name and kind, and the counters. Collective."""
    method, found, norms = optimizer.methods[0], dict[str, Tensor](), dict[str, float]()
    optimizer.finish_previous_step()
    if method.options.divides_update:
        for kind, tensors in (method.owned.moments | method.owned.others).items():
            found |= {f"{name}.{kind}": values for name, values in tensors.items()}
        found["step"] = method.owned.applied if method.collectives.replica == 0 else torch.zeros(())
    else:
        for shard in optimizer.shards() if method.collectives.replica == 0 else ():
            for kind, values in optimizer.inner.state[shard.parameter].items():
                found["step" if kind == "step" else f"{shard.name}.{kind}"] = values
    squares = {name: float(values.double().square().sum()) for name, values in found.items()}
    for other in method.collectives.gather_from_replicas(squares):
        for name, square in other.items():
            norms[name] = norms.get(name, 0.0) + square
    return {name: norm for name, norm in norms.items() if name != "step" or norm}


def resume_of_kind(folder: str, kind: str, method: str) -> tuple[dict[str, float], bool, str]:
    """Save and resume; return the saved state of the optimizer, whether the runs end equal, and the log's line."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    model, optimizer = of_kind(kind, method)
    train(model, optimizer, range(6))
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
    state = state_of_optimizer(optimizer)
    train(model, optimizer, range(6, 10))
    other, resumed = of_kind(kind, method)
    train(other, resumed, range(100, 103))
    text = load_checkpoint(folder, other, resumed)
    train(other, resumed, range(6, 10))
    optimizer.finish_previous_step()
    resumed.finish_previous_step()
    return state, torch.equal(weights(model), weights(other)), text


def state_after_load(folder: str, kind: str, into: str) -> tuple[dict[str, float], str]:
    from torchtitan_scape import load_checkpoint

    model, optimizer = of_kind(kind, into)
    train(model, optimizer, range(100, 103))
    text = load_checkpoint(folder, model, optimizer)
    return state_of_optimizer(optimizer), text


@pytest.mark.parametrize("kind", list(KINDS))
def test_state_of_any_optimizer_resumes(kind: str, pool2: Pool, pool3: Pool, tmp_path: Path) -> None:
    """Bit for bit in the same layout; with other replicas and with another method the same state continues."""
    for method, into in (("quantized_update", "dense"), ("dense", "quantized_update")):
        folder = str(tmp_path / method)
        saved, is_equal, text = pool2(resume_of_kind, folder, kind, method)[0]
        assert is_equal and text.startswith("state as it was saved")
        for pool, target in ((pool3, "quantized_update"), (pool2, into)):
            loaded, text = pool(state_after_load, folder, kind, target)[0]
            # In dense, moments also contain the gradients that quantized_update had not sent. SGD counts no steps.
            others = (
                ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if (method, target) == ("quantized_update", "dense") else ()
            )
            others += ("step",) if kind == "SGD" else ()
            compared = {name for name in saved if name.rpartition(".")[2] not in others}
            assert {k: loaded.get(k) for k in compared} == pytest.approx({k: saved[k] for k in compared}, rel=1e-6)
            assert compared and "begins anew" not in text and "no moments" not in text

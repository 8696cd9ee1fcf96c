"""The updates of owners, which other replicas do not have in full, in checkpoints of own training loops."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

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

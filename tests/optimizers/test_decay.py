"""`[optimizer] decay_exclude`: param groups, and their effect in every container."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.training import METHODS, train
from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.registry import decay_groups

CASES = {name: METHODS[name] for name in ("scape", "muon", "radius")}
CASES["sparta"] = ["--sync.method=sparta", "--optimizer.name=AdamW"]


def named() -> list[tuple[str, Tensor]]:
    return [
        (name, nn.Parameter(torch.ones(shape)))
        for name, shape in (("layers.0.weight", (4, 6)), ("norm", (6,)), ("embedding", (8, 6)), ("bias", (4,)))
    ]


def test_groups_contain_every_parameter_once() -> None:
    parameters = named()
    (whole,) = decay_groups(parameters, "none")
    assert whole == {"params": parameters}
    decayed, vectors = decay_groups(parameters, "vectors")
    assert [name for name, _ in decayed["params"]] == ["layers.0.weight", "embedding"] and "weight_decay" not in decayed
    assert [name for name, _ in vectors["params"]] == ["norm", "bias"] and vectors["weight_decay"] == 0.0
    assert len(decay_groups(parameters[:1], "vectors")) == 1


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamS, Muon, SignSGD])
def test_a_step_decays_only_matrices(optimizer: Any) -> None:
    """Zero gradients leave the decay alone."""
    parameters = named()
    made = optimizer(decay_groups(parameters, "vectors"), lr=0.5, weight_decay=0.1)
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for name, parameter in parameters:
        expected = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected), msg=name)


@pytest.mark.parametrize("name", CASES)
def test_norms_keep_their_weights(name: str, pool1: Pool, tmp_path: Path) -> None:
    """The weights of norms start at 1, and a step of almost no length multiplies the others by 0.9."""
    arguments = [*CASES[name], "--optimizer.lr=1e-6", "--optimizer.weight_decay=1e5", "--lr_scheduler.warmup_steps=0"]
    arguments += ["--training.steps=2", "--lr_scheduler.decay_ratio=0"]

    def ones(exclude: str) -> int:
        (run,) = pool1(train, str(tmp_path / exclude), [*arguments, f"--optimizer.decay_exclude={exclude}"])
        return int((run["parameters"] - 1).abs().lt(1e-4).sum())

    assert ones("none") < 10 and ones("vectors") > 300  # the embedding may have entries near 1


@pytest.mark.parametrize("first, second, kept", [("none", "vectors", 0.81), ("vectors", "vectors", 1.0)])
def test_a_resumed_run_has_its_own_exclusions(
    first: str, second: str, kept: float, pool1: Pool, tmp_path: Path
) -> None:
    """The second run has other rates, and may have other param groups than the checkpoint."""
    arguments = [*METHODS["adamw"], "--optimizer.lr=1e-6", "--lr_scheduler.warmup_steps=0", "--checkpoint.enable"]
    arguments += ["--lr_scheduler.decay_ratio=0", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]
    pool1(train, str(tmp_path), [*arguments, "--training.steps=2", *exclude(first, 1e5)])
    (run,) = pool1(train, str(tmp_path), [*arguments, "--training.steps=4", *exclude(second, 2e5)])
    assert int((run["parameters"] - kept).abs().lt(1e-4).sum()) > 300 and len(run["losses"]) == 2


def exclude(name: str, decay: float) -> list[str]:
    return [f"--optimizer.decay_exclude={name}", f"--optimizer.weight_decay={decay}"]

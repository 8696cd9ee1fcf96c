"""A whole training step of several ranks does not wait for the device."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.marks import slow
from tests.on_a_gpu import TrainingOnAGpu, waits_here
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, RECIPE, train
from torchtitan_scape.data.read_ahead import on_host

# Two micro-batches; only the first step is logged.
ARGUMENTS = ["--training.steps=5", "--training.global_batch_size=8", "--metrics.log_freq=100"]


def train_on_a_gpu(folder: str, arguments: list[str]) -> torch.Tensor:
    """Train; no step may wait, except the first one. Return the local parameters at the end."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.data.read_ahead import TokenSum
    from torchtitan_scape.replica.guard import FiniteGuard
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *arguments]))
    trainer.device = TrainingOnAGpu.DEVICE
    take_step, watched = trainer.train_step, []

    def step(batches: Any) -> None:
        if trainer.step == 1:
            return take_step(batches)
        with TrainingOnAGpu():
            take_step(batches)
        watched.append(trainer.step)

    with pytest.MonkeyPatch.context() as monkeypatch, patch("time.sleep"):
        waits_here(monkeypatch, FiniteGuard, "finish_previous_step")  # for flags that were copied to the host
        for name in ("start", "count"):  # on the host
            waits_here(monkeypatch, TokenSum, name)
        monkeypatch.setattr(trainer, "train_step", step)
        trainer.train()
    assert watched == [2, 3, 4, 5]
    parameters = torch.cat([local(p).detach().reshape(-1) for p in trainer.model_parts[0].parameters()])
    trainer.close()
    return parameters.clone()


def test_copies_that_wait_are_detected() -> None:
    """Also of what is computed from a batch; the copies are plain tensors."""
    device, (inputs, labels) = TrainingOnAGpu.DEVICE, on_host(({"input": torch.arange(4)}, torch.arange(4)))
    with TrainingOnAGpu():
        total = torch.tensor(0)
        total += (labels != 2).sum()
        copies = [total.to(device), labels.to(device), inputs["input"].to(device)]
        waits = [lambda: torch.ones(2).to(device), lambda: torch.ones(2).to(device=device), copies[0].item]
        waits.append(lambda: torch._foreach_add_(copies[:1], copies[0]))
        for wait in waits:
            with pytest.raises(AssertionError):
                wait()
    assert [type(copy) for copy in copies] == [torch.Tensor] * 3 and copies[0].item() == 3


@pytest.mark.parametrize(("method", "layout"), [("scape", "1x2"), slow("adams", "2x1")])
def test_a_training_step_does_not_wait_for_the_gpu(method: str, layout: str, pool2: Pool, tmp_path: Path) -> None:
    """Of two ranks, with the count of tokens and the copies of batches; the parameters are those of a plain run."""
    arguments = [*METHODS[method], *LAYOUTS[layout], *ARGUMENTS]
    watched = pool2(train_on_a_gpu, str(tmp_path / "watched"), arguments)
    plain = pool2(train, str(tmp_path / "plain"), arguments)
    assert all(torch.equal(ours, theirs["parameters"]) for ours, theirs in zip(watched, plain, strict=True))

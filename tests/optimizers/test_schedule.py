"""The learning rate's schedule beyond TorchTitan's last step, and at its borders."""

import itertools
from typing import Any

import pytest
import torch
from torchtitan.config.job_config import LRScheduler

from torchtitan_scape.config.parsing import parse
from torchtitan_scape.trainer.optimizers import build_schedulers, schedule_text

RECIPE = ["--job.config_file=train_configs/embedded.toml"]


def rates(schedule: LRScheduler, training_steps: int, steps: int) -> list[float]:
    """Return the factor of the learning rate in each of `steps` steps, and after the last one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = build_schedulers([optimizer], schedule, training_steps)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedulers.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_the_rate_stays_at_its_last_value(decay: Any) -> None:
    for total, warmup, ratio, least in itertools.product((5, 8), (0, 2, 5, 8), (None, 0.0, 0.25, 1.0), (0.0, 0.1)):
        schedule = LRScheduler(warmup, total, ratio, decay, least)
        found = rates(schedule, 20, 20)
        assert all(-1e-12 <= rate <= 1.0 for rate in found), (schedule, found)
        assert len({round(rate, 9) for rate in found[total:]}) == 1, (schedule, found)
        decays = ratio != 0.0 and min(warmup, total) < total
        assert found[total] == pytest.approx(least if decays else 1.0, abs=1e-9), (schedule, found)


def test_within_the_schedule_it_is_torchtitans() -> None:
    from torchtitan_scape.titan.components import build_lr_schedulers

    schedule = LRScheduler(3, None, None, "cosine", 0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs: Any = build_lr_schedulers([optimizer], schedule, 12)
    (factor,) = theirs.schedulers[0].lr_lambdas
    assert rates(schedule, 12, 12) == [factor(step) for step in range(13)]


def test_the_schedule_in_words() -> None:
    config = parse([*RECIPE, "--training.steps=12", "--lr_scheduler.warmup_steps=3", "--lr_scheduler.decay_ratio=0.5"])
    assert schedule_text(config).startswith("12 steps, 3 of them warm-up, ")
    assert "in the last 0.5 of them" in schedule_text(config)

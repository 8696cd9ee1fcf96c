"""The learning rate's schedule: TorchTitan's, constant after its last step."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.components import LRSchedulersContainer, build_lr_schedulers


def build_schedulers(optimizers: Any, lr_scheduler_config: Any, training_steps: int) -> LRSchedulersContainer:
    """Build TorchTitan's schedulers for its TrainSpec.

    TorchTitan's formulas continue beyond `total_steps`, where the linear and the root decay become negative, and the
    cosine rises again. Here the rate stays at its value of the last step.
    """
    total = lr_scheduler_config.total_steps if lr_scheduler_config.total_steps is not None else training_steps
    schedulers = build_lr_schedulers(optimizers, lr_scheduler_config, training_steps)
    for scheduler in schedulers.schedulers:
        scheduler.lr_lambdas = [partial(_until, total, factor) for factor in scheduler.lr_lambdas]
    return schedulers


def _until(total: int, factor: Callable[[int], float], step: int) -> float:
    return factor(min(step, total))


def schedule_text(config: JobConfig) -> str:
    """Return the schedule in words, for the record of a checkpoint."""
    schedule = config.lr_scheduler
    total = config.training.steps if schedule.total_steps is None else schedule.total_steps
    share = "" if schedule.decay_ratio is None else f" in the last {schedule.decay_ratio:g} of them"
    return (
        f"{total} steps, {schedule.warmup_steps} of them warm-up, {schedule.decay_type} decay{share} to "
        f"{schedule.min_lr_factor:g}"
    )

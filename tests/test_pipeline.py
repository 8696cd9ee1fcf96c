"""Pipeline parallelism in real processes: two stages train as one, and resume bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.pool import Pool, attempts
from tests.test_training import RECIPE

# Two layers and one micro-batch per local batch: every matrix product is that of one stage.
COMMON = [
    *RECIPE,
    "--training.steps=6",
    "--validation.freq=3",
    "--validation.steps=1",
    "--validation.local_batch_size=2",
    "--metrics.no-enable-tensorboard",
    "--parallelism.data_parallel_replicate_degree=2",
    "--debug.seed=5",
]
STAGES = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=1"]
METHODS = {
    "dense": ["--sync.method=dense", "--optimizer.name=AdamW"],
    "scape": ["--sync.scape.density=0.1"],
    "quantized": ["--sync.method=quantized", "--optimizer.name=AdamW", "--sync.quantized.code=int8"],
    "sparta": ["--sync.method=sparta", "--sync.sparta.code=float32", "--optimizer.name=AdamW"],
}


def train(folder: str, arguments: list[str], until: int = 6) -> dict[str, Any]:
    """Train, and return what each step logged and, by name, the parameters at the end."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local, plain_name
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*COMMON, f"--job.dump_folder={folder}", *arguments]))
    trainer.should_continue_training = lambda: trainer.step < until  # type: ignore[method-assign]
    metrics, losses, norms = trainer.metrics_processor, [], []
    log = metrics.log

    def keep(step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any = None) -> None:
        log(step, loss, max_loss, norm, extra_metrics)
        losses.append(metrics.last_loss)
        norms.append(norm)

    initial = {plain_name(n): local(p).detach().clone() for n, p in trainer.model_parts[0].named_parameters()}
    with patch("time.sleep"), patch.object(metrics, "log", keep):
        trainer.train()
    trainer.close()
    return {
        "initial": initial,
        "losses": losses,
        "norms": norms,
        "validation": trainer.validator.last_loss,
        "parameters": {plain_name(n): local(p).detach().clone() for n, p in trainer.model_parts[0].named_parameters()},
        "metrics": trainer.replica_optimizer.metrics(),
        "skipped": trainer.replica_optimizer.guard.skipped,
    }


def train_all(folder: str, extra: list[str], methods: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(f"{folder}/{name}", [*METHODS[name], *extra]) for name in methods}

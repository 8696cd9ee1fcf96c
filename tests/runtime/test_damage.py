"""Damaged parameters: they are found, no checkpoint has them, and intact checkpoints are not deleted."""

import math
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.marks import covering
from tests.pool import Pool
from tests.training import METHODS, RECIPE
from torchtitan_scape.core.consistency import DamagedParametersError, is_plausible
from torchtitan_scape.trainer.metrics import PATIENCE, Health


@pytest.mark.parametrize(
    ("value", "shared", "plausible"),
    [
        (0.5, None, True),
        (1e5, None, True),
        (2.0**21, None, False),
        (math.nan, None, False),
        (-math.inf, None, False),
        (0.9, 0.02, True),  # one entry of a small tensor may move by up to 1
        (5.12, 0.02, False),  # 0.02 with a flipped exponent bit
        (25.0, 3.0, True),
        (0.02, math.nan, False),
    ],
)
def test_plausible_values(value: float, shared: float | None, plausible: bool) -> None:
    values = torch.full((2, 3), 0.02)
    values[1, 1] = value
    anchor = None if shared is None else torch.full((6,), 0.02).index_fill_(0, torch.tensor(4), shared)
    assert bool(is_plausible(values, anchor)) == plausible
    assert bool(is_plausible(values.bfloat16(), anchor)) == plausible


def test_a_loss_jump_and_zero_gradients_are_alarms() -> None:
    health = Health(256)  # ln 256 = 5.55
    assert health.judge(1, 5.6, False) == "" and health.judge(2, 4.0, False) == ""
    assert "the loss was 4 and is 5.5 at step 3" in health.judge(3, 5.5, False) and health.alarm
    assert health.judge(4, 4.1, False) == "" == health.alarm
    assert health.judge(5, math.nan, False) == "", "skipped steps are the finite check's"
    assert "exactly 0 at step 6" in health.judge(6, 4.0, True)
    for step in range(7, 5 + PATIENCE):
        health.judge(step, 5.6, False)
    with pytest.raises(DamagedParametersError, match="Nothing was saved meanwhile"):
        health.judge(9, 5.6, False)


def test_an_alarm_at_the_last_step_ends_the_run() -> None:
    health = Health(256)
    health.judge(1, 3.0, False)
    with pytest.raises(DamagedParametersError):
        health.judge(2, 5.6, False, last=True)


def damaged(folder: str, arguments: list[str], after: int, factor: float) -> tuple[str, int]:
    """Damage an entry of a parameter on the last rank after a step; return the error that ends the run."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *arguments]))
    step = trainer.train_step

    def train_step(data: Any) -> None:
        step(data)
        if trainer.step == after and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                local(trainer.model_parts[0].output.weight).view(-1)[7] = factor

    try:
        with patch("time.sleep"), patch.object(trainer, "train_step", train_step):
            trainer.train()
    except (DamagedParametersError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)
    finally:
        trainer.checkpointer.close()  # waits for the thread that deletes old checkpoints
    return "", 0


SAVING = [
    "--training.steps=12",
    "--validation.no-enable",
    "--metrics.no-enable-tensorboard",
    "--checkpoint.enable",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=2",
    "--checkpoint.no-last-save-model-only",
]


@pytest.mark.parametrize("method, value", covering(product(("sparta", "streaming"), (math.nan, 1e30))))
def test_no_checkpoint_has_damaged_weights(method: str, value: float, pool2: Pool, tmp_path: Path) -> None:
    """With per-replica weights no other replica's weights tell."""
    for error, code in pool2(damaged, str(tmp_path), [*METHODS[method], *SAVING], 4, value):
        assert "are damaged at step 4: rank 1, replica_weights of 'output.weight'." in error, error
        assert code == 3
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["failed_steps", "step-2", "step-3"]


def test_a_nan_parameter_is_found_when_steps_are_skipped(pool2: Pool, tmp_path: Path) -> None:
    """Far from a check, it looks like wrong data: but a restart heals it."""
    arguments = [*METHODS["scape"], *SAVING, "--checkpoint.interval=100", "--sync.max_skipped_steps=3"]
    for error, code in pool2(damaged, str(tmp_path), arguments, 4, math.nan):
        assert error.startswith("DamagedParametersError: parameters are damaged at step ") and code == 3

"""TAGC in training: exact resuming, residuals in checkpoints with other degrees, and the planned bytes."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.pool import Pool, RankError
from tests.sharding.test_training import summary
from tests.training import METHODS, copy_checkpoint, train
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.sharding.options import LevelsOptions
from torchtitan_scape.sharding.tagc import TagcReduce

TAGC = ["--sharding.gradients_code=tagc", "--sharding.tagc.min_entries=1", "--sharding.tagc.sparsity=0.8"]
KEEP = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]
BATCH = ["--training.local_batch_size=1", "--training.global_batch_size=8", "--training.steps=4"]
BASE = [*METHODS["adamw"], *TAGC, *KEEP, *BATCH]
FOUR, TWO = (["--topology.ranks_per_node=2", f"--parallelism.data_parallel_shard_degree={n}"] for n in (4, 2))


def resumed(pool: Pool, tmp_path: Path, source: str, name: str, arguments: list[str], **more: Any) -> list[Any]:
    """Resume another run from step 2."""
    copy_checkpoint(tmp_path / source, tmp_path / name, 2)
    return pool(train, str(tmp_path / name), arguments, **more)


def test_resuming_equals_the_uninterrupted_run(pool4: Pool, tmp_path: Path) -> None:
    """Per-rank residuals, a skipped step and two micro-batches; the bytes sent equal the planned ones."""
    whole = pool4(train, str(tmp_path / "exact"), [*BASE, *FOUR], nan_at=3)
    again = resumed(pool4, tmp_path, "exact", "again", [*BASE, *FOUR], nan_at=3)
    for a, b in zip(whole, again, strict=True):
        assert len(b["losses"]) == 2 and b["losses"] == a["losses"][2:]
        assert torch.equal(a["parameters"], b["parameters"]) and b["skipped"] == 1
    found = summary(tmp_path / "again")
    sent, planned = (found[f"{which}shard_axis_bytes_per_step_and_rank"] for which in ("", "planned_"))
    assert sent == pytest.approx(planned) and {key.split()[1] for key in sent} == {"weights", "gradients", "index"}
    assert found["residual_norm"] > 0


def calls_of(folder: str, arguments: list[str]) -> list[str]:
    """Train; return the calls that wait for the copies of a checkpoint, and those that change a residual, in order."""
    from torchtitan_scape.trainer.checkpointer import ReplicaCheckpointer

    calls: list[str] = []
    add = TagcReduce._add

    def added(group: TagcReduce, flat: torch.Tensor) -> None:
        calls.append("add")
        add(group, flat)

    with (
        patch.object(TagcReduce, "_add", added),
        patch.object(ReplicaCheckpointer, "maybe_wait_for_staging", lambda _: calls.append("wait")),
    ):
        train(folder, arguments)
    return calls


def test_the_backward_pass_waits_for_the_copies_of_a_checkpoint(pool2: Pool, tmp_path: Path) -> None:
    """It adds to the residuals, which a save in the background copies until the optimizer's step at the latest."""
    calls = pool2(calls_of, str(tmp_path), [*METHODS["adamw"], *TAGC, *TWO, "--training.steps=1"])[0]
    assert calls[0] == "wait" and "add" in calls


@pytest.mark.slow
def test_resuming_on_other_degrees(pool4: Pool, pool2: Pool, tmp_path: Path) -> None:
    """The sum of residuals loads with the same method and with dense gradients; per-rank residuals are refused."""
    for residual in ("exact", "mean"):
        kept = [*BASE, f"--checkpoint.residual={residual}"]
        whole = pool4(train, str(tmp_path / residual), [*kept, *FOUR])
    with pytest.raises(RankError, match="has another shard degree, or compresses other layers; resume with the config"):
        resumed(pool2, tmp_path, "exact", "refused", [*BASE, *TWO])
    with pytest.raises(RankError, match=r"has no \[sharding\] option with residuals"):
        resumed(pool2, tmp_path, "exact", "other", [*BASE, *TWO, "--sharding.gradients_code=dense"])
    for name, more in (("fewer", []), ("dense", ["--sharding.gradients_code=dense"])):
        found = resumed(pool2, tmp_path, "mean", name, [*kept, *TWO, *more])
        assert found[0]["losses"] == pytest.approx(whole[0]["losses"][2:], rel=0.05)


def test_incompatible_options_are_refused() -> None:
    config = JobConfig()
    config.sharding.gradients_code, config.optimizer.name = "tagc", "AdamS"
    with pytest.raises(
        ValueError, match=r"gradients_code = 'tagc' with .* method = 'scape' and simulate_replicas = 1: the residuals"
    ):
        check_config(config, "cpu")
    config.sync.method, config.sharding.levels = "dense", LevelsOptions(weights=2, gradients=2)
    with pytest.raises(ValueError, match=r"gradients_code = 'tagc' is not supported with \[sharding.levels\]"):
        check_config(config, "cpu")

"""Prepared data in the trainer: resuming with other ranks, validation of whole splits, the best checkpoint."""

import json
import math
import shutil
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.checkpoint.runs import MORE
from tests.data.conftest import tokenizer_in
from tests.data.test_prepared import prepared
from tests.logs import logged
from tests.pool import Pool, attempts
from tests.training import LAYOUTS, METHODS, train
from torchtitan_scape.checkpoint.best import BestCheckpoint
from torchtitan_scape.data import BYTE_TOKENIZER
from torchtitan_scape.titan.components import AsyncMode
from torchtitan_scape.titan.config import Validation
from torchtitan_scape.trainer.checkpointer import ReplicaCheckpointer
from torchtitan_scape.trainer.trainer import ScapeTrainer
from torchtitan_scape.trainer.validator import validated_data


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = prepared(tmp_path_factory.mktemp("data") / "data", tokenizer_in(BYTE_TOKENIZER), 6000, 330)
    return [
        *METHODS["adams"],
        *(f"--{section}.dataset=prepared" for section in ("training", "validation")),
        *(f"--{section}.dataset_path={data}" for section in ("training", "validation")),
        "--training.local_batch_size=1",
        "--training.global_batch_size=6",
        "--training.steps=6",
        "--validation.steps=-1",
        "--validation.freq=2",
        "--checkpoint.enable",
        "--checkpoint.interval=2",
        "--checkpoint.no-last-save-model-only",
    ]


def test_a_resumed_run_on_other_ranks_reads_the_same_global_batches(
    arguments: list[str], pool2: Pool, pool3: Pool, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    two = [*arguments, *LAYOUTS["1x2"]]
    # Other kinds of data have no position in the checkpoint.
    text = [*two, "--training.dataset=standard_library", "--training.dataset_path=", "--training.steps=7"]
    (_, run), (good, message) = pool2(attempts, train, (str(whole), two), (str(whole), text))[0]
    assert not good and "has no position in data of this run's kind" in message.splitlines()[-1]

    summary, best = (json.loads((whole / f"{name}.json").read_text()) for name in ("summary", "best"))
    loss = summary["validation_loss"]
    assert summary["validation_perplexity"] == pytest.approx(math.exp(loss))
    # Three bytes of text per token, according to the generated manifest.
    assert summary["validation_bits_per_byte"] == pytest.approx(loss / math.log(2) / 3)
    assert [row[0] for row in best["losses"]] == [1, 2, 4, 6]
    assert (best["step"], best["checkpoint_step"]) == (6, 6) and best["validation_loss"] == loss

    other = shutil.copytree(whole, tmp_path / "other")
    for step in (4, 6):
        shutil.rmtree(other / "checkpoint" / f"step-{step}")
    resumed = pool3(train, str(other), [*arguments, *MORE["3x1"]])[0]
    assert resumed["losses"] == pytest.approx(run["losses"][2:], rel=1e-5)
    assert resumed["norms"] == pytest.approx(run["norms"][2:], rel=1e-4)
    # Only five samples: one per rank on three ranks.
    again = json.loads((other / "best.json").read_text())
    assert [row[0] for row in again["losses"]] == [1, 2, 4, 6]
    assert again["losses"][:2] == best["losses"][:2] and again["losses"][2:] != best["losses"][2:]


def test_the_best_checkpoint_of_a_resumed_run(tmp_path: Path) -> None:
    of, steps = {"dataset": "text"}, range(7)

    def noted(best: BestCheckpoint, *rows: tuple[int, float, bool], begun: int = 0) -> tuple[int, int | None]:
        for row in rows:
            best.note(*row, begun=begun)
        found = json.loads((tmp_path / "best.json").read_text())
        for one in (best, BestCheckpoint(tmp_path, of)):
            assert found["checkpoint_step"] == one.checkpoint_step(steps)
        return found["step"], found["checkpoint_step"]

    best = BestCheckpoint(tmp_path, of)
    assert best.checkpoint_step(steps) is None
    assert noted(best, (1, 4.0, False), (2, 3.0, True), (3, 2.0, False)) == (3, 2)
    assert noted(best, (4, 2.5, True), (5, math.nan, True), (6, 2.75, True)) == (3, 4)
    # A run resumed from step 2 ignores later validations, one with other data ignores all of them.
    assert BestCheckpoint(tmp_path, of).checkpoint_step(steps) == 4
    assert noted(BestCheckpoint(tmp_path, of), (4, 3.5, True), begun=2) == (2, 2)
    # A checkpoint may be written after the validation of its step, when data or time end, and then be resumed from.
    best = BestCheckpoint(tmp_path, of)
    assert noted(best, (5, 1.5, False), begun=4) == (5, 2)
    assert noted(BestCheckpoint(tmp_path, of), (6, 1.75, False), begun=5) == (5, 5)
    assert noted(best, (5, 1.5, True), begun=4) == (5, 5)
    assert [row[0] for row in json.loads((tmp_path / "best.json").read_text())["losses"]] == [1, 2, 4, 5]
    of = {"dataset": "prepared"}
    with logged() as lines:
        assert noted(BestCheckpoint(tmp_path, of), (6, 9.0, True), begun=5) == (6, 6)
    assert "other validation data (dataset 'text' -> 'prepared'), which are not compared" in "\n".join(lines)
    (tmp_path / "best.json").write_text("{")
    assert BestCheckpoint(tmp_path, of).checkpoint_step(steps) is None


def test_losses_of_another_number_of_readers_are_of_other_text() -> None:
    """An elastic run compared them; a whole split is the same text for all numbers."""
    two, four = (validated_data(Validation(steps=10), readers) for readers in (2, 4))
    assert two != four and two["local_batch_size"] == Validation().local_batch_size
    assert validated_data(Validation(steps=-1), 2) == validated_data(Validation(steps=-1), 4)


def test_the_best_checkpoint_is_not_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deleted: list[str] = []
    one: Any = ReplicaCheckpointer.__new__(ReplicaCheckpointer)
    one.keep_latest_k, one.folder = 2, "run"
    one.purge_queue, one.best = SimpleNamespace(put=deleted.append), BestCheckpoint(tmp_path, {})
    for row in ((1, 3.0), (2, 2.0), (3, 4.0), (5, 1.0)):  # a run was killed while it wrote step 5
        one.best.note(*row, saved=True, begun=0)
    guard = SimpleNamespace(skipped_in_a_row=1)
    one._optimizers = SimpleNamespace(guard=guard)
    steps = [1, 2, 3, 4]
    one._complete_steps = lambda: steps
    monkeypatch.setattr("torchtitan_scape.checkpoint.storage.steps_in", lambda folder: steps)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    one._purge_stale_checkpoints()
    assert deleted == [], "nothing is deleted while steps are skipped"
    guard.skipped_in_a_row = 0
    one._purge_stale_checkpoints()
    assert deleted == ["run/step-1"]


@pytest.mark.parametrize("cause", [OSError("the disk is full"), TypeError("a bug")])
def test_a_save_that_fails_later_is_not_the_best_checkpoint(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """best.json named it, and the best one that exists was deleted in its place."""
    deleted: list[str] = []
    one: Any = ReplicaCheckpointer.__new__(ReplicaCheckpointer)
    one.keep_latest_k, one.folder, one._being_written = 2, "run", 6
    one.purge_queue, one.best = SimpleNamespace(put=deleted.append), BestCheckpoint(tmp_path, {})
    one._optimizers = SimpleNamespace(guard=SimpleNamespace(skipped_in_a_row=0))
    one.async_mode, one.enable_ft_dataloader_checkpoints, one.save_future = AsyncMode.ASYNC, False, Future()
    steps = [2, 4]
    one._complete_steps = lambda: steps
    monkeypatch.setattr("torchtitan_scape.checkpoint.storage.steps_in", lambda folder: steps)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)

    def best() -> tuple[int, int]:
        found = json.loads((tmp_path / "best.json").read_text())
        return found["step"], found["checkpoint_step"]

    for step, loss in ((2, 2.0), (4, 3.0), (6, 1.0)):
        one.best.note(step, loss, step in steps or one.saved_at(step), begun=0)
    assert best() == (6, 6)
    one.save_future.set_exception(CheckpointException("write", {1: (cause, None)}))  # type: ignore[dict-item]
    with nullcontext() if isinstance(cause, OSError) else pytest.raises(CheckpointException):
        assert one._earlier_failed()
    assert best() == (6, 2)
    steps += [8, 10]
    one._purge_stale_checkpoints()
    assert deleted == ["run/step-4"]


def test_a_refused_save_is_not_the_best_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best one that exists was deleted in its place, and its export failed."""
    one: Any = ReplicaCheckpointer.__new__(ReplicaCheckpointer)
    one._being_written = 4
    noted: dict[int, bool] = {}
    best = SimpleNamespace(note=lambda step, loss, saved, begun: noted.update({step: saved}))
    trainer: Any = SimpleNamespace(checkpointer=one, best=best, step=6, steps_taken=6)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    for step in (4, 6):
        ScapeTrainer._validated(trainer, step, 1.0)
    trainer.checkpointer = ReplicaCheckpointer.__new__(ReplicaCheckpointer)  # without a folder if it is not enabled
    ScapeTrainer._validated(trainer, 8, 1.0)
    assert noted == {4: True, 6: False, 8: False}

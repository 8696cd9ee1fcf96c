"""Checkpoints of runs in real processes: damage is detected and reported, intact checkpoints are kept."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.logs import logged
from tests.marks import slow
from tests.pool import Pool, attempts
from tests.training import EMBEDDED, METHODS, RECIPE, copy_checkpoint, train
from torchtitan_scape.checkpoint.storage import note_failed_step
from torchtitan_scape.titan.components import AsyncMode
from torchtitan_scape.trainer.checkpointer import ReplicaCheckpointer

SAVING = [
    *METHODS["scape"],
    "--training.steps=8",
    "--validation.no-enable",
    "--metrics.no-enable-tensorboard",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.no-last-save-model-only",
]


def saved(folder: str, steps: int, *arguments: str, nan_at: int | None = None) -> dict[str, Any]:
    """Train until `steps`; return the results and the log lines about checkpoints."""
    with logged() as messages:
        result = train(folder, [*SAVING, *arguments], stop_after=steps, nan_at=nan_at, for_good=True)
    kept = [
        line
        for line in messages
        if any(word in line for word in ("damaged", "Resumed", "incomplete", "takes", "only the model", "load_step"))
    ]
    return result | {"messages": kept}


@pytest.fixture(scope="module")
def run(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8. Tests copy its folder and do not change it."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pool2(saved, str(folder), 8)[0]


def data_file(step: Path) -> Path:
    return max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncate(step: Path) -> None:
    os.truncate(data_file(step), data_file(step).stat().st_size - 1)


def flip(step: Path) -> None:
    with open(data_file(step), "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def half_written(step: Path) -> None:
    (step / "manifest.json").unlink()


def fails_twice(step: Path) -> None:
    """Its state has damage that only later steps show."""
    for _ in range(2):
        note_failed_step(str(step.parent), 7)


def refused(pool: Pool, folder: Path, *cases: tuple[list[str], str]) -> None:
    """Assert that every rank of each of these runs ends with its message."""
    for outcomes in pool(attempts, saved, *((str(folder), 8, *more) for more, _ in cases)):
        for (good, text), (_, message) in zip(outcomes, cases, strict=True):
            assert not good and "ValueError" in text and message in text.splitlines()[-1], text


@pytest.mark.parametrize(
    "harm, word",
    [
        (truncate, "truncated"),
        (fails_twice, "failed 2 times at step 7"),
        slow(flip, "checksum"),
        slow(half_written, "incomplete"),
    ],
)
def test_the_newest_complete_checkpoint_is_loaded(
    harm: Any, word: str, run: tuple[Path, dict[str, Any]], pool2: Pool, tmp_path: Path
) -> None:
    """The resumed run ends bitwise equal to the uninterrupted one."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint" / "step-8")
    harm(folder / "checkpoint" / "step-6")
    results = pool2(saved, str(folder), 8)
    text = "\n".join(results[0]["messages"])
    assert "step-6" in text and word in text and "step-4 in" in text
    assert torch.equal(results[0]["parameters"], run[1]["parameters"])


def test_a_damaged_checkpoint_stops_the_run_without_fallback(
    run: tuple[Path, dict[str, Any]], pool2: Pool, tmp_path: Path
) -> None:
    folder = shutil.copytree(run[0], tmp_path / "run")
    for step in (2, 4, 6, 8):
        flip(folder / "checkpoint" / f"step-{step}")
    truncate(folder / "checkpoint" / "step-8")
    refused(
        pool2,
        folder,
        (["--checkpoint.no-fallback"], "step-8 is damaged"),
        (["--checkpoint.load_step=4"], "step-4 is damaged"),
        (["--checkpoint.load_step=5"], "there is no finished"),
        ([], "all checkpoints"),
    )
    assert len(list((folder / "checkpoint").iterdir())) == 4  # nothing was deleted


def test_another_model_or_a_model_only_checkpoint_cannot_be_continued(
    run: tuple[Path, dict[str, Any]], pool2: Pool, tmp_path: Path
) -> None:
    folder = shutil.copytree(run[0], tmp_path / "run")
    pool2(saved, str(folder), 9, "--training.steps=9", "--checkpoint.last_save_model_only")
    refused(
        pool2,
        folder,
        (["--checkpoint.load_step=8", *EMBEDDED], "holds the model"),
        (["--checkpoint.folder=other", "--checkpoint.initial_load_path=/nowhere"], "is not a checkpoint folder"),
        (["--training.steps=10"], "step-9 contains only the model"),
    )
    # The run itself had ended: it has nothing to do when it is started again.
    for again in pool2(saved, str(folder), 9, "--training.steps=9", "--checkpoint.last_save_model_only"):
        assert again["losses"] == [] and any("Loading only the model" in line for line in again["messages"])
    # A new run can start from its weights.
    path = f"--checkpoint.initial_load_path={folder}/checkpoint/step-9"
    pool2(saved, str(tmp_path / "new"), 1, path)


def test_keeping_the_latest_never_deletes_the_only_good_one(
    run: tuple[Path, dict[str, Any]], pool2: Pool, tmp_path: Path
) -> None:
    """Two incomplete folders are newer than the only intact one, which must not be deleted because of them."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    steps = folder / "checkpoint"
    shutil.rmtree(steps / "step-8")
    half_written(steps / "step-4")
    half_written(steps / "step-6")
    keep = "--checkpoint.keep_latest_k=2"
    pool2(saved, str(folder), 4, keep)  # step-4 is written again: then `keep_latest_k` complete ones exist
    assert {path.name for path in steps.iterdir()} == {"step-2", "step-4", "step-6"}
    pool2(saved, str(folder), 8, keep)
    assert {path.name for path in steps.iterdir()} == {"step-6", "step-8"}
    # Back to an earlier step: newer checkpoints do not count for the deletion of those that follow.
    folder = shutil.copytree(run[0], tmp_path / "back")
    back = pool2(saved, str(folder), 4, keep, "--checkpoint.load_step=2", "--checkpoint.interval=1")
    warning = "checkpoint.load_step = 2: a start without it loads the newest checkpoint, step-8 now; delete those after"
    assert any(warning in line for line in back[0]["messages"])
    assert {path.name for path in (folder / "checkpoint").iterdir()} == {"step-3", "step-4", "step-6", "step-8"}


def test_a_run_starts_from_a_seed_checkpoint(pool2: Pool, tmp_path: Path) -> None:
    pool2(seed, str(tmp_path))
    results = pool2(saved, str(tmp_path), 2)
    assert any("Loading only the model" in line and "step-0" in line for line in results[0]["messages"])


def seed(folder: str) -> None:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    trainer = ScapeTrainer(
        parse([*RECIPE, *SAVING, f"--job.dump_folder={folder}", "--checkpoint.last_save_model_only"])
    )
    trainer.checkpointer.save(0, last_step=True)
    trainer.close()


@pytest.mark.parametrize("method", ["scape", slow("adamw")])
def test_persistent_nans_stop_the_run_and_keep_the_last_good_state(method: str, pool2: Pool, tmp_path: Path) -> None:
    """Rank and parameter are named; checkpoints during skipped steps contain the state of the last applied step."""
    arguments = [*METHODS[method], "--sync.max_skipped_steps=3"]
    whole = pool2(saved, str(tmp_path / "whole"), 3, *arguments, "--checkpoint.interval=3")
    for good, text in pool2.outcomes(saved, str(tmp_path / "bad"), 8, *arguments, nan_at=4):
        last = text.splitlines()[-1]
        assert not good and "NonFiniteGradientError" in last and "3 steps in a row" in last
        assert "rank 1, parameter 'tok_embeddings.weight'" in last
    steps = tmp_path / "bad" / "checkpoint"
    assert {path.name for path in steps.iterdir()} == {"step-2", "step-4"}
    kept = pool2(saved, str(tmp_path / "bad"), 4, *arguments)  # no step remains
    for a, b in zip(whole, kept, strict=True):
        assert torch.equal(a["parameters"], b["parameters"]) and b["skipped"] == 1


@pytest.mark.slow  # test_interrupted_saves.py has a full disk in the default run
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_fails_the_save_and_keeps_older_checkpoints(mode: str, pool2: Pool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # Room for one checkpoint of 29 MB and no second one.
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        outcomes = pool2.outcomes(saved, str(disk), 8, *EMBEDDED, f"--checkpoint.async_mode={mode}")
        for good, text in outcomes:
            last = text.splitlines()[-1]
            assert not good and "ValueError" in last and "No space left on device" in last and "step-2" in last
        assert {path.name for path in (disk / "checkpoint").iterdir()} == {"step-2"}
        results = pool2(saved, str(disk), 3, *EMBEDDED, f"--checkpoint.async_mode={mode}")
        assert any("Resumed from" in line and "step-2" in line for line in results[0]["messages"])
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("method", ["scape-offload", slow("adamw"), slow("scape-gather-bf16")])
def test_asynchronous_saves_contain_the_state_of_their_step(method: str, pool2: Pool, tmp_path: Path) -> None:
    """Training continues while they are written. Offloaded states in host memory must be staged, too."""
    arguments = [*METHODS[method], "--checkpoint.async_mode=async"]
    whole = pool2(saved, str(tmp_path / "whole"), 8, *arguments)
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 4)
    resumed = pool2(saved, str(tmp_path / "resumed"), 8, *arguments)
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a["parameters"], b["parameters"])


def test_asynchronous_saves_use_no_gpu_in_the_background(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before the copy to the host, the kernels of the main stream are waited for, and after it DCP uses no stream."""
    log: list[Any] = []

    def save(state_dict: Any, storage_writer: Any, async_stager: Any, **_: Any) -> None:
        log.append(storage_writer.per_thread_copy_ahead)
        assert async_stager.stage(state_dict) == {"x": 1}

    monkeypatch.setattr(dcp, "async_save", save)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: log.append("synchronized"))
    )
    manager = ReplicaCheckpointer.__new__(ReplicaCheckpointer)
    manager._not_counted, manager.pg, manager.stager = set(), None, None
    manager.dcp_save({"x": 1}, str(tmp_path / "step-1"), AsyncMode.ASYNC)
    assert log == [0, "synchronized"]

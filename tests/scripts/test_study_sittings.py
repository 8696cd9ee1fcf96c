"""Runs of a study that are killed and continue, with the trainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.common import ROOT, losses, process_state
from scripts.study import launchers, sittings
from scripts.study.__main__ import main
from scripts.study.grid import GRIDS, Grid, RunSpec
from scripts.study.queue import Queue, _Running
from scripts.study.store import Store
from tests import server
from tests.scripts.study_stand_in import SMALL, Study, declare
from torchtitan_scape.checkpoint.storage import MANIFEST, is_complete

STEPS = 60
MULOCO = """
[methods.muloco]
label = "MuLoCo"
sync.method = "diloco"
sync.diloco.inner_steps = 7
sync.diloco.code = "e2m1"
sync.diloco.decay = 0.9
optimizer.name = "Muon"
optimizer.beta1 = 0.95
"""
TIMES = ("seconds_per_step", "wall_seconds")


class Sittings:
    """A grid of one run of MuLoCo, its results and the folder of its work."""

    def __init__(self, folder: Path) -> None:
        options = {"validation.steps": 1, "validation.local_batch_size": 2}
        one = SMALL | {"steps": STEPS, "methods": ["muloco"], "learning_rates": [1e-2], "seeds": [0]}
        self.grid, self.output, self.work = folder / "grid.toml", folder / "results", folder / "work"
        folder.mkdir()
        declare(self.grid, one | {"options": options})
        self.grid.write_text(self.grid.read_text() + MULOCO)
        self.arguments = ["run", str(self.grid), f"--output={self.output}", f"--work={self.work}"]

    @property
    def spec(self) -> RunSpec:
        grid = Grid(self.grid)
        return grid.spec(grid.sets[0], "muloco", 1e-2, 0)

    @property
    def out(self) -> Path:
        return self.work / self.spec.name

    def run(self) -> dict[str, Any]:
        assert main(self.arguments) == 0
        (line,) = Store(self.output).own.values()
        return dict(line["result"])

    def run_until(self, step: int) -> None:
        """Run as processes, and kill these when the checkpoint of the step is complete."""
        study = subprocess.Popen([sys.executable, "-m", "scripts.study", *self.arguments], cwd=ROOT)
        try:
            while not (self.out / "checkpoint" / f"step-{step}" / MANIFEST).is_file():
                assert study.poll() is None, "the run has ended before its checkpoint was found"
                time.sleep(0.01)
            trainer = json.loads((self.out / "run.lock.json").read_text())["process"]
        finally:
            study.kill()
            study.wait()
        os.killpg(trainer, signal.SIGKILL)
        while process_state(trainer)[:1] not in ([], ["Z"]):
            time.sleep(0.01)


def test_a_killed_run_continues_and_its_result_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with an incomplete checkpoint and one of another step in the folder."""
    monkeypatch.setattr(launchers, "sys", SimpleNamespace(executable=server.python()))
    whole, killed = Sittings(tmp_path / "whole"), Sittings(tmp_path / "killed")
    every = sittings.interval(killed.spec)
    killed.run_until(4 * every)
    folder = killed.out / "checkpoint"
    saved = max(int(path.name[5:]) for path in folder.iterdir() if is_complete(path))
    shutil.copytree(folder / f"step-{saved}", folder / f"step-{saved + every}", dirs_exist_ok=True)
    (folder / f"step-{saved + every}" / MANIFEST).unlink()
    shutil.copytree(folder / f"step-{saved}", folder / f"step-{saved + 1}")
    first = json.loads((killed.out / sittings.TIMES).read_text())
    result, expected = killed.run(), whole.run()
    log = (killed.out / sittings.LOG).read_text()
    assert f"checkpoint/step-{saved} in" in log and f"Training starts at step {saved + 1}\n" in log
    assert result["validation"] and len(result["training"]) == STEPS
    assert {k: v for k, v in result.items() if k not in TIMES} == {k: v for k, v in expected.items() if k not in TIMES}
    second = json.loads((killed.out / sittings.TIMES).read_text())
    assert first["earlier"] == 0.0 < second["earlier"] < result["wall_seconds"]
    assert not folder.exists() and not (whole.out / "checkpoint").exists(), "a finished run needs no checkpoints"


def test_checkpoints_are_at_logged_steps_without_validation() -> None:
    for name, at_least in (("quality_study", 15), ("at_size", 13), ("comparison", 15)):
        grid = Grid(GRIDS / f"{name}.toml")
        for one in grid.sets:
            spec = grid.spec(one, one.methods[0], one.learning_rates[0], one.seeds[0])
            every = sittings.interval(spec)
            if "program" in spec.about:
                assert every == 0
                continue
            assert at_least <= spec.steps // every <= 20
            assert every % spec.overrides["metrics.log_freq"] == 0
            assert not any(step % spec.overrides["validation.freq"] == 0 for step in range(every, spec.steps, every))
            assert not any(key.startswith("checkpoint.") for key in spec.options)


def test_only_a_stored_run_loses_its_checkpoints(study: Study, tmp_path: Path) -> None:
    """A trainer that was stopped is no failure, which the tuning would take for a settled trial."""
    assert [code for code in (-9, 0, 1, 2, 3, 75, 130) if sittings.stopped(code)] == [-9, 75, 130]
    grid = Grid(declare(study.grid, SMALL))
    spec, out = grid.spec(grid.sets[0], "scape-0.1", 1e-3, 0), study.output / "run"
    out.mkdir(parents=True)
    (out / "log.txt").touch()
    assert sittings.begin(spec, out) == 0.0
    assert [path.name for path in out.iterdir()] == [sittings.TIMES], "nothing to continue from"
    (out / "log.txt").touch()
    queue = Queue(grid, grid.sets, Store(study.output), 1, tmp_path)
    for code, stopped in ((-9, True), (2, False)):
        (out / "checkpoint").mkdir(exist_ok=True)
        queue._collect(_Running(spec, SimpleNamespace(returncode=code), 0.0, out, 0.0))  # type: ignore[arg-type]
        assert (spec.key in queue.stopped, spec.key in queue.failed) == (True, not stopped)
        assert queue.waits_for([spec]) == stopped and spec not in queue.missing()
        assert (out / "checkpoint").is_dir()


def test_the_last_value_of_a_step_counts_also_of_a_log_that_ends_within_a_record(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for start, shift in ((1, 1.0), (3, 0.0)):  # the first sitting was killed after step 4, its checkpoint is of step 2
        writer = SummaryWriter(str(tmp_path / "tb" / str(start)), filename_suffix=f".{start}")
        for step in range(start, 5 if start == 1 else 7):
            writer.add_scalar("loss_metrics/global_avg_loss", 10.0 - step + (shift if step > 2 else 0.0), step)
        writer.close()
    first = next((tmp_path / "tb" / "1").iterdir())
    first.write_bytes(first.read_bytes()[:-7])
    assert losses(tmp_path)["training"] == [(step, 10.0 - step) for step in range(1, 7)]

"""Loss curves against a baseline and index frequencies, of stored runs and of dump folders; the papers' grids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts.common import markdown
from scripts.study import curves
from scripts.study.__main__ import main
from scripts.study.grid import GRIDS, Grid
from scripts.study.launchers import ARRAYS
from scripts.study.report import write_report
from scripts.study.slurm import OFFLINE, step_seconds
from scripts.study.store import Store
from scripts.study.sweep_tables import step_times
from torchtitan_scape.observe.record import Frequency, Record, read_frequencies
from torchtitan_scape.topology.machines import get_machine

STEPS = range(1, 31)


def summary(gap: float, sent: float) -> dict[str, Any]:
    return {
        "steps": 30,
        "validation_loss": 4.0 + gap,
        "seconds_per_step": 86.4,
        "bytes_sent_per_step_and_rank": {"node": sent},
        "shard_axis_bytes_per_step_and_rank": {"node weights": 1e6},
    }


def curve(gap: float) -> list[list[float]]:
    return [[step, 6.0 - step / 20 + (gap if step > 10 else 0.0)] for step in STEPS]


def test_frequencies_survive_the_file_and_a_restart(tmp_path: Path) -> None:
    record = Record(tmp_path, {})
    record.add_frequency(Frequency(1, 2, "wo", 0.1, np.array([90, 0, 10])))
    record.add_frequency(Frequency(11, 4, "wo", 0.1, np.array([85, 5, 0, 0, 10])))
    record.write()
    found = read_frequencies(record.path)
    assert [(one.first, one.steps, one.tensor) for one in found] == [(1, 2, "wo"), (11, 4, "wo")]
    assert [list(one.entries) for one in found] == [[90, 0, 10], [85, 5, 0, 0, 10]]
    again = Record(tmp_path, {})
    again.begin(13)  # within the second window
    assert [one.first for one in again.frequencies] == [1]
    table = curves.frequency_table(found)
    assert "| wo | 1 to 2 | 100 | 90.0 % | 10.00 % | 100.0 % | 10.00 % | 100.0 % |" in table
    assert "| wo | 11 to 14 | 100 | 85.0 % | 10.00 % | 88.9 % | 10.00 % | 88.9 % |" in table


def test_report_of_the_radius_figures(tmp_path: Path) -> None:
    """The baseline is one run, which three sets share."""
    grid, store = Grid(GRIDS / "radius_paper.toml"), Store(tmp_path)
    runs = {spec.key: spec for one in grid.sets for method in one.methods for spec in grid.specs(one, method)}
    assert len(runs) == 7
    for spec in runs.values():
        gap = {"dense": 0.0, "topk-0.01": 0.5}.get(spec.method, 0.1)
        content = {"label": spec.label, **summary(gap, 2e6), "curves": {"training": curve(gap), "validation": []}}
        store.keep(spec, content, "", {})
        if spec.method == "dense":
            record = Record(tmp_path / "run", {})
            record.add_frequency(Frequency(1, 40, "w1", 0.01, np.array([99, *[0] * 39, 1])))
            record.write()
            with np.load(record.path) as file:
                np.savez(tmp_path / ARRAYS, **{f"{spec.of.name}/dense/{key}": file[key] for key in file.files})
    text = write_report(grid, tmp_path).read_text()
    assert "| w1 | 1 to 40 | 100 | 99.0 % | 1.00 % | 100.0 % | 1.00 % | 100.0 % |" in text
    assert "| top-k 0.01 | 30 | 5.2250 | +0.5000 | +0.5000 at step 20 | 4.5000 | 90.02 | +35.42 |" in text
    for one in grid.sets:
        assert (tmp_path / f"{one.name}.png").stat().st_size > 5000


def test_finished_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gap in (("adamw", 0.0), ("scape", -0.1)):
        for start, wrong in ((1, 1.0), (15, 0.0)):  # resumed after step 14, whose log goes on to the end
            writer = SummaryWriter(str(tmp_path / name / "tb" / str(start)), filename_suffix=f".{start}")
            for step, loss in curve(gap)[start - 1 :]:
                writer.add_scalar("loss_metrics/global_avg_loss", loss + wrong * (step > 14), int(step))
            writer.close()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary(gap, 1e6)))
    folders = [str(tmp_path / name) for name in ("adamw", "scape")]
    assert main(["compare", *folders, "--plot", str(tmp_path / "losses.png")]) == 0
    shown = capsys.readouterr().out
    assert "| adamw | 30 | 4.7250 | 0 | 0 | 4.0000 | 54.60 | +0.00 | 86400.0 | 0.03 | 2.000 |" in shown
    assert "| scape | 30 | 4.6250 | -0.1000 |" in shown and (tmp_path / "losses.png").stat().st_size > 5000
    assert main(["compare", *folders, str(tmp_path / "none")]) == 2
    assert "none/summary.json cannot be read; give dump folders" in capsys.readouterr().err
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "summary.json").write_text(json.dumps(summary(0.0, 1e6)))
    assert main(["compare", str(tmp_path / "bare")]) == 2
    assert "global_avg_loss is in no TensorBoard log" in capsys.readouterr().err
    (tmp_path / "other" / "scape").mkdir(parents=True)
    assert main(["compare", folders[1], str(tmp_path / "other" / "scape")]) == 2
    assert "have one name; rename one" in capsys.readouterr().err


def test_frontier_has_the_sizes_and_forms_of_the_paper() -> None:
    """A run with its start fits into the two hours of a job; every size divides the global batch."""
    grid, machine = Grid(GRIDS / "frontier_paper.toml"), get_machine("frontier")
    for one in grid.sets[:2]:
        assert one.sizes == (64, 128, 192, 256, 384) and one.methods == ("zero3", "zeropp", "levels")
        for spec in (spec for name in one.methods for spec in grid.specs(one, name)[::4]):
            step = step_seconds(spec, [*spec.arguments[1:], *OFFLINE], machine)
            assert 300 + 2 * 6 * step + 60 < 7200 and spec.options["training.global_batch_size"] == 1536
            assert spec.size * spec.options["training.local_batch_size"] <= 1536
    assert grid.methods["levels"]["sharding.levels.gradients"] == 8 and grid.methods["zeropp"]["every_forward"]


def test_rates_of_a_rank_are_shown_where_they_were_measured() -> None:
    cell = {
        **{"label": "FSDP2", "method": "zero3", "dense": True, "size": 8, "nodes": 1, "ranks_per_node": 8},
        **{"launcher": "slurm", "compute": "real", "tokens_per_step": 4e5, "steps": [1.0], "step_seconds": 1.0},
        **{"phases": {}, "sent": {}},
    }
    assert "TFLOP/s" not in markdown(list(step_times([cell])))
    table = markdown(list(step_times([cell | {"flops_per_token": 1e9}, cell])))
    assert "| 400,000 | 50.0 | 100.0 |" in table and "| 400,000 | - | 100.0 |" in table

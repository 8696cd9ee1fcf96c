"""The comparison: what is tuned and in which order, what the studies share, and the report of made-up cells."""

from pathlib import Path
from typing import Any

import pytest

from scripts.studies import comparison
from scripts.studies.comparison_costs import MACHINES, planned, run_seconds, shares, step_seconds
from scripts.studies.comparison_figures import common
from scripts.studies.comparison_methods import budgets
from scripts.studies.quality_cells import Cell, Grid, Store, defaults
from scripts.studies.quality_study import Queue
from scripts.studies.quality_tuning import Tuning
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import PlannedRun

GRID = """
recipe = "train_configs/study.toml"
parameters = 200720
lr_warmup = 0.05
density_warmup = 0.05
validations = 4
validation_tokens = 81920
[methods.dense-adamw]
label = "AdamW, dense"
"sync.method" = "dense"
"optimizer.name" = "AdamW"
[methods.dense-adams]
label = "AdamS, dense"
"sync.method" = "dense"
"optimizer.name" = "AdamS"
[methods.scape]
label = "SCAPE"
"sync.method" = "scape"
"sync.scape.density" = 0.05
"sync.scape.wire" = "int4"
[methods.powersgd]
label = "PowerSGD"
also = { "sync.powersgd.start" = [10, 20] }
"sync.method" = "powersgd"
"optimizer.name" = "AdamW"
"sync.powersgd.rank" = 1
[[sets]]
name = "adams"
steps = 100
batch = 1024
replicas = 4
methods = ["dense-adams", "scape"]
learning_rates = [0.004, 0.002, 0.008]
further = 2
seeds = [0, 1]
[[sets]]
name = "adamw"
steps = 100
batch = 1024
replicas = 4
methods = ["dense-adamw", "powersgd"]
learning_rates = [0.016, 0.008, 0.032]
further = 2
seeds = [0, 1]
"""
# Of the method that begins so: its best learning rate, and its loss there.
BEST = {"dense-adams": (4e-3, 2.0), "scape": (4e-3, 2.1), "dense-adamw": (32e-3, 1.9), "powersgd": (16e-3, 2.4)}


def loss_of(cell: Cell) -> float:
    rate, loss = BEST[cell.method]
    return loss + abs(cell.learning_rate - rate) - 0.1 * bool(cell.also) + 0.01 * cell.seed


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    (tmp_path / "grid.toml").write_text(GRID)
    return Grid(tmp_path / "grid.toml")


def keep(store: Store, cell: Cell, loss: float) -> None:
    dense = 1e6
    sent = dense * {"dense": 1.0, "scape": 0.02, "powersgd": 0.12}[str(cell.options["sync.method"])]
    content: dict[str, Any] = {"parameters": 200_720, "validation_loss": loss, "bytes_per_step": sent}
    store.keep(cell, content | {"dense_bytes_per_step": dense, "wall_seconds": 1.0})


def work_off(queue: Queue) -> list[str]:
    """Keeps made-up results of all that is missing; what that was, in order."""
    ran = []
    while missing := queue.missing():
        keep(queue.store, missing[0], loss_of(missing[0]))
        ran.append(missing[0].title.partition(": ")[2].partition(", 100 x")[0])
    return ran


def test_every_method_has_the_same_budget_and_the_first_rates_come_first(grid: Grid, tmp_path: Path) -> None:
    queue = Queue(grid, grid.sets, tmp_path / "out", jobs=1, work=tmp_path)
    ran = work_off(queue)
    first = ["dense-adams, lr 0.004", "scape, lr 0.004", "dense-adamw, lr 0.016", "powersgd, lr 0.016"]
    assert ran[:4] == [f"{run}, seed 0" for run in first]
    # Beyond the edge; and where the best rate lies inside, what is tuned besides, at that rate.
    assert ran[12:15] == [
        "dense-adamw, lr 0.064, seed 0",
        "powersgd, lr 0.016, start 10, seed 0",
        "powersgd, lr 0.016, start 20, seed 0",
    ]
    seeds = ["dense-adams, lr 0.004", "scape, lr 0.004", "dense-adamw, lr 0.032", "powersgd, lr 0.016, start 10"]
    assert ran[15:] == [f"{run}, seed 1" for run in seeds]


@pytest.mark.parametrize("best, more", [(1e-3, [0.001, 0.0005]), (16e-3, [0.016, 0.032]), (4e-3, [])])
def test_an_edge_is_passed_no_more_often_than_declared(best: float, more: list[float], grid: Grid) -> None:
    tuning = Tuning(grid, grid.sets[0], "scape", lambda cell: abs(cell.learning_rate - best))
    assert [cell.learning_rate for cell in tuning.cells] == [0.004, 0.002, 0.008, *more] and tuning.done
    assert tuning.best is not None and tuning.best.learning_rate == best and not tuning.at_edge


def test_a_failed_rate_is_an_end_of_the_grid(grid: Grid) -> None:
    """A rate that diverges is not waited for, and none beyond it is tried."""
    cells = {rate: grid.cell(grid.sets[1], "powersgd", rate, 0) for rate in (0.008, 0.016, 0.032)}
    losses = {cells[0.008].key: 2.0, cells[0.016].key: 1.9}
    tuning = Tuning(grid, grid.sets[1], "powersgd", lambda cell: losses.get(cell.key), {cells[0.032].key})
    assert [cell.also for cell in tuning.cells[3:]] == [{"sync.powersgd.start": 10}] and not tuning.done


def test_cells_of_another_study_are_taken_and_left_alone(grid: Grid, tmp_path: Path) -> None:
    cell = grid.cell(grid.sets[0], "dense-adams", 4e-3, 0)
    keep(Store(tmp_path / "other"), cell, 2.0)
    queue = Queue(grid, grid.sets, tmp_path / "out", 1, tmp_path, shared=[tmp_path / "other"])
    assert cell.key not in [one.key for one in queue.missing()] and queue.done() == 1
    before = {path: path.read_bytes() for path in (tmp_path / "other" / "cells").iterdir()}
    work_off(queue)
    assert before == {path: path.read_bytes() for path in (tmp_path / "other" / "cells").iterdir()}
    assert not list((tmp_path / "out" / "cells").glob(f"*{cell.key}.json"))


def test_bytes_are_planned_for_a_step_and_counted_for_the_run(grid: Grid, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, one in (("scape", grid.sets[0]), ("dense-adamw", grid.sets[1])):
        keep(store, grid.cell(one, name, 4e-3, 0), 2.0)
    scape = store.read(grid.cell(grid.sets[0], "scape", 4e-3, 0))
    dense = store.read(grid.cell(grid.sets[1], "dense-adamw", 4e-3, 0))
    assert scape is not None and dense is not None
    assert planned(scape["options"]).name == "scape 0.05 int4"
    assert planned(dense["options"]) == PlannedRun(DenseOptions(), "AdamW", overlap=True), "where a method can"
    assert (
        0.011 < shares(scape)[0] < 0.014
        and shares(scape)[1] == 0.02
        and shares(dense) == pytest.approx((1.0, 1.0), rel=1e-4)
    )
    for machine in MACHINES:
        step, adams = (
            step_seconds(machine, PlannedRun(options), 4)
            for options in (ScapeOptions(density=0.05, wire="int4"), DenseOptions())
        )
        at_start = (0.02 - shares(scape)[0]) / (1 - shares(scape)[0])
        assert run_seconds(scape, machine) == pytest.approx(100 * ((1 - at_start) * step + at_start * adams))
        assert run_seconds(dense, machine) == pytest.approx(
            100 * step_seconds(machine, PlannedRun(DenseOptions(), "AdamW", overlap=True), 4)
        )
    slow, fast = (step_seconds(machine, PlannedRun(DenseOptions(), "AdamW"), 4) for machine in ("1 Gb/s", "10 Gb/s"))
    assert slow > 5 * fast


def test_the_report_is_made_of_stored_cells_alone(grid: Grid, tmp_path: Path) -> None:
    work_off(Queue(grid, grid.sets, tmp_path, jobs=1, work=tmp_path))
    given = ["--grid", str(tmp_path / "grid.toml"), "--output", str(tmp_path), "--shared"]
    assert comparison.main(["report", *given]) == 0
    text = (tmp_path / "table.md").read_text()
    assert (
        "| SCAPE | AdamS | 1.2" in text
        and "| 2 | 0.004 | 0, 1 | 2.1000, 2.1100 | +10.50 ± 0.04 | +4.99 ± 0.02 |" in text
    )
    assert "0.016, start 10 | 0, 1 | 2.3000, 2.3100" in text
    assert "**0.032: 1.9000**; 0.064: 1.9320" in text and "(edge)" not in text.partition("##")[2]
    assert "| 1.2 | -" not in text and "have not run yet" not in text
    (budget,) = budgets(grid, Store(tmp_path))
    assert budget.missing == 0 and [one.label for one in budget.others] == ["PowerSGD", "SCAPE"]
    for name in ("loss_against_bytes.png", "loss_against_seconds.png"):
        assert (tmp_path / name).stat().st_size > 5000 and f"({name})" in text
    next((tmp_path / "cells").glob("powersgd*-s1-*")).unlink()
    assert comparison.main(["table", *given]) == 0
    assert "1 declared runs have not run yet" in (tmp_path / "table.md").read_text()


def test_a_report_without_cells_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison.main(["table", "--output", str(tmp_path), "--shared"]) == 2
    assert "has no finished cells to compare" in capsys.readouterr().err


def test_labels_know_what_they_cover() -> None:
    assert common((0, 0, 4, 4), (2, 3, 9, 9)) == 2 and common((0, 0, 1, 1), (2, 0, 3, 1)) == 0


def test_the_declared_grid_names_options_that_there_are() -> None:
    grid = Grid(comparison.GRID)
    for name, options in grid.methods.items():
        kind = options["sync.method"]
        also = [key for one in grid.also(name) for key in one]
        given = [key for key in (*options, *also) if key.startswith(f"sync.{kind}.")]
        assert set(given) <= set(defaults(kind)), name
    for one in grid.sets:
        assert all(grid.cell(one, method, 1e-3, 0).key for method in one.methods)

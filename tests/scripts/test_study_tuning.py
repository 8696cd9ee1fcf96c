"""Tuning of studies: which runs a method has and in which order, runs of other studies, and the comparison's report."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.study.__main__ import main
from scripts.study.costs import MACHINES, overlapped, run_seconds, shares, step_seconds
from scripts.study.entries import budgets_of
from scripts.study.grid import GRIDS, Grid, RunSpec, defaults
from scripts.study.queue import Queue
from scripts.study.store import Store
from tests.scripts.study_stand_in import MODEL
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import PlannedRun

GRID = (
    MODEL
    + """
density_warmup = 0.05
[report]
tables = ["budgets"]
figures = ["loss_against_bytes", "loss_against_seconds"]
gaps = ["AdamW", "AdamS"]
seconds = true
[defaults]
steps = 100
batch = 1024
replicas = 4
further = 2
seeds = [0, 1]
[methods]
dense-adamw = { label = "AdamW, dense", sync.method = "dense", optimizer.name = "AdamW" }
dense-adams = { label = "AdamS, dense", sync.method = "dense", optimizer.name = "AdamS" }
scape = { label = "SCAPE", sync = { method = "scape", scape = { density = 0.05, code = "int4" } } }
[methods.powersgd]
label = "PowerSGD"
also = { "sync.powersgd.start" = [10, 20] }
sync = { method = "powersgd", powersgd.rank = 1 }
optimizer.name = "AdamW"
[[sets]]
name = "adams"
methods = ["dense-adams", "scape"]
learning_rates = [0.004, 0.002, 0.008]
[[sets]]
name = "adamw"
methods = ["dense-adamw", "powersgd"]
learning_rates = [0.016, 0.008, 0.032]
"""
)
# Best learning rate of each method, and its loss there.
BEST = {"dense-adams": (4e-3, 2.0), "scape": (4e-3, 2.1), "dense-adamw": (32e-3, 1.9), "powersgd": (16e-3, 2.4)}


def loss_of(spec: RunSpec) -> float:
    rate, loss = BEST[spec.method]
    return loss + abs((spec.learning_rate or 0) - rate) - 0.1 * bool(spec.also) + 0.01 * (spec.seed or 0)


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    (tmp_path / "grid.toml").write_text(GRID)
    return Grid(tmp_path / "grid.toml")


def with_losses(grid: Grid, loss: Callable[[RunSpec], float | None]) -> Queue:
    return Queue(grid, grid.sets, SimpleNamespace(loss=loss), jobs=1, work=Path())  # type: ignore[arg-type]


def keep(store: Store, spec: RunSpec, loss: float) -> dict[str, Any]:
    dense = 1e6
    sent = dense * {"dense": 1.0, "scape": 0.02, "powersgd": 0.12}[str(spec.options["sync.method"])]
    content = spec.head | {"parameters": 200_720, "validation_loss": loss, "bytes_per_step": sent, "corpus": "0"}
    store.keep(spec, content | {"dense_bytes_per_step": dense, "wall_seconds": 1.0}, "", {})
    return store.own[spec.key]["result"]


def work_off(queue: Queue) -> list[str]:
    """Store made-up results of everything that is missing; return the runs, in order."""
    ran = []
    while missing := queue.missing():
        keep(queue.store, missing[0], loss_of(missing[0]))
        ran.append(missing[0].title.partition(": ")[2].partition(", 100 x")[0])
    return ran


def test_every_method_has_the_same_budget_and_the_first_rates_come_first(grid: Grid, tmp_path: Path) -> None:
    ran = work_off(Queue(grid, grid.sets, Store(tmp_path / "out"), jobs=1, work=tmp_path))
    first = ["dense-adams, lr 0.004", "scape, lr 0.004", "dense-adamw, lr 0.016", "powersgd, lr 0.016"]
    assert ran[:4] == [f"{run}, seed 0" for run in first]
    # Beyond the edge; and at the best rate inside the edges the other values of further options.
    assert ran[12:15] == [
        "dense-adamw, lr 0.064, seed 0",
        "powersgd, lr 0.016, start 10, seed 0",
        "powersgd, lr 0.016, start 20, seed 0",
    ]
    seeds = ["dense-adams, lr 0.004", "scape, lr 0.004", "dense-adamw, lr 0.032", "powersgd, lr 0.016, start 10"]
    assert ran[15:] == [f"{run}, seed 1" for run in seeds]


@pytest.mark.parametrize("best, more", [(1e-3, [0.001, 0.0005]), (16e-3, [0.016, 0.032]), (4e-3, [])])
def test_an_edge_is_passed_no_more_often_than_declared(best: float, more: list[float], grid: Grid) -> None:
    queue = with_losses(grid, lambda spec: abs((spec.learning_rate or 0) - best))
    runs = queue.tuning(grid.sets[0], "scape")
    assert [spec.learning_rate for spec in runs] == [0.004, 0.002, 0.008, *more] and not queue.waits_for(runs)
    chosen = queue.best_of(runs)
    assert chosen is not None and chosen.learning_rate == best


def test_the_best_run_has_the_lowest_finite_loss_and_of_equal_ones_the_lower_rate(grid: Grid) -> None:
    for losses, best in (
        ({0.002: 2.0, 0.004: 1.5, 0.008: 1.7}, 0.004),
        ({0.002: float("nan"), 0.004: 1.7, 0.008: 1.7}, 0.004),
        ({0.002: float("inf"), 0.004: float("nan"), 0.008: float("nan")}, None),
    ):
        specs = [grid.spec(grid.sets[0], "scape", rate, 0) for rate in losses]
        found = with_losses(grid, lambda spec, of=losses: of[spec.learning_rate]).best_of(specs)  # type: ignore[misc]
        assert (found and found.learning_rate) == best


def test_a_failed_rate_ends_the_grid(grid: Grid) -> None:
    """A rate that diverges is not waited for, and no rate beyond it is tried."""
    specs = {rate: grid.spec(grid.sets[1], "powersgd", rate, 0) for rate in (0.008, 0.016, 0.032)}
    losses = {specs[0.008].key: 2.0, specs[0.016].key: 1.9}
    queue = with_losses(grid, lambda spec: losses.get(spec.key))
    queue.failed.add(specs[0.032].key)
    runs = queue.tuning(grid.sets[1], "powersgd")
    assert [spec.also for spec in runs[3:]] == [{"sync.powersgd.start": 10}] and queue.waits_for(runs)


def test_runs_of_another_study_are_used_and_left_alone(grid: Grid, tmp_path: Path) -> None:
    spec = grid.spec(grid.sets[0], "dense-adams", 4e-3, 0)
    keep(Store(tmp_path / "other"), spec, 2.0)
    store = Store(tmp_path / "out", [tmp_path / "other"])
    queue = Queue(grid, grid.sets, store, 1, tmp_path)
    assert spec.key not in [one.key for one in queue.missing()] and queue.done() == 1
    before = (tmp_path / "other" / "runs.jsonl").read_bytes()
    work_off(queue)
    assert before == (tmp_path / "other" / "runs.jsonl").read_bytes() and spec.key not in Store(tmp_path / "out").own


def test_bytes_are_planned_for_a_step_and_counted_for_the_run(grid: Grid, tmp_path: Path) -> None:
    store = Store(tmp_path)
    specs = [grid.spec(one, name, 4e-3, 0) for one, name in zip(grid.sets, ("scape", "dense-adamw"), strict=True)]
    (sparse, dense), (scape, adamw) = (spec.options for spec in specs), (keep(store, spec, 2.0) for spec in specs)
    assert overlapped(sparse).name == "scape 0.05 int4"
    assert overlapped(dense) == PlannedRun(DenseOptions(), "AdamW", overlap=True), "if the method supports it"
    steady, whole = shares(sparse, scape)
    assert 0.011 < steady < 0.014 and whole == 0.02
    assert shares(dense, adamw) == pytest.approx((1.0, 1.0), rel=1e-4)
    for machine in MACHINES:
        found = (PlannedRun(options) for options in (ScapeOptions(density=0.05, code="int4"), DenseOptions()))
        step, adams = (step_seconds(machine, run, 4) for run in found)
        at_start = (0.02 - steady) / (1 - steady)
        assert run_seconds(sparse, scape, machine) == pytest.approx(100 * ((1 - at_start) * step + at_start * adams))
        overlap = step_seconds(machine, PlannedRun(DenseOptions(), "AdamW", overlap=True), 4)
        assert run_seconds(dense, adamw, machine) == pytest.approx(100 * overlap)
    slow, fast = (step_seconds(machine, PlannedRun(DenseOptions(), "AdamW"), 4) for machine in ("1 Gb/s", "10 Gb/s"))
    assert slow > 5 * fast


def test_the_report_is_made_of_stored_runs_alone(grid: Grid, tmp_path: Path) -> None:
    store = Store(tmp_path)
    work_off(Queue(grid, grid.sets, store, jobs=1, work=tmp_path))
    given = ["report", str(tmp_path / "grid.toml"), f"--output={tmp_path}"]
    assert main(given) == 0
    text = (tmp_path / "report.md").read_text()
    losses = "| 2 | 0, 1 | 2.1000, 2.1100 | 2.1050 ± 0.0071 | +10.50 ± 0.04 | +4.99 ± 0.02 |"
    assert "| SCAPE | AdamS | 0.004 | 1.2" in text and losses in text
    assert "| 0.016, start 10 | 2" in text and "2.3000, 2.3100" in text
    assert "**0.032: 1.9000**; 0.064: 1.9320" in text and "(edge)" not in text.partition("##")[2]
    assert "have not run yet" not in text
    (budget,), missing = budgets_of(grid, store)
    assert missing == 0 and [one.label for one in budget.others] == ["PowerSGD", "SCAPE"]
    for name in ("loss_against_bytes.png", "loss_against_seconds.png"):
        assert (tmp_path / name).stat().st_size > 5000 and f"({name})" in text


def test_runs_that_the_grid_no_longer_declares_are_trials_of_their_own(grid: Grid, tmp_path: Path) -> None:
    """Runs at one rate with other options were one trial, whose loss was that of the last run."""
    one, store = grid.sets[0], Store(tmp_path / "out")
    for number, (seed, also) in enumerate([(0, {}), (1, {}), (0, {"sync.scape.selection": "tensor"})]):
        spec = grid.spec(one, "scape", 0.004, seed, also or None)
        keep(store, spec, 2.0 + 0.1 * number)
    (tmp_path / "grid.toml").write_text(GRID.replace('"dense-adams", "scape"', '"dense-adams"'))
    ((budget,), _) = budgets_of(Grid(tmp_path / "grid.toml"), store)
    (entry,) = budget.entries
    assert entry.losses == {0: 2.0, 1: 2.1} and entry.best.loss == 2.0
    assert [trial.loss for trial in entry.trials] == [2.0, 2.2]
    assert entry.trials[1].text == "0.004, selection tensor"


def test_the_declared_grid_names_options_that_there_are() -> None:
    grid = Grid(GRIDS / "comparison.toml")
    for name, options in grid.methods.items():
        kind = options["sync.method"]
        also = [key for one in grid.also(name) for key in one]
        given = [key for key in (*options, *also) if key.startswith(f"sync.{kind}.")]
        assert set(given) <= set(defaults(kind)), name

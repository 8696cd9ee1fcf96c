"""Reports of studies that are tuned by budget, from stored lines of a stand-in for the trainer."""

import pytest

from scripts.study.__main__ import main
from scripts.study.costs import planned_run
from scripts.study.entries import best_below, budgets_of
from scripts.study.grid import Grid
from scripts.study.store import Store
from tests.scripts.study_stand_in import SMALL, Study, rows
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.planner.run import PlannedRun


def test_the_report_has_the_numbers_of_the_runs(study: Study) -> None:
    study.run(SMALL, SMALL | {"name": "many", "replicas": 8})
    text = study.report()
    main_rows = rows(text, "gap to dense AdamS")
    dense = ["AdamS", "0.002", "100", "100", "0, 1", "2.0000, 2.0100", "2.0050 ± 0.0071", "0"]
    assert main_rows["AdamS, dense"] == dense
    sent = ["11.5", "12"]  # a step is planned, the run is counted
    losses = ["0, 1", "2.2000, 2.2110", "2.2055 ± 0.0078", "+10.00 ± 0.00"]
    assert main_rows["SCAPE 0.1"] == ["AdamS", "0.002", *sent, *losses]
    assert "| SCAPE 0.1 | 0.001: 2.3100; **0.002: 2.2000**; 0.004: 2.4200 |" in text
    assert "(edge)" not in text.partition("##")[2]
    assert "4 replicas" in text and "8 replicas" in text and "Nothing" not in text
    pictures = {path.name for path in study.output.glob("*.png")}
    assert pictures == {"steps-40x1024-r4.png"}, "frontier.png has coded payloads"
    assert all((study.output / name).stat().st_size > 5000 and f"({name})" in text for name in pictures)


def test_the_frontier_has_the_best_method_for_its_bytes(study: Study) -> None:
    """A variant that the grid leaves out is not on it; one good seed (few) is not better than two (coded)."""
    losses = {"dense-adams": 2.0, "dense-adamw": 1.9, "scape-0.1": 1.8, "slow": 2.04, "coded": 2.02, "few": 2.019}
    one = SMALL | {"learning_rates": [2e-3]}
    study.run(one | {"methods": [*losses][:-1]}, one | {"name": "seed", "methods": ["few"], "seeds": [0]})
    lines = study.lines
    for line in lines:
        line["result"]["validation_loss"] = losses[line["method"]] + 0.01 * line["options"]["debug.seed"]
    study.rewrite(lines)
    text = study.report()
    assert "(frontier.png)" in text and (study.output / "frontier.png").stat().st_size > 5000
    grid = Grid(study.grid)
    (one,) = budgets_of(grid, Store(study.output))[0]
    best = {limit: best_below(one, limit, grid.report) for limit in (0.003, 0.005, 0.012, 0.12)}
    assert {limit: entry and entry.method for limit, entry in best.items()} == {
        0.003: None,  # nothing sends so little
        0.005: "few",
        0.012: "coded",
        0.12: "coded",
    }
    assert "| -4.99 ± 0.02 |" in text and "0.002 (edge)" in text


def test_the_report_warns_of_an_edge_and_of_mixed_runs(study: Study) -> None:
    study.run(SMALL | {"learning_rates": [2e-3, 4e-3], "seeds": [0]})
    lines = study.lines
    lines[0]["result"]["corpus"] = "other"
    study.rewrite(lines)
    text = study.report()
    assert "0.002 (edge)" in text and "**The runs have different corpora.**" in text


def test_budgets_with_equal_titles_show_the_options_that_differ(study: Study) -> None:
    few = SMALL | {"learning_rates": [2e-3], "seeds": [0]}
    study.run(few, few | {"name": "rounded", "options": {"training.mixed_precision_param": "bfloat16"}})
    titles = [line for line in study.report().splitlines() if line.startswith("## ")]
    assert titles[0].endswith(" replicas (training.mixed_precision_param = bfloat16)")
    assert titles[1].endswith(" replicas (training.mixed_precision_param = float32)")


def test_missing_runs_are_counted_and_runs_that_the_grid_no_longer_has_are_kept(study: Study) -> None:
    study.run(SMALL)
    study.rewrite(study.lines[:-1])
    assert "1 declared run(s) have not run yet." in study.report()
    study.grid.write_text(study.grid.read_text().replace('["dense-adams", "scape-0.1"]', '["dense-adams"]'))
    assert "| SCAPE 0.1 |" in study.report()


def test_a_report_without_runs_is_refused(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study.run(SMALL)
    (study.output / "runs.jsonl").unlink()
    assert main(["report", *study.options]) == 2
    assert "has no finished run; first run python -m scripts.study run grid" in capsys.readouterr().err


def test_a_method_is_planned_by_its_options_or_by_those_of_the_grid() -> None:
    options = {
        "sync.method": "radius",
        "optimizer.name": "AdamW",
        "sync.radius.density": 0.4,
        "sync.radius.interval": 16,
    }
    assert planned_run(options, {"interval": 1000}).options.interval == 1000  # type: ignore[attr-defined]
    dense = {"sync.method": "dense", "optimizer.name": "AdamS"}
    assert planned_run(dense | {"sync.overlap": True}) == PlannedRun(DenseOptions(), overlap=True)

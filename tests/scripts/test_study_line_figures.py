"""Budgets of several models and texts, and the figures of their gaps with names beside lines and marks."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.study import line_figures
from scripts.study.costs import shares
from scripts.study.entries import budgets_of
from scripts.study.grid import Grid
from scripts.study.queue import Queue
from scripts.study.report import write_report
from scripts.study.store import Store
from tests.scripts.study_stand_in import MODEL, SMALL, Study

GRID = (
    MODEL
    + """
density_warmup = 0.05
[report]
tables = ["budgets"]
figures = ["loss_for_bytes", "sizes"]
gaps = ["Muon"]
published = "PUBLISHED"
texts = { standard_library_short = "Python sources", standard_library = "Python sources", speeches_short = "speeches" }
[report.lines]
"MuLoCo, 4 bits" = { muloco-5 = "H = 5", muloco-30 = "H = 30" }
SPARTA = { sparta = "" }
[defaults]
methods = ["dense-muon", "muloco-5", "muloco-30", "sparta"]
batch = 4096
tokens_per_parameter = 1
learning_rates = [0.032]
seeds = [0, 1]
[methods]
dense-muon = { label = "Muon, dense", sync.method = "dense", optimizer.name = "Muon" }
muloco-5 = { sync.method = "diloco", optimizer.name = "Muon", sync.diloco = { inner_steps = 5, code = "e2m1" } }
muloco-30 = { sync.method = "diloco", optimizer.name = "Muon", sync.diloco = { inner_steps = 30, code = "e2m1" } }
sparta = { label = "SPARTA", sync.method = "sparta", optimizer.name = "Muon" }
[[sets]]
name = "small-4"
replicas = 4
[[sets]]
name = "small-16"
replicas = 16
[[sets]]
name = "speeches-16"
replicas = 16
seeds = [0]
options = { training.dataset = "speeches_short", validation.dataset = "speeches_short_validation" }
[[sets]]
name = "large-16"
replicas = 16
recipe = "train_configs/embedded.toml"
parameters = 2229888
"""
)
GAPS = {"dense-muon": 0.0, "muloco-5": 2.0, "muloco-30": 4.0, "sparta": 3.0}
PUBLISHED = {"label": "by others", "gaps": [{"parameters": 1e8, "gap": 3.0}, {"parameters": 1e9, "gap": 2.0}]}


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    (tmp_path / "published.json").write_text(json.dumps(PUBLISHED))
    (tmp_path / "grid.toml").write_text(GRID.replace("PUBLISHED", str(tmp_path / "published.json")))
    found = Grid(tmp_path / "grid.toml")
    store = Store(tmp_path / "out")
    for spec in Queue(found, found.sets, store, 1, tmp_path).runs(guess=True).values():
        loss = 2.0 * (1 + GAPS[spec.method] * (1 + 0.1 * (spec.seed or 0)) / 100)
        content = spec.head | {"parameters": spec.of.parameters, "validation_loss": loss, "corpus": "0"}
        store.keep(spec, content | {"bytes_per_step": 1.0, "dense_bytes_per_step": 10.0}, "", {})
    return found


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the figures that are saved, which stay open."""
    figures: list[Any] = []
    monkeypatch.setattr(line_figures, "save", lambda figure, path: figures.append(figure))
    return figures


def test_runs_of_different_models_and_texts_are_different_budgets(grid: Grid, tmp_path: Path) -> None:
    """The number of steps follows from the set's own number of parameters, the bytes from its model."""
    assert [one.steps for one in grid.sets] == [49, 49, 49, 544]
    found, missing = budgets_of(grid, Store(tmp_path / "out"))
    assert missing == 0 and [one.title for one in found] == [
        "200,720 parameters, 1 tokens per parameter: 49 steps x 4,096 tokens, 4 replicas, Python sources",
        "200,720 parameters, 1 tokens per parameter: 49 steps x 4,096 tokens, 16 replicas, Python sources",
        "200,720 parameters, 1 tokens per parameter: 49 steps x 4,096 tokens, 16 replicas, speeches",
        "2,229,888 parameters, 0.999 tokens per parameter: 544 steps x 4,096 tokens, 16 replicas, Python sources",
    ]
    assert all(len(one.entries) == len(GAPS) for one in found)
    small, large = (next(e for e in one.entries if e.method == "sparta") for one in (found[1], found[3]))
    assert small.shares == shares(small.options, small.first) != large.shares


def test_the_report_shows_both_figures(grid: Grid, tmp_path: Path) -> None:
    text = write_report(grid, tmp_path / "out").read_text()
    for name in ("loss_for_bytes.png", "sizes.png"):
        assert (tmp_path / "out" / name).stat().st_size > 5000 and f"({name})" in text


def test_the_figure_over_bytes_has_a_line_for_each_family(grid: Grid, tmp_path: Path, drawn: list[Any]) -> None:
    line_figures.loss_for_bytes(grid, Store(tmp_path / "out"), tmp_path)
    axes = drawn[0].axes
    assert [axis.get_title() for axis in axes] == [
        "0.2 M parameters, 4 replicas, 49 steps, Python sources",
        "0.2 M parameters, 16 replicas, 49 steps, Python sources",
        "0.2 M parameters, 16 replicas, 49 steps, speeches",
        "2.2 M parameters, 16 replicas, 544 steps, Python sources",
    ]
    for axis, gap in zip(axes, (4.2, 4.2, 4.0, 4.2), strict=True):
        names = {"MuLoCo, 4 bits", "H = 5", "H = 30", "SPARTA", "dense Muon"}
        assert {text.get_text() for text in axis.texts} == names
        lines = [line for line in axis.get_lines() if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
        (line,) = (line for line in lines if line.get_color() != line_figures.DENSE)
        assert list(line.get_ydata()) == pytest.approx([gap, gap / 2])
        assert 0.3 < line.get_xdata()[0] < 0.6 and line.get_xdata()[1] == pytest.approx(6 * line.get_xdata()[0])
        faces = {mark.get_markerfacecolor() for mark in axis.get_lines() if mark.get_marker() in tuple("os")}
        assert ("white" in faces) == ("speeches" in axis.get_title()), "hollow for one seed"
    _no_text_covers_another(drawn[0])


def test_the_figure_over_sizes_has_lines_by_replicas_and_published_gaps(
    grid: Grid, tmp_path: Path, drawn: list[Any]
) -> None:
    grid.report["lines"] = {"MuLoCo 30": {"muloco-30": ""}, "SPARTA": {"sparta": ""}}
    line_figures.sizes(grid, Store(tmp_path / "out"), tmp_path)
    python, speeches = drawn[0].axes
    assert (python.get_title(), speeches.get_title()) == ("Python sources", "speeches")
    for axis in (python, speeches):
        assert {text.get_text() for text in axis.texts} == {"MuLoCo 30", "SPARTA", "dense Muon", "by others"}
        assert [text.get_text() for text in axis.get_legend().get_texts()] == ["16 replicas", "4 replicas"]
        (grey,) = (line for line in axis.get_lines() if line.get_color() == line_figures.REFERENCE)
        assert list(grey.get_xdata()) == [1e8, 1e9] and list(grey.get_ydata()) == [3.0, 2.0]
    lines = [line for line in python.get_lines() if len(line.get_xdata()) and line.get_marker() == "None"]
    found = {line.get_linestyle(): list(line.get_xdata()) for line in lines if line.get_color() != line_figures.DENSE}
    assert found["-"] == [200720, 2229888] and found["--"] == [200720]
    _no_text_covers_another(drawn[0])


def _no_text_covers_another(figure: Any) -> None:
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in axis.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_line_of_an_unknown_method_is_refused(grid: Grid, tmp_path: Path) -> None:
    grid.report["lines"] = {"MuLoCo": {"muloco-31": ""}}
    with pytest.raises(ValueError, match=r"\[report.lines\] MuLoCo: there is no method 'muloco-31'"):
        line_figures.sizes(grid, Store(tmp_path / "out"), tmp_path)


def test_a_run_of_another_model_than_its_set_says_fails(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    one = SMALL | {"learning_rates": [2e-3], "seeds": [0], "methods": ["dense-adams"]}
    assert study.run(one, one | {"name": "other", "replicas": 8, "parameters": 300_000}) == 1
    assert "the model has 200720 parameters, the grid says 300000 for set other" in capsys.readouterr().out
    assert [line["set"] for line in study.lines if "error" not in line["result"]] == ["small"]

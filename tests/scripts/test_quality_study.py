"""The quality study: the grid, the queue with a stand-in for the trainer, and a real run."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.common import ROOT, without_paths, write
from scripts.studies import quality_report, quality_study
from scripts.studies.quality_cells import GRID, Grid, Store, as_argument, best_learning_rate
from scripts.studies.quality_costs import (
    counted_shares,
    shares,
)
from scripts.studies.quality_report import write_report
from scripts.studies.quality_study import Queue, cumulative, main, thin
from tests import server
from tests.scripts.made_up_study import SMALL, Study, declare

# -------------------------------------------------------------------------------------------------- grid


def test_a_set_expands_to_options_of_the_trainer(tmp_path: Path) -> None:
    budget = SMALL | {"steps": None, "tokens_per_parameter": 10, "options": {"training.max_norm": 0.5}}
    grid = Grid(declare(tmp_path / "grid.toml", budget))
    (one,) = grid.sets
    assert one.steps == 1960, "10 x 200,720 tokens in steps of 1,024"
    dense, scape, slow = (grid.cell(one, name, 2e-3, 1) for name in ("dense-adams", "scape-0.1", "slow"))
    expected = {
        "training.steps": 1960,
        "training.global_batch_size": 8,
        "training.local_batch_size": 2,
        "training.max_norm": 0.5,
        "lr_scheduler.warmup_steps": 98,
        "validation.freq": 490,
        "validation.local_batch_size": 32,
        "validation.steps": 5,
        "topology.simulate_replicas": 4,
        "optimizer.lr": 2e-3,
        "debug.seed": 1,
    }
    assert {k: scape.overrides[k] for k in expected} == expected
    assert scape.overrides["sync.scape.density_warmup_steps"] == 196
    assert slow.overrides["sync.scape.density_warmup_steps"] == 490
    assert not any(k.startswith("sync.scape.") for k in dense.options), "what a dense run does not read"
    assert scape.options["training.seq_len"] == 128, "the recipe's own values are part of the identity"
    assert not any(k.startswith(("job.", "metrics.")) for k in scape.options)
    assert dense.setting == scape.setting == slow.setting and len({dense.variant, scape.variant, slow.variant}) == 3
    assert len({dense.key, scape.key, slow.key, grid.cell(one, "slow", 1e-3, 1).key}) == 4


def test_options_become_arguments() -> None:
    assert as_argument("a.b_c", True) == "--a.b_c" and as_argument("a.b_c", False) == "--a.no-b-c"
    assert as_argument("a.b", ["x", "y"]) == "--a.b=x,y" and as_argument("a.b", 1e-3) == "--a.b=0.001"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": ["sgd"]}, "set 'small': there is no method 'sgd'; known are dense-adams"),
        ({"batch": 1000}, r"a batch of 1000 tokens is no multiple of a sequence \(128\) x 4 replicas"),
        ({"tokens_per_parameter": 3}, "give either steps or tokens_per_parameter"),
        ({"seeds": []}, r"seeds = \[\]; give one or more"),
        ({"seed": 0}, "there is no key 'seed'; known are batch"),
        ({"replicas": None}, "set 'small' lacks replicas"),
    ],
)
def test_a_wrong_grid_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(declare(tmp_path / "grid.toml", SMALL | change))


def test_a_grid_has_the_methods_of_another_beside_its_own(tmp_path: Path) -> None:
    declare(tmp_path / "first.toml", SMALL)
    own = declare(tmp_path / "own.toml", SMALL)
    own.write_text('methods_of = "first.toml"\n' + own.read_text().replace("dense-adams", "other"))
    grid, first = Grid(own), Grid(tmp_path / "first.toml")
    assert grid.methods.keys() == first.methods.keys() | {"other"}
    assert grid.methods["dense-adams"] == first.methods["dense-adams"]


def test_the_grid_of_the_study_can_be_read_and_unknown_sets_are_named() -> None:
    grid = Grid(GRID)
    assert grid.parameters == 200_720 and all(grid.cell(one, one.methods[0], 1e-3, 0) for one in grid.sets)
    with pytest.raises(ValueError, match="there is no set 'tiny'; known are "):
        grid.choose(["tiny"])


def test_the_stored_runs_are_those_of_the_grid() -> None:
    """An option that is added to the configuration must not make them obsolete unseen."""
    grid = Grid(GRID)
    store = Store(ROOT / "results" / "quality_study")
    for one in grid.sets:
        if one.name in ("20-large", "20-small", "rules", "100"):
            for method in one.methods:
                for rate in one.learning_rates:
                    assert store.read(grid.cell(one, method, rate, one.seeds[0])) is not None, (one.name, method, rate)


def test_a_stored_cell_keeps_its_name_under_other_names_of_options() -> None:
    """Its digest is of the options by the names that they had when it ran."""
    grid = Grid(GRID)
    (large,) = grid.choose(["20-large"])
    cell = grid.cell(large, "scape-0.1", 4e-3, 2)
    assert cell.name == "scape-0.1-980x4096-r4-lr0.004-s2-078d3c62"
    stored = json.loads((ROOT / "results" / "quality_study" / "cells" / f"{cell.name}.json").read_text())
    assert stored["options"] == cell.options and stored["variant"] == cell.variant
    (rules,) = grid.choose(["rules"])
    paper = grid.cell(rules, "scape-0.01-paper", 2e-3, 0)
    assert paper.name == "scape-0.01-paper-980x4096-r4-lr0.002-s0-d08074d1"
    (others,) = grid.choose(["others"])
    topk = grid.cell(others, "topk-0.01-adamw", 4e-3, 0)
    assert topk.name == "topk-0.01-adamw-980x4096-r4-lr0.004-s0-43288285", "an option that came later, at its default"


def test_the_best_learning_rate_has_the_lowest_loss() -> None:
    assert best_learning_rate({1e-3: 2.0, 2e-3: 1.5, 4e-3: 1.7}) == 2e-3
    assert best_learning_rate({1e-3: None, 2e-3: float("nan"), 4e-3: 1.7}) == 4e-3
    assert best_learning_rate({2e-3: 1.5, 1e-3: 1.5}) == 1e-3
    assert best_learning_rate({1e-3: None}) is None


# ------------------------------------------------------------------------------------------------- queue


def test_seeds_run_at_the_best_learning_rate_and_nothing_runs_twice(study: Study) -> None:
    assert study.run(SMALL) == 0
    names = study.ran()
    assert len(names) == 8, "three learning rates and one more seed, two methods"
    assert sorted(n.rpartition("-")[0] for n in names if "-s1-" in n) == [
        f"{method}-40x1024-r4-lr0.002-s1" for method in ("dense-adams", "scape-0.1")
    ]
    assert study.run(SMALL) == 0 and study.ran() == []

    (study.output / "cells" / f"{names[0]}.json").unlink()
    assert study.run(SMALL) == 0 and study.ran() == names[:1]
    more = SMALL | {"name": "more", "seeds": [0, 1, 2], "methods": ["scape-0.1"]}
    assert study.run(SMALL, more) == 0
    assert [n.rpartition("-")[0] for n in study.ran()] == ["scape-0.1-40x1024-r4-lr0.002-s2"], "sets share cells"


def test_what_is_stored_is_small_and_names_no_place(study: Study) -> None:
    study.run(SMALL)
    for path in (study.output / "cells").iterdir():
        text = path.read_text()
        assert path.suffix == ".json" and len(text) < 10_000
        assert str(ROOT) not in text and str(study.output.parent) not in text
    cell = json.loads(text)
    assert cell["corpus"] == "0123456789ab" and set(cell["versions"]) == {"python", "torch", "torchtitan"}
    assert cell["command"].startswith("python -m torchtitan_scape.train --job.config_file=train_configs/study.toml ")
    assert cell["bytes"][-1] == [40, 40 * (120 if cell["method"] == "scape-0.1" else 1000)]
    assert (
        cell["validation"][-1] == [40, pytest.approx(cell["validation_loss"])]
        and cell["options"]["training.steps"] == 40
    )


def test_a_failed_run_stops_nothing_and_is_tried_again(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    assert study.run(SMALL) == 1
    assert len(study.ran()) == 8, "the other learning rates are enough for a choice"
    shown = capsys.readouterr().out
    assert "failed: small: scape-0.1, lr 0.004" in shown and "    reading /nowhere/at/all" in shown
    assert "7 cells done, 1 failed" in shown
    (failed,) = (p for p in (study.output / "cells").iterdir() if "error" in json.loads(p.read_text()))
    assert json.loads(failed.read_text())["error"] == "exit code 2: the gradient of all is not finite"
    monkeypatch.setattr(quality_report, "draw", lambda *_: {})
    report = write_report(study.output).read_text()
    assert "## Failed" in report and "| failed |" in report

    monkeypatch.delenv("FAILS")
    assert study.run(SMALL) == 0 and study.ran() == [failed.stem]


def test_an_interrupt_ends_the_children_and_leaves_no_half_cell(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(declare(study.grid, SMALL))
    sleeps = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    queue = Queue(grid, grid.sets, study.output, jobs=2, work=study.output.parent / "work", trainer=sleeps)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quality_study, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        queue.run()
    assert len(queue.running) == 2 and all(one.process.returncode is not None for one in queue.running)
    for one in queue.running:
        with pytest.raises(ProcessLookupError):
            os.kill(one.process.pid, 0)
    assert not (study.output / "cells").exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scape-0.1-s0.json"
    write(path, {"loss": 1})

    def full(self: Path, text: str) -> int:
        with open(self, "w") as file:
            file.write(text[:3])
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Path, "write_text", full)
        write(path, {"loss": 2})
    assert json.loads(path.read_text()) == {"loss": 1}


def test_a_damaged_cell_runs_again(tmp_path: Path) -> None:
    grid = Grid(declare(tmp_path / "grid.toml", SMALL))
    cell = grid.cell(grid.sets[0], "scape-0.1", 1e-3, 0)
    write(tmp_path / "cells" / f"{cell.name}.json", cell.head())
    assert Store(tmp_path).read(cell) is not None
    (tmp_path / "cells" / f"{cell.name}.json").write_text('{"loss"')
    assert Store(tmp_path).read(cell) is None


def test_curves_are_thinned_and_bytes_added_up() -> None:
    curve = [(1, 6.0), *((step, 2.0 + step % 2) for step in range(2, 242))]
    thinned = thin(curve)
    assert len(thinned) <= 60 and thinned[0] == [1, 6.0]
    assert thinned[1] == [4, 2.4] and thinned[-1][0] < 242, "means of five neighbours"
    assert cumulative([[(1, 100.0), (3, 10.0)], [(1, 1.0), (3, 1.0)]], [1, 2, 5]) == [[1, 101], [2, 112], [5, 145]]
    assert without_paths("in /a/b.c/file.py: --x=/tmp/y ./outputs/z a/b") == "in file.py: --x=y ./outputs/z a/b"


# ------------------------------------------------------------------------------------- tokenizer, trainer


def test_the_byte_tokenizer_is_what_its_command_makes() -> None:
    from scripts.train_tokenizer import SMALLEST, train
    from torchtitan_scape.data import BYTE_TOKENIZER

    tokenizer = train((), SMALLEST)
    assert (BYTE_TOKENIZER / "tokenizer.json").read_text() == tokenizer.to_str(pretty=False) + "\n"
    text = "def f():\n    return 'ä€'\t\x00"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text and max(ids) < SMALLEST


def test_a_real_run_is_stored(tmp_path: Path) -> None:
    """Two steps through the trainer: its summary, its log and its TensorBoard tags are what the queue reads.

    What it counted of coded payload and masks is the closed form."""
    tiny = SMALL | {"steps": 2, "methods": ["coded"], "learning_rates": [1e-3], "seeds": [0]}
    tiny["options"] = {"validation.steps": 1, "validation.local_batch_size": 2}
    grid = declare(tmp_path / "grid.toml", tiny)
    options = ["--grid", str(grid), "--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main(["run", *options], trainer=(server.python(), *quality_study.TRAINER[1:])) == 0
    (path,) = (tmp_path / "out" / "cells").iterdir()
    cell = json.loads(path.read_text())
    assert cell["parameters"] == 200_720 and cell["tokens"] == 2048 and len(cell["corpus"]) == 12
    assert [step for step, _ in cell["validation"]] == [1, 2] and len(cell["training"]) == 2
    sent = dict(map(tuple, cell["bytes"]))
    assert sent[1] >= cell["dense_bytes_per_step"] > 0, "the first step is dense"
    assert sent[2] == pytest.approx(2 * cell["bytes_per_step"], rel=1e-3)
    assert shares(cell) == pytest.approx(counted_shares(cell), rel=0.02) and shares(cell) != counted_shares(cell)
    assert str(ROOT) not in path.read_text() and str(tmp_path) not in path.read_text()

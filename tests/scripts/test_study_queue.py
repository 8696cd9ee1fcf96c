"""Grid, store and queue of the studies, with a stand-in for the trainer, and one real run."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.common import ROOT, RunError, without_paths
from scripts.study import launchers, queue
from scripts.study.costs import shares
from scripts.study.grid import GRIDS, BudgetSet, Grid, RunSpec, as_arguments, digest
from scripts.study.launchers import cumulative, thin
from scripts.study.queue import Queue
from scripts.study.store import Store
from tests import server
from tests.scripts.study_stand_in import SMALL, Study, declare

# -------------------------------------------------------------------------------------------------- grid


def test_a_set_expands_to_options_of_the_trainer(tmp_path: Path) -> None:
    budget = SMALL | {"steps": None, "tokens_per_parameter": 10, "options": {"training.max_norm": 0.5}}
    grid = Grid(declare(tmp_path / "grid.toml", budget))
    (one,) = grid.sets
    assert one.steps == 1960, "10 x 200,720 tokens in steps of 1,024"
    dense, scape, slow = (grid.spec(one, name, 2e-3, 1) for name in ("dense-adams", "scape-0.1", "slow"))
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
    assert len({dense.key, scape.key, slow.key, grid.spec(one, "slow", 1e-3, 1).key}) == 4


def test_options_become_arguments() -> None:
    assert as_arguments("a.b_c", True) == ["--a.b_c"] and as_arguments("a.b_c", False) == ["--a.no-b-c"]
    assert as_arguments("a.b", ["x", "y"]) == ["--a.b=x,y"] and as_arguments("a.b", 1e-3) == ["--a.b=0.001"]
    assert as_arguments("a.b", [10, 20]) == ["--a.b=[10, 20]"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": ["sgd"]}, "set 'small': there is no method 'sgd'; known are dense-adams"),
        ({"batch": 1000}, r"a batch of 1000 tokens is no multiple of a sequence \(128\) x 4 replicas"),
        ({"tokens_per_parameter": 3}, "give either steps or tokens_per_parameter"),
        ({"seeds": []}, r"seeds = \[\]; give one or more"),
        ({"seed": 0}, "there is no key 'seed'; known are batch"),
        ({"methods": None}, "set 'small' lacks methods"),
        ({"launcher": "mpi"}, "launcher = 'mpi'; known are simulated, local, emulated, slurm, predicted"),
        ({"recipe": "none.toml"}, "the recipe none.toml does not exist"),
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


@pytest.mark.parametrize("path", sorted(GRIDS.glob("*.toml")), ids=lambda path: path.stem)
def test_stored_runs_are_those_of_the_grid(path: Path) -> None:
    """A new or renamed option of the configuration must not make stored runs obsolete unnoticed."""
    grid, folder = Grid(path), ROOT / "results" / path.stem
    store = Store(folder, [folder.parent / name for name in grid.shared])
    missing = len(Queue(grid, grid.sets, store, 1, folder).missing())
    known = {
        "at_size": 6,
        "quality_study": 1,
        "sizes": 2,
        "strong_scaling": 420,
    }
    assert missing == (known | {"frontier_paper": 30, "radius_table_3": 5}).get(path.stem, 0)
    for line in store.own.values():
        if line["method"] in grid.methods:
            assert line["key"] == digest(line["options"]), line["source"]


def test_unknown_sets_and_grids_are_named() -> None:
    grid = Grid(GRIDS / "quality_study.toml")
    assert grid.parameters == 200_720
    with pytest.raises(ValueError, match="there is no set 'tiny'; known are 20-large, "):
        grid.choose(["tiny"])
    with pytest.raises(ValueError, match="stored grids are at_size, compare_methods, comparison"):
        Grid(GRIDS / "none.toml")


# ------------------------------------------------------------------------------------------------- queue


def test_seeds_run_at_the_best_learning_rate_and_nothing_runs_twice(study: Study) -> None:
    assert study.run(SMALL) == 0
    names = study.ran()
    assert len(names) == 8, "three learning rates and one more seed, two methods"
    other = [line for line in study.lines if line["options"]["debug.seed"] == 1]
    assert sorted((line["method"], line["options"]["optimizer.lr"]) for line in other) == [
        ("dense-adams", 2e-3),
        ("scape-0.1", 2e-3),
    ]
    assert study.run(SMALL) == 0 and study.ran() == []

    lost, *others = study.lines
    study.rewrite(others)  # Two runs at a time may be stored in another order than they started in.
    assert study.run(SMALL) == 0 and study.ran() == [name for name in names if name.endswith(f"-{lost['key']}")]
    assert lost["key"] in {line["key"] for line in study.lines}
    more = SMALL | {"name": "more", "seeds": [0, 1, 2], "methods": ["scape-0.1"]}
    assert study.run(SMALL, more) == 0
    (name,) = study.ran()
    assert name.startswith("more-scape-0.1-lr0.002-"), "sets share runs"


def test_a_stored_line_is_small_and_contains_no_path_of_this_machine(study: Study) -> None:
    study.run(SMALL)
    for text in (study.output / "runs.jsonl").read_text().splitlines():
        assert len(text) < 10_000 and str(ROOT) not in text and str(study.output.parent) not in text
    line = json.loads(text)
    result = line["result"]
    assert result["corpus"] == "0123456789ab" and set(line["versions"]) == {"python", "torch", "torchtitan"}
    assert line["command"].startswith("python -m torchtitan_scape.train --job.config_file=train_configs/study.toml ")
    assert result["bytes"][-1] == [40, 40 * (120 if line["method"] == "scape-0.1" else 1000)]
    assert result["validation"][-1] == [40, pytest.approx(result["validation_loss"])]
    assert line["options"]["training.steps"] == 40


def test_a_failed_run_stops_nothing_and_is_tried_again(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    assert study.run(SMALL) == 1
    assert len(study.ran()) == 8, "the other learning rates are enough for a choice"
    shown = capsys.readouterr().out
    assert "failed: small: scape-0.1, lr 0.004" in shown and "    reading /nowhere/at/all" in shown
    assert "7 runs done, 1 failed" in shown
    (failed,) = (line for line in study.lines if "error" in line["result"])
    assert failed["result"]["error"] == "exit code 2: the gradient of all is not finite"
    report = study.report()
    assert "## Failed" in report and "0.004: failed" in report and "the gradient of all is not finite" in report

    monkeypatch.delenv("FAILS")
    assert study.run(SMALL) == 0
    (name,) = study.ran()
    assert name.endswith(failed["key"]) and not any("error" in line["result"] for line in study.lines)


def test_an_interrupt_ends_the_children_and_stores_nothing(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(declare(study.grid, SMALL))
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(queue, "process_command", lambda spec, out: sleeps)
    one = Queue(grid, grid.sets, Store(study.output), jobs=2, work=study.output.parent / "work")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert len(one.running) == 2 and all(run.process.returncode is not None for run in one.running)
    for run in one.running:
        with pytest.raises(ProcessLookupError):
            os.kill(run.process.pid, 0)
    assert not study.output.exists()


def test_a_run_that_continues_another_waits_for_it(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(GRIDS / "observations.toml")
    one = Queue(grid, grid.choose(["embedded"]), Store(study.output), jobs=2, work=study.output.parent / "work")
    started: list[str] = []

    def ends(spec: RunSpec, out: Path) -> list[str]:
        if "start_from" in spec.about:
            raise ValueError(f"{out} has no checkpoint")
        started.append(spec.method)
        return [sys.executable, "-S", "-c", "import sys; sys.exit(2)"]

    monkeypatch.setattr(queue, "process_command", ends)
    one._start(one.missing()[0])
    following = one._next()
    assert following is not None and following.method == "adams", "adamw-topk continues adamw, which runs"
    one.run()
    assert started == ["adamw", "adams"] and len(one.failed) == 4
    assert sum("has no checkpoint" in line["result"]["error"] for line in Store(study.output).own.values()) == 2


def test_runs_in_turn_continue_after_a_failure(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    """Launchers that measure one run after the other."""
    grid = Grid(declare(study.grid, SMALL | {"learning_rates": [1e-3], "seeds": [0]}))

    def prepare(one: BudgetSet) -> Any:
        def measure(spec: RunSpec) -> dict[str, Any]:
            if spec.method == "dense-adams":
                raise RunError("node 1 is down")
            return {"label": spec.label, "step_seconds": 0.25, "validation_loss": 3.0}

        return measure

    one = Queue(grid, grid.sets, Store(study.output), jobs=1, work=study.output)
    one.run_in_turn(prepare)
    assert len(one.failed) == 1
    shown = capsys.readouterr().out
    assert "failed: small: dense-adams, lr 0.001" in shown and "node 1 is down" in shown and "250.0 ms" in shown
    again = Queue(grid, grid.sets, Store(study.output), jobs=1, work=study.output)
    assert [spec.method for spec in again.missing()] == ["dense-adams"]


def test_an_incomplete_line_is_ignored_and_the_last_line_of_a_key_counts(tmp_path: Path) -> None:
    """A process that was killed leaves at most a part of its last line; the next append begins a new one."""
    grid = Grid(declare(tmp_path / "grid.toml", SMALL))
    first, second = (grid.spec(grid.sets[0], "scape-0.1", rate, 0) for rate in (1e-3, 2e-3))
    Store(tmp_path).keep(first, {"error": "no space"}, "", {})
    Store(tmp_path).keep(first, {"validation_loss": 2.0}, "", {})
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"key": "' + second.key + '", "set": "small", "resu')
    store = Store(tmp_path)
    assert store.loss(first) == 2.0 and store.result(second.key) is None
    store.keep(second, {"validation_loss": 3.0}, "", {})
    assert Store(tmp_path).loss(second) == 3.0 and Store(tmp_path).loss(first) == 2.0


def test_curves_are_thinned_and_bytes_added_up() -> None:
    curve = [(1, 6.0), *((step, 2.0 + step % 2) for step in range(2, 242))]
    thinned = thin(curve)
    assert len(thinned) <= 60 and thinned[0] == [1, 6.0]
    assert thinned[1] == [4, 2.4] and thinned[-1][0] < 242, "means of five neighbors"
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


def test_a_real_run_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the trainer: the queue reads its summary, its log and its TensorBoard tags.

    The bytes that it counts for coded payload and masks are those of the plan.
    """
    monkeypatch.setattr(launchers, "sys", SimpleNamespace(executable=server.python()))
    tiny = SMALL | {"steps": 2, "methods": ["coded"], "learning_rates": [1e-3], "seeds": [0]}
    tiny["options"] = {"validation.steps": 1, "validation.local_batch_size": 2}
    study = Study(tmp_path)
    assert study.run(tiny) == 0
    (line,) = study.lines
    result = line["result"]
    assert result["parameters"] == 200_720 and result["tokens"] == 2048 and len(result["corpus"]) == 12
    assert [step for step, _ in result["validation"]] == [1, 2] and len(result["training"]) == 2
    sent = dict(map(tuple, result["bytes"]))
    assert sent[1] >= result["dense_bytes_per_step"] > 0, "the first step is dense"
    assert sent[2] == pytest.approx(2 * result["bytes_per_step"], rel=1e-3)
    steady, whole = shares(line["options"], result)
    assert steady == pytest.approx((sent[2] - sent[1]) / result["dense_bytes_per_step"], rel=0.02) and whole > 0.5
    assert str(ROOT) not in json.dumps(line) and str(tmp_path) not in json.dumps(line)

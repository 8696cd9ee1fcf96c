"""Observed runs of small models: recorded figures equal the actual ones, and a resumed run continues them."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import run
from tests.pool import Pool
from tests.sharding.test_levels_training import on
from tests.sharding.test_tagc_training import TAGC
from tests.training import LAYOUTS, METHODS, train
from torchtitan_scape.observe.figures import Observed
from torchtitan_scape.observe.observation import Observation
from torchtitan_scape.observe.record import FILE, Record, Row, read, read_frequencies

WO, EMBEDDING = "layers.1.attention.wo", "tok_embeddings"
SETTINGS = ["--observe.enable", f"--observe.names={WO}.weight,{EMBEDDING}.weight"]


def nothing(trainer: Any) -> dict[str, Any]:
    return {}


def seen(folder: Path) -> dict[tuple[int, str], Row]:
    rows = read(folder / FILE)[0]
    assert len({(row.step, row.tensor) for row in rows}) == len(rows)  # No duplicates.
    return {(row.step, row.tensor): row for row in rows}


def test_a_resumed_run_continues_its_series(pool1: Pool, tmp_path: Path) -> None:
    """A checkpoint after step 6, a run that ends after step 8, and one resumed from the checkpoint."""
    arguments = [
        *SETTINGS,
        *METHODS["adamw"],
        "--observe.windows=[[2,7],[9,2]]",
        "--observe.histograms=3,8,12",
    ]
    pool1(run, str(tmp_path), arguments, 8, nothing)
    before, histograms = seen(tmp_path), read(tmp_path / FILE)[1]
    assert sorted(before) == [(step, name) for step in range(2, 9) for name in (WO, EMBEDDING)]
    pool1(run, str(tmp_path), arguments, 10, nothing)
    after, again = seen(tmp_path), read(tmp_path / FILE)[1]
    assert sorted(after) == [(step, name) for step in range(2, 11) for name in (WO, EMBEDDING)]
    for place, row in before.items():
        other = after[place]
        # The mask of step 6 is computed from the loaded moments.
        assert (row.overlap, row.gradient) == (other.overlap, other.gradient) and 0 < row.overlap <= 1
        if place[0] <= 6:
            assert row == other and row.residual > 0
        else:  # Checkpoints do not contain the shadow residual; the next window starts a new one.
            assert math.isnan(other.sent) and math.isnan(other.residual)
    assert after[9, WO].residual > 0 and after[10, WO].residual > 0
    assert [(step, name) for step, name, _ in again] == [(s, n) for s in (3, 8) for n in (WO, EMBEDDING)]
    for one, other in zip(histograms, again, strict=True):
        assert all((one[2][key] == other[2][key]).all() for key in ("linear", "log2"))


def test_a_window_whose_first_step_is_skipped_has_a_shadow_residual(pool1: Pool, tmp_path: Path) -> None:
    arguments = [*SETTINGS, *METHODS["adamw"], "--training.steps=4", "--observe.histograms=4"]
    pool1(train, str(tmp_path), [*arguments, "--observe.windows=[[2,3]]"], nan_at=2)
    rows = seen(tmp_path)
    assert math.isnan(rows[2, WO].sent) and all(rows[step, WO].residual > 0 for step in (3, 4))
    for one in read_frequencies(tmp_path / FILE):  # without the skipped step
        entries = int(one.entries.sum())
        assert (one.first, one.steps, len(one.entries)) == (2, 2, 3) and one.entries[2] > 0
        if one.tensor == WO:  # of a table, only rows of the batch have gradients
            assert (range(3) * one.entries).sum() == 2 * round(one.density * entries)


@pytest.mark.slow
def test_residuals_of_the_shard_axis_are_not_observed(pool2: Pool, tmp_path: Path) -> None:
    arguments = [*SETTINGS, *METHODS["adamw"], *LAYOUTS["2x1"], *TAGC, "--training.steps=3"]
    pool2(train, str(tmp_path), [*arguments, "--observe.windows=[[2,2]]", "--observe.histograms=3"])
    for row in seen(tmp_path).values():
        assert math.isnan(row.residual) and not row.shadow and row.gradient > 0


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04, and no more", b"text"])
def test_an_unreadable_file_is_overwritten(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    record = Record(tmp_path, {})
    record.begin(3)
    record.add(Row(4, WO, 0.1))
    record.write()
    assert [row.step for row in read(tmp_path / FILE)[0]] == [4]


def watched(folder: str, arguments: list[str], nan_at: int) -> dict[int, dict[str, Any]]:
    """Train with a NaN in the first simulated replica's gradients; return first moments and residuals after every
    step.
    """
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    after: dict[int, dict[str, Any]] = {}
    step, gradients = ScapeTrainer.train_step, ReplicaOptimizer._gradients

    def with_nan(optimizers: ReplicaOptimizer) -> list[list[Tensor]]:
        found = gradients(optimizers)
        if optimizers.attempted_steps + 1 == nan_at:
            found[0][0][0] = torch.nan
        return found

    def step_and_look(trainer: Any, data: Any) -> None:
        step(trainer, data)
        shards = {shard.name: shard for shard in trainer.replica_optimizer.shards()}
        state = trainer.replica_optimizer.inner.state
        methods = [method.states()[0].tensors for method in trainer.replica_optimizer.methods]
        after[trainer.step] = {
            "moments": {n: local(state[s.parameter]["exp_avg"]).clone().view(-1) for n, s in shards.items()},
            "residuals": {n: [kept[n].clone().view(-1) for kept in methods] for n in methods[0]},
        }

    with (
        patch.object(ScapeTrainer, "train_step", step_and_look),
        patch.object(ReplicaOptimizer, "_gradients", with_nan),
    ):
        train(folder, arguments)
    return after


def test_recorded_figures_equal_the_tensors(pool1: Pool, tmp_path: Path) -> None:
    """Two simulated replicas with top-k, including a skipped step."""
    arguments = [
        *SETTINGS,
        *METHODS["topk-adams"],
        *("--topology.simulate_replicas=2", "--training.local_batch_size=1", "--training.steps=6"),
        *("--observe.windows=[[1,5]]", "--observe.histograms=3", "--observe.density=0.2"),
    ]
    (after,) = pool1(watched, str(tmp_path), arguments, nan_at=3)
    rows = seen(tmp_path)
    assert sorted(rows) == [(step, name) for step in range(1, 6) for name in (WO, EMBEDDING)]
    assert read(tmp_path / FILE)[1] == [] and np.load(tmp_path / FILE)["fact.method"] == "topk"

    def top(moment: Tensor) -> set[int]:
        return set(moment.abs().topk(round(0.2 * moment.numel())).indices.tolist()) & set(
            moment.nonzero().view(-1).tolist()
        )

    for name in (WO, EMBEDDING):
        assert math.isnan(rows[1, name].overlap)  # The first step has no previous moment.
        assert all(
            math.isnan(value) for value in (rows[3, name].overlap, rows[3, name].gradient, rows[3, name].residual)
        )
        for step in (2, 4, 5):
            row, tops = rows[step, name], [top(after[i]["moments"][f"{name}.weight"]) for i in (step - 1, step)]
            assert row.overlap == len(tops[0] & tops[1]) / max(map(len, tops)) and not row.shadow
            left = torch.stack(after[step]["residuals"][f"{name}.weight"]).double().square().sum(1).mean().sqrt()
            assert row.residual == pytest.approx(float(left), rel=1e-12) and row.gradient == row.sent > 0
    assert rows[5, WO].residual > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [*METHODS["adamw"], *LAYOUTS["1x2"], "--parallelism.tensor_parallel_degree=2"],
        [*METHODS["adamw"], *LAYOUTS["2x1"], "--parallelism.tensor_parallel_degree=2"],
        [*METHODS["adamw"], *on(2, 4)],
        [*METHODS["scape"], *on(2, 2)],
        [*METHODS["scape-offload"], *LAYOUTS["2x2"]],
        [*METHODS["scape-gather-2bit"], *LAYOUTS["nodes"]],
        [*METHODS["quantized"], *LAYOUTS["2x2"]],
        [*METHODS["diloco"], *LAYOUTS["2x2"]],
        # Four shards with three simulated replicas.
        [*METHODS["scape"], "--parallelism.data_parallel_shard_degree=4", "--topology.simulate_replicas=3"],
    ],
    ids=[
        "tensor",
        "shards of tensor",
        "levels",
        "levels and scape",
        "offload",
        "owners",
        "quantized",
        "local",
        "simulated",
    ],
)
def test_tensors_are_assembled_in_every_layout(arguments: list[str], pool4: Pool, tmp_path: Path) -> None:
    more = ["--training.steps=7", "--observe.enable", "--observe.names=*", "--observe.windows=[[2,6]]"]
    results = pool4(train, str(tmp_path), [*arguments, *more, "--observe.histograms=5"])
    rows, histograms = read(tmp_path / FILE)
    for step in range(2, 8):
        here = [row for row in rows if row.step == step]
        assert math.hypot(*(row.gradient for row in here)) == pytest.approx(results[0]["norms"][step - 1], rel=1e-5)
        assert all(0 <= row.overlap <= 1 for row in here)
    assert sum(figures["entries"] for *_, figures in histograms) in range(1_000, 200_721)


def test_an_overflowing_sum_is_logged_and_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Finite replicas pass the guard; the bin index of an infinite entry would be undefined."""
    record = Record(Path("nowhere"), {})
    own = SimpleNamespace(tensors=[Observed("w", ())], _counts=True, _window=None, _step=3, record=record)
    own._whole = lambda one, parts: torch.tensor([1.0, torch.inf])
    with caplog.at_level(logging.WARNING):
        Observation.synchronized(cast(Any, own), lambda name: torch.empty(0), torch.tensor(True))
    assert "Step 3: the sum of the gradients of w overflows" in caplog.text and not record.histograms

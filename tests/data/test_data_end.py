"""A rank whose data end, or contain no text, ends the run on all ranks at the same step."""

import json
from pathlib import Path

import pytest
import torch

from tests.marks import slow
from tests.pool import Pool
from tests.replica.test_simulated import ALONE, simulate
from tests.training import LAYOUTS, METHODS, train


def short_of(folder: Path, texts: list[str]) -> list[str]:
    """Write training data, the first half for rank 0; return the arguments."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--training.dataset=text_files", f"--training.dataset_path={path}"]


LONG, SHORT = "spam and eggs " * 30, "spam and eggs " * 15


@pytest.mark.parametrize("layout", [slow("1x2"), "2x1"])
def test_the_end_of_one_rank_ends_all(layout: str, pool2: Pool, tmp_path: Path) -> None:
    """Also between the micro-batches of a step; the last state is saved and can be resumed."""
    arguments = [
        *METHODS["scape"],
        *LAYOUTS[layout],
        *short_of(tmp_path / "data", [LONG] * 4 + [LONG] * 2 + [SHORT] * 2),
        "--data.epochs=1",
        "--training.steps=100",
        "--training.local_batch_size=1",
        "--training.global_batch_size=8",
        "--checkpoint.enable",
        "--checkpoint.interval=50",
        "--checkpoint.no-last-save-model-only",
    ]
    flush = ["--sync.flush_at_end"] if layout == "2x1" else []
    results = pool2(train, str(tmp_path), [*arguments, *flush])
    steps = len(results[0]["losses"])
    assert 2 < steps < 60 and results[1]["losses"] == results[0]["losses"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == steps and summary["data_ran_out"] is True
    assert summary["tokens"] == steps * 8 * 64
    assert (summary["residual_norm"] == 0.0) == bool(flush)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [f"step-{steps}"]
    # One rank is still at the end of its data, so nothing is left to do.
    assert pool2(train, str(tmp_path), arguments)[0]["losses"] == []
    # Without an end the next epoch follows.
    more = [*arguments, "--data.epochs=0", f"--training.steps={steps + 2}"]
    assert len(pool2(train, str(tmp_path), more)[1]["losses"]) == 2


def test_simulated_replicas_end_as_real_ranks(pool1: Pool, pool2: Pool, tmp_path: Path) -> None:
    arguments = [
        *METHODS["adams"],
        *short_of(tmp_path / "data", [LONG] * 2 + [LONG, SHORT]),
        "--data.epochs=1",
        "--training.steps=100",
        "--training.local_batch_size=1",
    ]
    real = pool2(train, str(tmp_path / "real"), [*arguments, *LAYOUTS["1x2"]])[0]
    one = pool1(train, str(tmp_path / "one"), [*arguments, *ALONE, simulate(2)])[0]
    assert len(one["losses"]) == len(real["losses"]) > 2
    assert torch.isfinite(torch.tensor(one["losses"])).all()


def test_a_rank_without_a_token_ends_the_run(pool2: Pool, tmp_path: Path) -> None:
    data = short_of(tmp_path / "data", [LONG] * 4 + [""] * 4)
    validation = ["--validation.dataset=text_files", f"--validation.dataset_path={tmp_path}/data/a.jsonl"]
    for more, message in (
        ([], "NoTextError: the data of rank 1 have no token; see the message there"),
        (validation, "ValueError: reading the validation data failed on rank 1; see the message there"),
    ):
        outcomes = pool2.outcomes(train, str(tmp_path), [*METHODS["adams"], *data, *more, "--training.steps=3"])
        assert [good for good, _ in outcomes] == [False, False]
        first, second = (text.splitlines()[-1] for _, text in outcomes)
        assert message in first
        assert "the share of data-parallel reader 1 of 2 has no token in a whole epoch" in second

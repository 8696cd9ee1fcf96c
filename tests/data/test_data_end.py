"""Passes over the data end a run, and a rank whose data contain no text."""

import json
import re
from pathlib import Path

from tests.data.test_prepared import prepared
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, RECIPE, train
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.titan.tokenizer import build_tokenizer


def short_of(folder: Path, texts: list[str]) -> list[str]:
    """Write training data, the first half for rank 0; return the arguments."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--training.dataset=text_files", f"--training.dataset_path={path}"]


LONG = "spam and eggs " * 30


def test_a_run_ends_within_the_passes(pool2: Pool, tmp_path: Path) -> None:
    """The last state is saved and exchanged in full; a run that starts again has nothing left to do."""
    tokenizer = build_tokenizer(parse([*RECIPE]))
    data = prepared(tmp_path / "data", tokenizer, tokens=6000)  # and 77 more
    arguments = [
        *METHODS["scape"],
        *LAYOUTS["2x1"],
        f"--training.dataset_path={data}",
        "--training.dataset=prepared",
        "--data.epochs=1",
        "--training.steps=100",
        "--training.local_batch_size=1",
        "--training.global_batch_size=8",
        "--checkpoint.enable",
        "--checkpoint.interval=50",
        "--checkpoint.no-last-save-model-only",
        "--sync.flush_at_end",
    ]
    results = pool2(train, str(tmp_path), arguments)
    steps = (6077 - 1) // 64 // 8
    assert [len(result["losses"]) for result in results] == [steps, steps]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"], summary["residual_norm"]) == (steps, steps * 8 * 64, 0.0)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [f"step-{steps}"]
    assert pool2(train, str(tmp_path), arguments)[0]["losses"] == []
    more = [*arguments, "--data.epochs=0", f"--training.steps={steps + 2}"]
    assert len(pool2(train, str(tmp_path), more)[1]["losses"]) == 2


def test_the_last_checkpoint_may_be_the_model_alone(pool1: Pool, tmp_path: Path) -> None:
    """A run that starts again after its passes is complete, as one after `training.steps`."""
    data = prepared(tmp_path / "data", build_tokenizer(parse([*RECIPE])), tokens=1000)
    arguments = [*METHODS["adams"], f"--training.dataset_path={data}", "--training.dataset=prepared", "--data.epochs=1"]
    arguments += ["--training.steps=100", "--training.local_batch_size=4", "--checkpoint.enable"]
    (first,) = pool1(train, str(tmp_path), arguments)
    assert len(first["losses"]) == 16 // 4
    (again,) = pool1(train, str(tmp_path), arguments)
    assert again["losses"] == []


def test_a_rank_without_a_token_ends_the_run(pool2: Pool, tmp_path: Path) -> None:
    data = short_of(tmp_path / "data", [LONG] * 4 + [""] * 4)
    validation = ["--validation.dataset=text_files", f"--validation.dataset_path={tmp_path}/data/a.jsonl"]
    reason = r"text_files: the share of data-parallel reader 1 of 2 has no token in a whole epoch; .* \(rank 1\)"
    for more, error in (([], "NoTextError"), (validation, "ValueError")):
        outcomes = pool2.outcomes(train, str(tmp_path), [*METHODS["adams"], *data, *more, "--training.steps=3"])
        assert [good for good, _ in outcomes] == [False, False]
        assert all(re.search(f"{error}: {reason}", text.splitlines()[-1]) for _, text in outcomes), outcomes
        assert ["in _epoch" in text for _, text in outcomes] == [False, True]  # The rank shows where its error arose.

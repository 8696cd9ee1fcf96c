"""GPT-2 in the trainer: equal in every layout, with the methods, exact resuming, and the forecast."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import slow
from tests.models.test_gpt2 import OPS
from tests.pool import Pool, attempts
from tests.replica.test_simulated import ALONE
from tests.training import LAYOUTS, METHODS, copy_checkpoint, train

GPT2_TINY = ["--model.name=gpt2", "--model.flavor=tiny"]
BATCH = ["--training.local_batch_size=1", "--training.global_batch_size=4"]


def run(folder: str, arguments: list[str], **more: Any) -> dict[str, Any]:
    return train(folder, [*GPT2_TINY, *arguments], **more)


def test_every_layout_is_the_same_run(pool1: Pool, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """Replicas, shards, shards and heads, and one process with simulated replicas, with two micro-batches each."""
    steps = [*METHODS["scape-1"], *BATCH, "--training.steps=3"]
    layouts = [
        (pool2, LAYOUTS["1x2"]),
        (pool2, [*LAYOUTS["2x1"], *OPS]),
        (pool4, [*LAYOUTS["2x1"], "--parallelism.tensor_parallel_degree=2"]),
        (pool1, [*ALONE, "--topology.simulate_replicas=2"]),
    ]
    runs = []
    for number, (pool, layout) in enumerate(layouts):
        folder = tmp_path / str(number)
        runs.append(pool(run, str(folder), [*steps, *layout])[0])
        summary = json.loads((folder / "summary.json").read_text())
        sent, planned = (summary[f"{which}shard_axis_bytes_per_step_and_rank"] for which in ("", "planned_"))
        assert sent == pytest.approx(planned, rel=0.02)
    for other in runs[1:]:
        assert other["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
        assert other["norms"] == pytest.approx(runs[0]["norms"], rel=1e-4)


@pytest.mark.parametrize("method, layout", [slow("scape", "2x2"), slow("muon", "1x2")])
def test_resuming_equals_the_uninterrupted_run(
    method: str, layout: str, pool2: Pool, pool4: Pool, tmp_path: Path
) -> None:
    pool = pool4 if layout == "2x2" else pool2
    keep = ["--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.no-last-save-model-only"]
    arguments = [*METHODS[method], *LAYOUTS[layout], "--training.steps=6", *keep]
    whole = pool(run, str(tmp_path / "whole"), arguments)
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 3)
    for a, b in zip(whole, pool(run, str(tmp_path / "resumed"), arguments), strict=True):
        assert b["losses"] == a["losses"][3:] and torch.equal(a["parameters"], b["parameters"])
        assert a["losses"][-1] < a["losses"][0]


def test_sequences_beyond_the_positions_are_refused(pool2: Pool, tmp_path: Path) -> None:
    long = (["--training.seq_len=256"], ["--validation.seq_len=256"])
    folder = tmp_path / "out"
    for outcomes in pool2(attempts, run, *((str(folder), arguments) for arguments in long)):
        for (good, text), section in zip(outcomes, ("training", "validation"), strict=True):
            assert not good and text.splitlines()[-1] == (
                f"ValueError: [{section}] seq_len = 256: gpt2 tiny has learned positions for 128 tokens; set it to 128 "
                "or less"
            )
    assert not folder.exists()


@pytest.mark.slow
def test_a_compiled_model(pool2: Pool, tmp_path: Path) -> None:
    arguments = [*METHODS["adamw"], *LAYOUTS["2x1"], *OPS, "--training.steps=3"]
    plain = pool2(run, str(tmp_path / "plain"), arguments)
    compiled = pool2(run, str(tmp_path / "compiled"), [*arguments, "--compile.enable"], timeout=600)
    assert compiled[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)

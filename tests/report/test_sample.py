"""Text samples at the end of a run: equal on all ranks, and without side effects."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import WHERE
from tests.pool import Pool
from tests.training import METHODS, RECIPE


def run(folder: str, arguments: list[str]) -> tuple[list[str], Any]:
    """Train; return the logged samples, and the generator state and the parameters at the end."""
    from unittest.mock import patch

    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.report import sample
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    more = ["--training.steps=2", "--validation.no-enable", "--metrics.no-enable-tensorboard"]
    trainer = ScapeTrainer(parse([*RECIPE, f"--job.dump_folder={folder}", *more, *arguments]))
    lines: list[str] = []
    with patch("time.sleep"), patch.object(sample.logger, "info", lambda text, *_: lines.append(str(text))):
        trainer.train()
    parameters = [local(p).detach().clone() for p in trainer.model_parts[0].parameters()]
    assert trainer.model_parts[0].training
    samples = [line for line in lines if line.startswith(("Sample", "No sample"))]
    trainer.close()
    return samples, (torch.get_rng_state(), parameters)


def test_a_sample_is_the_same_on_all_ranks_and_changes_nothing(pool2: Pool, tmp_path: Path) -> None:
    arguments = [*WHERE["2x1"], "--sample.characters=8"]
    ranks = pool2(run, str(tmp_path / "a"), arguments)
    (samples, after), (others, _) = ranks
    assert samples == others and [line.partition(":\n")[0] for line in samples] == [
        "Sample from the model, greedy",
        "Sample from the model, temperature 0.8",
    ]
    assert all(len(line.partition(":\n")[2]) == 8 for line in samples) and samples[0][-8:] != samples[1][-8:]
    (none, without), _ = pool2(run, str(tmp_path / "b"), [*WHERE["2x1"], "--sample.characters=0"])
    assert none == []
    assert torch.equal(after[0], without[0]), "the generator"
    assert all(torch.equal(a, b) for a, b in zip(after[1], without[1], strict=True))


@pytest.mark.parametrize("bos, eos, border, begin", [(3, 4, "bos_eos", 3), (3, 4, "eos", 4), (None, None, "eos", 0)])
def test_a_sample_starts_with_the_document_border(bos: Any, eos: Any, border: str, begin: int) -> None:
    from torchtitan_scape.report.sample import _begin

    assert _begin(SimpleNamespace(bos_id=bos, eos_id=eos), border) == [begin]


@pytest.mark.slow
def test_with_tensor_parallelism_and_local_updates(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    tensor = pool4(run, str(tmp_path / "t"), [*WHERE["tensor"], "--sample.characters=5"])
    local = pool2(run, str(tmp_path / "l"), [*WHERE["3 simulated"], *METHODS["diloco"], "--sample.characters=5"])
    for ranks in (tensor, local):
        assert len(ranks[0][0]) == 2 and all(samples == ranks[0][0] for samples, _ in ranks)

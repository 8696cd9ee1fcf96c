"""What a user would pick instead trains as dense training does: the same sums, norms and updates."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, train


def with_peer(folder: str, peer: str, arguments: list[str]) -> dict[str, Any]:
    from scripts.study.timed_rank import TimedTrainer
    from torchtitan_scape.trainer import trainer

    wanted = json.dumps({"output": f"{folder}/measured.json", "warm_up": 2, "peer": peer})
    with patch.dict("os.environ", TIMED_RUN=wanted), patch.object(trainer, "ScapeTrainer", TimedTrainer):
        return train(folder, arguments)


@pytest.mark.parametrize("micro_batches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_peers_train_as_dense_training_does(micro_batches: int, pool2: Pool, tmp_path: Path) -> None:
    """With two micro-batches DDP exchanges after the second, TorchTitan's HSDP after each."""
    batch = ["--training.local_batch_size=1", f"--training.global_batch_size={2 * micro_batches}"]
    arguments = [*METHODS["adams"], *LAYOUTS["1x2"], "--training.steps=4", *batch]
    plain = pool2(train, str(tmp_path / "plain"), arguments)[0]
    for peer in ("ddp", "hsdp"):
        for result in pool2(with_peer, str(tmp_path / peer), peer, arguments):
            assert result["norms"] == pytest.approx(plain["norms"], rel=1e-5)
            assert result["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        measured = json.loads((tmp_path / peer / "measured.json").read_text())
        assert measured["step_seconds"] > 0 and not measured["sent"]

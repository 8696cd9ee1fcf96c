"""Batches that are read during the previous step: order, ends, and the position in a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, train
from torchtitan_scape.data.loader import Batch, NoTextError
from torchtitan_scape.data.read_ahead import ReadAheadLoader


class Numbers:
    """A loader of `count` batches; batch i has i labels that count. `error` follows them."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.position = count, error, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.count:
            self.position += 1
            labels = torch.full((10,), -100)
            labels[: self.position] = 1
            yield {"input": torch.tensor([self.position])}, labels
        if self.error is not None:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}


def reading(count: int, per_step: int, error: Exception | None = None) -> ReadAheadLoader:
    loader = ReadAheadLoader(Numbers(count, error))  # type: ignore[arg-type]
    loader.per_step = per_step
    return loader


@pytest.mark.parametrize("ahead", [True, False])
def test_the_position_is_that_of_steps_that_began(ahead: bool) -> None:
    """In every step, before and after the next one is read."""
    loader, found = reading(8, 2), []
    batches = iter(loader)
    for step in range(3):
        found += [int(next(batches)[0]["input"]) for _ in range(2)]
        assert loader.state_dict() == {"position": 2 * step + 2} and loader.seconds() >= 0
        if ahead:
            read = loader.read_step()
            assert read is loader.read_step() and read.tokens == 4 * step + 7
            assert read.error is None
            assert loader.state_dict() == {"position": 2 * step + 2}
    assert found == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_data_is_raised_in_its_step() -> None:
    loader = reading(3, 2, NoTextError("NoTextError: nothing"))
    batches = iter(loader)
    assert [int(next(batches)[0]["input"]) for _ in range(2)] == [1, 2]
    assert isinstance(loader.read_step().error, NoTextError) and loader.read_step().tokens == 3
    assert int(next(batches)[0]["input"]) == 3
    with pytest.raises(NoTextError):
        next(batches)


def test_a_checkpoint_between_two_steps_continues_with_the_next_batch(pool2: Pool, tmp_path: Path) -> None:
    """Bitwise, and although the trainer has read the batches of the step that follows the checkpoint."""
    arguments = [*METHODS["adams"], *LAYOUTS["1x2"], "--training.steps=6", "--training.global_batch_size=8"]
    saving = ["--checkpoint.enable", "--checkpoint.interval=3"]
    whole = pool2(train, str(tmp_path / "whole"), arguments)
    pool2(train, str(tmp_path / "cut"), [*arguments, *saving], stop_after=4)
    rest = pool2(train, str(tmp_path / "cut"), [*arguments, *saving])
    assert [run["losses"] for run in rest] == [run["losses"][3:] for run in whole]
    assert all(torch.equal(a["parameters"], b["parameters"]) for a, b in zip(rest, whole, strict=True))

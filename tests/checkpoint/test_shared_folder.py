"""A folder that not all nodes share is refused on every rank at startup."""

import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.pool import Pool
from tests.training import train
from torchtitan_scape.checkpoint import storage


def on_hosts(folder: str, own_folders: bool, work: Any, *args: Any) -> Any:
    """Run on ranks of two hosts, each with LOCAL_RANK 0 and, with own_folders, a working directory of its own."""
    rank = dist.get_rank()
    if own_folders:
        os.makedirs(f"{folder}/host{rank}")
        os.chdir(f"{folder}/host{rank}")
    with (
        patch.object(socket, "gethostname", lambda: f"host{rank}"),
        patch.object(storage, "SHARED_SECONDS", 0.5),
        patch.dict(os.environ, LOCAL_RANK="0"),
    ):
        return work(*args)


def check(folder: str, delay: float = 0.0) -> None:
    exists, begin = Path.exists, time.monotonic()

    def late(self: Path, **kwargs: Any) -> bool:
        return time.monotonic() > begin + delay and exists(self, **kwargs)

    with patch.object(Path, "exists", late):
        storage.check_shared(folder)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_shared_folder_is_accepted_and_left_as_it_was(delay: float, pool2: Pool, tmp_path: Path) -> None:
    """Also if the file becomes visible later, as with the cache of a network file system."""
    pool2(on_hosts, str(tmp_path), False, check, f"{tmp_path}/run/checkpoint", delay)
    assert os.listdir(tmp_path) == ["run"] and not os.listdir(tmp_path / "run")


def test_a_host_that_does_not_see_the_folder_is_named_on_every_rank(pool2: Pool, tmp_path: Path) -> None:
    for good, text in pool2.outcomes(on_hosts, str(tmp_path), True, check, "run/checkpoint"):
        assert not good and "is missing on host1; checkpoints need one. Set --job.dump_folder" in text
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_a_folder_that_rank_0_cannot_write_is_refused_on_every_rank(pool2: Pool) -> None:
    for good, text in pool2.outcomes(on_hosts, "", False, check, "/dev/null/run"):
        assert not good and "NotADirectoryError" in text


def test_the_trainer_checks_before_it_builds_the_model(pool2: Pool, tmp_path: Path) -> None:
    arguments = ["--training.steps=1", "--checkpoint.enable"]
    for good, text in pool2.outcomes(on_hosts, str(tmp_path), True, train, "run", arguments):
        assert not good and "is missing on host1" in text
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_many_hosts_are_counted() -> None:
    text = storage.not_shared_text("/scratch/run", [f"node{i:02}" for i in range(20)])
    assert "node07 and 12 more;" in text and "node08" not in text

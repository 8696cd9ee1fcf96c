"""The files of the product that a step and a load of an own training loop run through, on two ranks."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.pool import Pool
from tests.replica.own_loop import loss_of, make_model, make_optimizer, train

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(ROOT / name for name in ("torchtitan_scape", "kernels", "topology"))


def files_of(function: Callable[[], Any]) -> list[str]:
    """Call a function. Return the files of the product whose functions it calls, also on the threads of exchanges."""
    seen = set[str]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    paths = {Path(name).resolve() for name in seen if Path(name).is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in paths if any(map(path.is_relative_to, PRODUCT)))


def files_of_a_step(method: str) -> list[str]:
    """Return the files of the fourth step."""
    from torchtitan_scape import Muon, replicate

    model, files = make_model(), list[str]()
    named = list(model.named_parameters())
    has_muon = method == "quantized_update"
    inner: Any = Muon(named, lr=1e-2, matrices=["2.weight"]) if has_muon else torch.optim.AdamW(named, lr=1e-2)
    optimizer = replicate(model, inner, method, dist.group.WORLD, max_norm=1.0, total_steps=100)

    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        files = files_of(optimizer.step)
        optimizer.zero_grad()
    return files


@pytest.mark.parametrize(("method", "most"), [("dense", 16), ("sparta", 19), ("quantized_update", 23)])
def test_a_step_runs_through_few_files(method: str, most: int, pool2: Pool) -> None:
    """Who reads a step from top to bottom opens these files; a larger number needs a reason."""
    for files in pool2(files_of_a_step, method):
        assert 10 < len(files) <= most, files


def files_of_a_load(folder: str, method: str) -> list[str]:
    """Return the files of a load with the method and the layout of the run that saved."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    model = make_model()
    optimizer = make_optimizer(model, method)
    train(model, optimizer, range(4))
    dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
    resumed = make_optimizer(model, method)
    return files_of(lambda: load_checkpoint(folder, model, resumed))


@pytest.mark.parametrize(("method", "most"), [("dense", 18), ("scape", 23)])
def test_a_load_runs_through_few_files(method: str, most: int, pool2: Pool, tmp_path: Path) -> None:
    for files in pool2(files_of_a_load, str(tmp_path), method):
        assert 10 < len(files) <= most, files

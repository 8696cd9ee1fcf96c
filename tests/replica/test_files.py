"""The files of the product that a step of an own training loop runs through, on two ranks."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.replica.own_loop import loss_of, make_model

ROOT = Path(__file__).resolve().parents[2]


def files_of_a_step(method: str) -> list[str]:
    """Return the files whose functions the fourth step calls, also on the threads of exchanges."""
    from torchtitan_scape import Muon, replicate

    model, seen = make_model(), set[str]()
    named = list(model.named_parameters())
    has_muon = method == "quantized_update"
    inner: Any = Muon(named, lr=1e-2, matrices=["2.weight"]) if has_muon else torch.optim.AdamW(named, lr=1e-2)
    optimizer = replicate(model, inner, method, dist.group.WORLD, max_norm=1.0, total_steps=100)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        if step == 3:
            threading.setprofile(watch)
            sys.setprofile(watch)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        optimizer.zero_grad()
    product = {Path(name).resolve() for name in seen if Path(name).is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in product if path.is_relative_to(ROOT))


@pytest.mark.parametrize(("method", "most"), [("dense", 22), ("sparta", 27), ("quantized_update", 30)])
def test_a_step_runs_through_few_files(method: str, most: int, pool2: Pool) -> None:
    """Who reads a step from top to bottom opens these files; a larger number needs a reason."""
    for files in pool2(files_of_a_step, method):
        product = [name for name in files if name.split("/")[0] in ("torchtitan_scape", "kernels", "topology")]
        assert 10 < len(product) <= most, product

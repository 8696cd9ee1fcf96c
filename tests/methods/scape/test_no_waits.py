"""The PyTorch passes give the same bits on a GPU as on a CPU, and never wait for the device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.on_a_gpu import AsOnAGpu, waits_here
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, draw, flat, gradient, make_scape
from torchtitan_scape.kernels.scape.step import ShardedUpdate
from torchtitan_scape.replica.guard import FiniteGuard

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_norm": None}),
    (1, {"selection": "tensor"}),
    (2, {}),
    (2, {"selection": "tensor", "code": "int8", "clip_mode": "literal"}),
    (2, {"code": "2bit"}),
    (2, {"update": "sharded"}),
    (2, {"update": "sharded", "code": "int4"}),
]


@pytest.mark.parametrize(("replicas", "options"), CASES)
def test_no_step_waits_for_the_gpu(replicas: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on, including a skipped one; bitwise equal to the code path of a CPU."""
    waits_here(monkeypatch, FiniteGuard, "finish_previous_step")  # for flags that were copied to the host
    waits_here(monkeypatch, ShardedUpdate, "clear_padding")  # builds a table once

    def work(collectives: ThreadCollectives, gpu: bool) -> Tensor:
        parameters = [torch.nn.Parameter(p) for p in draw(0, SPARSE + DENSE)]
        more: dict[str, Any] = {"density": 0.1, "density_warmup_steps": 3, "lr": 1e-2, "block_size": 16, **options}
        optimizer = make_scape(parameters, replicas=collectives if replicas > 1 else None, **more)
        for step in range(7):
            for p, g in zip(parameters, gradient(step, collectives.replica, SPARSE + DENSE), strict=True):
                p.grad = g
            if step in (1, 5) and collectives.replica == 0:
                parameters[0].grad[3, 2] = float("inf")  # type: ignore[index]
            if gpu:
                with AsOnAGpu():
                    optimizer.step()
            else:
                optimizer.step()
        return flat([p.detach() for p in parameters])

    theirs = run_replicas(replicas, lambda c: work(c, False))
    ours = run_replicas(replicas, lambda c: work(c, True))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_waiting_operations_are_detected() -> None:
    x, bits = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    for wait in (
        lambda: x.sum().item(),
        lambda: bool(x[0] > 0),
        lambda: bits.nonzero(),
        lambda: x[bits],
        lambda: x.__setitem__(bits, x),
        lambda: x.__setitem__(torch.arange(2), 1.0),
        lambda: torch.tensor([1.0]),
    ):
        with AsOnAGpu(), pytest.raises(AssertionError):
            wait()
    with AsOnAGpu() as mode:
        x[1:3] = 1.0
        x.index_fill_(0, torch.arange(2), 2.0)
        assert not x.is_cpu
        with mode.host():
            assert x.is_cpu and x.tolist() == [2.0, 2.0, 1.0, 0.0]

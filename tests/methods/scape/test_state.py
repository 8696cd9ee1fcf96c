"""`state_dict` and `load_state_dict` of the optimizer without the checkpoint package."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.marks import covering
from tests.methods.scape.test_literal import CODED_SHARDED
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import copied, lasting, make_scape, resume, train
from torchtitan_scape import NonFiniteGradientError


def test_a_state_dict_without_residuals_is_refused() -> None:
    optimizer = make_scape([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    state = {key: value for key, value in optimizer.state_dict().items() if key != "replica"}
    with pytest.raises(ValueError, match="no 'replica' entry"):
        optimizer.load_state_dict(state)


RULES: list[dict[str, Any]] = [{}, {"staleness_scaling": False, "selection": "tensor"}]
REPLICATED = [{"code": code, **rule} for code, rule in product(("float32", "int8", "2bit"), RULES)]
SHARDED = [{"update": "sharded", **options} for options in ({}, *CODED_SHARDED)]


@pytest.mark.parametrize(
    "at, options", [*covering(product((1, 2, 5), REPLICATED)), *covering(product((1, 2, 5), SHARDED))]
)
def test_state_dict_resumes_bitwise(at: int, options: dict[str, Any]) -> None:
    """Property 8 for the optimizer alone: saved while a mask is in flight, loaded into a new optimizer."""

    def work(collectives: ThreadCollectives) -> None:
        whole, resumed = (lasting(optimizer) for optimizer in resume(collectives, at, **options))
        assert all(map(torch.equal, resumed, whole))

    run_replicas(2, work)


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_quantization_errors_load_with_any_chunk_size(code: str) -> None:
    """Chunks are padded by the number of replicas: stored in memory order, errors would load at other entries."""

    def work(collectives: ThreadCollectives) -> None:
        states = []
        for chunk_bytes in (4, 1 << 24):
            options = {"density": 0.1, "code": code, "chunk_bytes": chunk_bytes}
            train(collectives, 4, probe=lambda o, step: states.append(o) if step == 3 else None, **options)
        small, large = states
        assert small.method.passes.code_residual.numel() > large.method.passes.code_residual.numel()
        saved = copied(small.state_dict())
        large.load_state_dict(saved)
        assert bool((large.method.passes.code_residual != 0).any())
        for i in range(len(small.method.passes.sizes)):
            a, b = (o.method.passes.code_residual_of(i) for o in states)
            assert torch.equal(a, b)

    run_replicas(3, work)


def test_a_state_dict_of_another_layout_is_refused() -> None:
    saved = make_scape([nn.Parameter(torch.ones(4, 4))], lr=0.1, block_size=8).state_dict()
    with pytest.raises(ValueError, match=r"block_size=8.*this run has 16"):
        make_scape([nn.Parameter(torch.ones(4, 4))], lr=0.1, block_size=16).load_state_dict(saved)


def test_the_state_can_be_saved_after_too_many_skipped_steps() -> None:
    """The mask in flight is dropped before the error is raised, so that it is not waited for twice."""
    parameter = nn.Parameter(torch.randn(64, 64))
    optimizer = make_scape([("p", parameter)], lr=1e-3, density=0.1, density_warmup_steps=9, max_skipped_steps=1)
    for value in (1.0, float("nan")):
        parameter.grad = torch.full((64, 64), value)
        optimizer.step()
    with pytest.raises(NonFiniteGradientError):
        optimizer.finish_previous_step()
    optimizer.load_state_dict(optimizer.state_dict())
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    optimizer.finish_previous_step()
    assert optimizer.guard.skipped == 1

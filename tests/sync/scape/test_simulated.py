"""One process that plays N replicas is N ranks: to the last bit where the sums are in the same order."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, draw, gradient, make_scape
from topology.simulated import SimulatedCollectives
from torchtitan_scape import Scape
from torchtitan_scape.sync.guard import NonFiniteGradientError

SHAPES = SPARSE + DENSE
STEPS = 12


class Chunked(SimulatedCollectives):
    """In chunks as small as those of the threads."""

    chunk_entries = 64


def make(collectives: Any, **options: Any) -> Scape:
    named = [(f"p{i}", nn.Parameter(p)) for i, p in enumerate(draw(0, SHAPES))]
    return make_scape(named, lr=1e-2, block_size=16, replicas=collectives, **options)


def put_gradients(optimizer: Scape, step: int, replica: int, nan_at: int | None) -> None:
    for p, g in zip(optimizer.param_groups[0]["params"], gradient(step, replica, SHAPES), strict=True):
        p.grad = g
    if step == nan_at and replica == 1:
        p.grad.view(-1)[0] = float("nan")


def snapshot(optimizer: Scape) -> dict[str, Tensor]:
    """Everything that a step leaves; of a simulated run the rows of the state are the replicas'."""
    return {
        "parameters": torch.cat([p.detach().reshape(-1) for p in optimizer.param_groups[0]["params"]]),
        "states": torch.cat(optimizer.passes.states, dim=-1).clone(),
        "wire_residual": wire_residual(optimizer),
        "norm": optimizer.grad_norm.clone(),
        "factor": optimizer.clip_factor.clone(),
    }


def wire_residual(optimizer: Scape) -> Tensor:
    """Tensor behind tensor, however the payload is cut into parts."""
    passes = optimizer.passes
    if not passes.wire_residual.numel():
        return passes.wire_residual.clone()
    return torch.cat([passes.wire_residual_of(i) for i in range(len(passes.sizes))], dim=-1)


def bits(optimizer: Scape) -> Tensor:
    """The mask that the next step uses."""
    optimizer.settle()
    return optimizer.masks.in_use.bits.clone()


def real(collectives: ThreadCollectives, nan_at: int | None, steps: int = STEPS, **options: Any) -> Any:
    optimizer = make(collectives, **options)
    history = []
    for step in range(steps):
        put_gradients(optimizer, step, collectives.replica, nan_at)
        optimizer.step()
        history.append(snapshot(optimizer))
    return history, optimizer.statistics(), dict(collectives.traffic.sent), bits(optimizer), optimizer.planned_bytes()


def simulated(replicas: int, nan_at: int | None, steps: int = STEPS, **options: Any) -> Any:
    collectives = Chunked(replicas)
    optimizer = make(collectives, **options)
    history = []
    for step in range(steps):
        for replica in range(replicas):
            put_gradients(optimizer, step, replica, nan_at)
            optimizer.collect()
        optimizer.step()
        history.append(snapshot(optimizer))
    return history, optimizer.statistics(), dict(collectives.traffic.sent), bits(optimizer), optimizer.planned_bytes()


@pytest.mark.parametrize(
    "replicas, nan_at, options",
    [
        (2, None, {"density": 1.0}),
        (3, None, {"density": 0.1}),
        (3, 8, {"density": 0.1, "density_warmup_steps": 5}),
        (2, 8, {"density": 0.1, "density_warmup_steps": 5}),
        (3, 3, {"density": 0.1, "density_warmup_steps": 5, "selection": "tensor", "chunk_bytes": 400}),
        (3, None, {"density": 0.03, "staleness_scaling": False, "clip_mode": "literal", "reduction": "sum"}),
        (2, 5, {"density": 0.1, "max_norm": None, "chunk_bytes": 200, "dense_names": ["p1"]}),
        (3, 6, {"density": 0.1, "wire_dtype": "bfloat16", "chunk_bytes": 200}),
        (4, None, {"density": 0.1, "wire_dtype": "bfloat16", "selection": "tensor", "density_warmup_steps": 3}),
    ],
)
def test_it_is_the_run_of_n_ranks(replicas: int, nan_at: int | None, options: dict[str, Any]) -> None:
    check_alike(replicas, nan_at, STEPS, **options)


def check_alike(replicas: int, nan_at: int | None, steps: int, **options: Any) -> None:
    """Threads that are the replicas, and one simulation, on the same backend: everything equal to the last bit."""
    ranks = run_replicas(replicas, lambda collectives: real(collectives, nan_at, steps, **options))
    history, figures, sent, mask, planned = simulated(replicas, nan_at, steps, **options)
    for step, one in enumerate(history):
        for key in ("parameters", "norm", "factor"):
            expected = ranks[0][0][step][key]
            assert torch.equal(one[key].nan_to_num(-1), expected.nan_to_num(-1)), (step, key)
        for replica, (theirs, *_) in enumerate(ranks):
            assert torch.equal(one["states"][replica], theirs[step]["states"]), (step, replica)
            assert torch.equal(one["wire_residual"][replica], theirs[step]["wire_residual"]), (step, replica)
    assert torch.equal(mask, ranks[0][3])
    assert figures == pytest.approx(ranks[0][1], rel=1e-12)
    assert sent == pytest.approx(ranks[0][2]) and planned == ranks[0][4]


@pytest.mark.parametrize("options", [{}, {"wire_dtype": "bfloat16", "density_warmup_steps": 3}])
def test_its_state_resumes_bit_for_bit(options: dict[str, Any]) -> None:
    whole = simulated(3, None, density=0.1, **options)[0]
    optimizer = make(Chunked(3), density=0.1, **options)
    for step in range(STEPS):
        if step == 6:
            state = optimizer.state_dict()
            parameters = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
            optimizer = make(Chunked(3), density=0.1, **options)
            optimizer.load_state_dict(state)
            for p, value in zip(optimizer.param_groups[0]["params"], parameters, strict=True):
                p.data.copy_(value)
        for replica in range(3):
            put_gradients(optimizer, step, replica, None)
            optimizer.collect()
        optimizer.step()
    for key, value in snapshot(optimizer).items():
        assert torch.equal(value, whole[-1][key]), key
    with pytest.raises(ValueError, match="replicas=3, this run has 2"):
        make(Chunked(2), density=0.1, **options).load_state_dict(optimizer.state_dict())


def test_a_real_replica_does_not_collect() -> None:
    with pytest.raises(ValueError, match="collect\\(\\) is for simulated replicas"):
        make_scape([("w", torch.nn.Parameter(torch.ones(2, 2)))], lr=0.1).collect()


def test_what_can_go_wrong_is_named() -> None:
    for replicas in (0, 1):
        with pytest.raises(ValueError, match=f"{replicas} simulated replicas; there must be 2 or more"):
            SimulatedCollectives(replicas)
    optimizer = make(SimulatedCollectives(3), density=0.1, max_skipped_steps=1)
    put_gradients(optimizer, 0, 0, None)
    optimizer.collect()
    with pytest.raises(ValueError, match="1 replicas' gradients were collected, and 3 replicas are simulated"):
        optimizer.step()
    for replica in range(3):
        put_gradients(optimizer, 0, replica, nan_at=0)
        optimizer.collect()
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match=r"parameter 'p5 \(simulated replica 1\)'"):
        optimizer.settle()

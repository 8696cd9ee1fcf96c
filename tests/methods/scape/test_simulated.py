"""Simulated replicas that share a model are bitwise equal to replicas with their own models."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import slow
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, copied, draw, gradient, make_scape
from torchtitan_scape import Scape
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.replica.guard import NonFiniteGradientError
from torchtitan_scape.topology.in_process import SimulatedReplicas

SHAPES = SPARSE + DENSE
STEPS = 10


def drawn(options: dict[str, Any]) -> list[nn.Parameter]:
    parameters = nn.ParameterList(draw(0, SHAPES))
    if options.get("weights_dtype") == "bfloat16":
        hold_in_bfloat16(parameters, scaled=options.get("update") == "sharded")
    return list(parameters)


def make(collectives: Any, parameters: list[nn.Parameter] | None = None, **options: Any) -> Scape:
    parameters = parameters or drawn(options)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return make_scape(named, lr=1e-2, block_size=16, replicas=collectives, **options)


def gradients(step: int, replica: int, nan_at: int | None) -> list[Tensor]:
    found = gradient(step, replica, SHAPES)
    if step == nan_at and replica == 1:
        found[-1].view(-1)[0] = float("nan")
    return found


def snapshot(optimizer: Scape) -> dict[str, Tensor]:
    """Return all results of a step."""
    return {
        "parameters": torch.cat([p.detach().reshape(-1) for p in optimizer.param_groups[0]["params"]]),
        "states": torch.cat(optimizer.method.passes.kept()),
        "code_residual": code_residual(optimizer),
        "norm": optimizer.grad_norm.clone(),
        "factor": optimizer.clip_factor.clone(),
    }


def code_residual(optimizer: Scape) -> Tensor:
    """Return the quantization errors in tensor order, independent of the chunks."""
    passes = optimizer.method.passes
    if not passes.code_residual.numel():
        return passes.code_residual.clone()
    return torch.cat([passes.code_residual_of(i) for i in range(len(passes.sizes))], dim=-1)


def bits(optimizer: Scape) -> Tensor:
    """Return the mask of the next step."""
    optimizer.finish_previous_step()
    return optimizer.method.masks.in_use.bits.clone()


Run = tuple[list[dict[str, Tensor]], dict[str, float], dict[Any, float], Tensor, float]


def finished(optimizer: Scape, history: list[dict[str, Tensor]]) -> Run:
    sent = dict(optimizer.collectives.ledger.sent)
    return history, optimizer.metrics(), sent, bits(optimizer), optimizer.planned_bytes()


def real(collectives: ThreadCollectives, nan_at: int | None, steps: int = STEPS, **options: Any) -> Run:
    optimizer = make(collectives, **options)
    history = []
    for step in range(steps):
        for p, g in zip(optimizer.param_groups[0]["params"], gradients(step, collectives.replica, nan_at), strict=True):
            p.grad = g
        optimizer.step()
        history.append(snapshot(optimizer))
    return finished(optimizer, history)


class Simulated:
    """Replicas that share their parameters, with chunks as small as those of `run_replicas`."""

    def __init__(self, replicas: int, **options: Any) -> None:
        self.replicas = SimulatedReplicas(replicas)
        for endpoint in self.replicas.endpoints:
            endpoint.chunk_entries, endpoint.min_columns = 64, 7
        self.parameters = drawn(options)
        endpoints = self.replicas.endpoints
        self.each = self.replicas.run(lambda i: make(endpoints[i], self.parameters, **options))

    def step(self, step: int, nan_at: int | None) -> list[dict[str, Tensor]]:
        def one(i: int) -> None:
            # Store a replica's gradients before the next replica starts.
            for parameter, values in zip(self.parameters, gradients(step, i, nan_at), strict=True):
                parameter.grad = values
            self.each[i].step()

        self.replicas.run(one)
        return [snapshot(optimizer) for optimizer in self.each]


def simulated(replicas: int, nan_at: int | None, steps: int = STEPS, **options: Any) -> list[Run]:
    run = Simulated(replicas, **options)
    history = [run.step(step, nan_at) for step in range(steps)]
    return run.replicas.run(lambda i: finished(run.each[i], [every[i] for every in history]))


@pytest.mark.parametrize(
    "replicas, nan_at, options",
    [
        slow(2, None, {"density": 1.0}),
        slow(3, None, {"density": 0.1}),
        (3, 8, {"density": 0.1, "density_warmup_steps": 5}),
        slow(2, 8, {"density": 0.1, "density_warmup_steps": 5}),
        (3, 3, {"density": 0.1, "density_warmup_steps": 5, "selection": "tensor", "chunk_bytes": 400}),
        (3, None, {"density": 0.03, "staleness_scaling": False, "clip_mode": "literal", "reduction": "sum"}),
        (2, 5, {"density": 0.1, "max_norm": None, "chunk_bytes": 200}),
        (3, 6, {"density": 0.5, "code": "int4", "chunk_bytes": 600, "density_warmup_steps": 3}),
        (4, None, {"density": 0.1, "code": "int8", "selection": "tensor", "density_warmup_steps": 3}),
        (3, 6, {"density": 0.5, "update": "sharded", "code": "2bit", "density_warmup_steps": 3}),
        slow(3, 4, {"density": 0.1, "update": "sharded", "density_warmup_steps": 3}),
        (2, None, {"density": 0.1, "update": "sharded", "offload": ["state"]}),
        slow(3, 4, {"density": 0.1, "offload": ["state"]}),
        (3, 4, {"density": 0.1, "weights_dtype": "bfloat16", "update": "sharded", "density_warmup_steps": 3}),
    ],
)
def test_simulated_replicas_equal_replicas_with_their_own_models(
    replicas: int, nan_at: int | None, options: dict[str, Any]
) -> None:
    check_alike(replicas, nan_at, STEPS, **options)


def check_alike(replicas: int, nan_at: int | None, steps: int, **options: Any) -> None:
    """Compare replicas with their own models and simulated ones on the same backend bitwise."""
    ranks = run_replicas(replicas, lambda collectives: real(collectives, nan_at, steps, **options))
    for ours, theirs in zip(simulated(replicas, nan_at, steps, **options), ranks, strict=True):
        for step, (one, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
            for key, values in one.items():
                assert torch.equal(values.nan_to_num(-1), other[key].nan_to_num(-1)), (step, key)
        assert torch.equal(ours[3], theirs[3])
        assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
        assert ours[2] == pytest.approx(theirs[2]) and ours[4] == theirs[4]


@pytest.mark.parametrize(
    "options",
    [slow({}), {"code": "int4", "density_warmup_steps": 3}, slow({"weights_dtype": "bfloat16", "update": "sharded"})],
)
def test_simulated_state_resumes_bitwise(options: dict[str, Any]) -> None:
    whole = simulated(3, None, density=0.1, **options)
    begun, run = Simulated(3, density=0.1, **options), Simulated(3, density=0.1, **options)
    for step in range(6):
        begun.step(step, None)
    states = begun.replicas.run(lambda i: copied(begun.each[i].state_dict()))
    run.replicas.run(lambda i: run.each[i].load_state_dict(states[i]))
    for p, value in zip(run.parameters, begun.parameters, strict=True):
        p.data.copy_(value)
    for step in range(6, STEPS):
        last = run.step(step, None)
    for replica, found in enumerate(last):
        assert all(torch.equal(values, whole[replica][0][-1][key]) for key, values in found.items())
    states = run.replicas.run(lambda i: run.each[i].state_dict())
    fewer = Simulated(2, density=0.1, **options)
    with pytest.raises(ValueError, match="replicas=3, this run has 2"):
        fewer.replicas.run(lambda i: fewer.each[i].load_state_dict(states[i]))


def test_errors_of_simulated_replicas_name_the_cause() -> None:
    for replicas in (0, 1):
        with pytest.raises(ValueError, match=f"{replicas} simulated replicas; there must be 2 or more"):
            SimulatedReplicas(replicas)
    run = Simulated(3, density=0.1, max_skipped_steps=1)
    run.step(0, nan_at=0)
    with pytest.raises(NonFiniteGradientError, match=r"parameter 'p5 \(simulated replica 1\)'"):
        run.replicas.run(lambda i: run.each[i].finish_previous_step())


def test_a_failing_replica_ends_the_others() -> None:
    def work(replica: int) -> None:
        endpoint = simulated.endpoints[replica]
        endpoint.minimum_over_all(torch.tensor(True))
        if replica == 1:
            raise KeyError("of replica 1")
        endpoint.minimum_over_all(torch.tensor(True))

    simulated = SimulatedReplicas(3)
    for _ in range(2):  # and the next run is not affected
        with pytest.raises(KeyError, match="of replica 1"):
            simulated.run(work)


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_collective_that_a_replica_does_not_call_raises_an_error(leaves: int) -> None:
    def work(replica: int) -> None:
        for _ in range(1 if replica == leaves else 2):
            simulated.endpoints[replica].minimum_over_all(torch.tensor(True))

    simulated = SimulatedReplicas(3)
    with pytest.raises(RuntimeError, match=rf"that replicas \[{leaves}\] did not call"):
        simulated.run(work)


def test_replicas_keep_their_threads_while_they_exist() -> None:
    """Also after an error, because libraries keep memory for every thread."""

    def work(replica: int) -> int:
        if fails and replica == 1:
            raise KeyError("of replica 1")
        return threading.get_ident()

    simulated, found, before = SimulatedReplicas(3), [], set[threading.Thread]()
    for fails in (False, True, False):
        if fails:
            with pytest.raises(KeyError, match="of replica 1"):
                simulated.run(work)
        else:
            found.append(simulated.run(work))
        # The first run starts the threads. Those of replicas of other tests may end.
        before = before or set(threading.enumerate())
    assert found[0] == found[1] and len(set(found[0])) == 3 and set(threading.enumerate()) <= before
    threads = [thread for thread in threading.enumerate() if thread.ident in found[0][1:]]
    del simulated
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_replica_threads_inherit_the_callers_settings() -> None:
    simulated = SimulatedReplicas(2)
    with torch.no_grad():
        assert simulated.run(lambda _: torch.is_grad_enabled()) == [False, False]

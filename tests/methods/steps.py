"""Steps of a method on small tensors with fixed gradients, on simulated replicas and on ranks."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.methods.cases import CHUNK_ENTRIES, SHAPES, STEPS, WITHOUT, Case
from tests.replicas import run_replicas as run_with_chunks
from torchtitan_scape import AdamS
from torchtitan_scape.core.parameters import collect_shards, store_gradient
from torchtitan_scape.methods.base import GradientMethod, LocalMethod
from torchtitan_scape.methods.interface import Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.simulation import mean_of_rows
from torchtitan_scape.topology.collectives import ReplicaCollectives

run_replicas = functools.partial(run_with_chunks, chunk_entries=CHUNK_ENTRIES)


def is_local(case: Case) -> bool:
    return METHODS[case.method].options.per_replica_weights


def updates(case: Case) -> bool:
    """Return whether the method exchanges updates: neither gradients alone nor the weights of replicas."""
    return not issubclass(METHODS[case.method].method, GradientMethod | LocalMethod)


def make(
    case: Case,
    collectives: ReplicaCollectives,
    scale: float = 1.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **other: Any,
) -> Method:
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    # With the latter, a step changes the weights by the gradient.
    optimizer = torch.optim.SGD(named, lr=1.0, fused=True) if updates(case) else AdamS(named, lr=1e-2)
    entry = METHODS[case.method]
    setting = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer, scale, total_steps=100)
    return entry.method(setting, entry.options(**{**case.options, **other}))


def gradients(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    found = [torch.randn(shape, generator=generator).view(-1) for shape in SHAPES]
    found[WITHOUT].zero_()
    return found


def kept(method: Method) -> dict[str, Tensor]:
    """Return copies of all states. Collective."""
    return {f"{s.kind}.{name}": t.clone() for s in method.states() for name, t in of_all_replicas(method, s).items()}


def of_all_replicas(method: Method, state: State) -> dict[str, Tensor]:
    """Return the tensors of a state; the parts of all replicas, if each has its own, as (n,). Collective."""
    if state.starts is None:
        return state.tensors
    whole = {shard.name: torch.zeros(shard.size) for shard in method.context.shards}
    for name, values in state.tensors.items():
        whole[name][state.starts[name] : state.starts[name] + values.numel()] = values
    for values in whole.values():
        method.collectives.sum_over_replicas(values)
    return whole


def pending(method: Method) -> list[Tensor]:
    """Return the pending update of every parameter, flat FP64. Collective."""
    found = [torch.zeros(torch.Size(shape).numel(), dtype=torch.float64) for shape in SHAPES]
    for state in method.states():
        is_pending = state.on_migration in ("gradient", "displacement")
        for name, values in of_all_replicas(method, state).items() if is_pending else ():
            found[int(name[1:])] += values.double().view(-1)
    for i, anchor in enumerate(shared_model(method) if method.options.per_replica_weights else ()):
        found[i] += (anchor.double() - method.context.shards[i].parameter.detach().double()).view(-1)
    return found


@dataclass
class Played:
    """Results of one replica by step: applied updates, states, weights, pending updates, sent bytes.

    Attributes:
        replicated: keys of the states that all replicas have in common.
    """

    given: list[list[Tensor]] = field(default_factory=list)
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    trained: list[tuple[list[Tensor], dict[str, Any]]] = field(default_factory=list)
    pending: list[list[Tensor]] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    planned: float = 0.0
    replicated: set[str] = field(default_factory=set)


def play(
    collectives: ReplicaCollectives,
    case: Case,
    nan_at: int = 0,
    method: Method | None = None,
    first: int = 1,
    **other: Any,
) -> Played:
    method = method or make(case, collectives, **other)
    played, before = Played(planned=method.planned_bytes()), 0.0
    for number in range(first, STEPS + 1):
        own = gradients(number, collectives.replica)
        if number == nan_at and collectives.replica == collectives.replicas - 1:
            own[0][3] = torch.nan
        # There is no guard here, so the test computes its flag.
        step = StepInfo(number, torch.tensor(number != nan_at))
        with torch.no_grad():
            played.given.append(exchanged(method, own, step))
        played.trained.append(trained_by(method))
        played.kept.append(kept(method))
        played.pending.append(pending(method))
        sent = sum(sent_by_level(collectives).values())
        played.sent.append(sent - before)
        before = sent
    shared = [state for state in method.states() if not state.per_replica]
    played.replicated = {f"{state.kind}.{name}" for state in shared for name in of_all_replicas(method, state)}
    return played


def update(method: Method, gradients: list[Tensor], step: StepInfo) -> None:
    """Update as `GradientMethod.step` does after `synchronize`, without clipping."""
    optimizer = method.context.optimizer
    assert isinstance(optimizer, AdamS)
    for shard, gradient in zip(method.context.shards, gradients, strict=True):
        store_gradient(shard, gradient)
    optimizer.found_inf = (~step.applied).float()
    optimizer.step()


def trained_by(method: Method) -> tuple[list[Tensor], dict[str, Any]]:
    """Return copies of the parameters and of the optimizer's state."""
    parameters = [shard.parameter.detach().clone() for shard in method.context.shards]
    return parameters, copy.deepcopy(method.context.optimizer.state_dict())


def exchanged(method: Method, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
    """Return the update that a step applies: the synchronized gradient, or minus the change of the shared weights.

    With per-replica weights every replica first takes a step along its own gradient.
    """
    if isinstance(method, GradientMethod):
        given = method.synchronize(gradients, step)
        delivered = [g.clone() for g in given]
        update(method, given, step)
        method.after_optimizer_step(step)
        return delivered
    if not isinstance(method, LocalMethod):
        shared = [shard.parameter.detach() for shard in method.context.shards]
        held = [weight.clone() for weight in shared]
        method.step(gradients, step)
        return [(old - new).view(-1) for old, new in zip(held, shared, strict=True)]
    before = [anchor.clone() for anchor in shared_model(method)]
    for shard, gradient in zip(method.context.shards, gradients, strict=True):
        if step.applied:
            shard.parameter.sub_(gradient.view(shard.parameter.shape))
    method.exchange(step)
    return [(old - new).view(-1) for old, new in zip(before, shared_model(method), strict=True)]


def sent_by_level(collectives: ReplicaCollectives) -> dict[str, float]:
    """Return the counted bytes without the norm, a scalar, which a plan counts as a message only."""
    found: dict[str, float] = {}
    for (level, kind), sent in collectives.ledger.sent_by_level_and_kind().items():
        found[level] = found.get(level, 0.0) + (sent if kind != "norm" else 0.0)
    return found


def shared_model(method: Method) -> list[Tensor]:
    (state,) = (state for state in method.states() if state.on_migration == "model")
    found = [state.tensors[shard.name] for shard in method.context.shards]
    return [mean_of_rows(values[None], method.collectives) for values in found] if state.per_replica else found


@functools.cache
def as_replicas(case: Case, replicas: int) -> list[Played]:
    """Return the results of every replica. Computed once for all tests."""
    return run_replicas(replicas, lambda collectives: play(collectives, case))


def check_steps(case: Case, replicas: int, literal: Any, **tolerance: float) -> None:
    """Compare updates and residuals of every step with those of a literal form. tolerance: of the residuals."""
    ranks = run_replicas(replicas, lambda collectives: play(collectives, case))
    for number in range(1, STEPS + 1):
        expected = literal.step([gradients(number, replica) for replica in range(replicas)])
        for got, wanted in zip(ranks[0].given[number - 1], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        for replica, rank in enumerate(ranks):
            for i in range(len(SHAPES)):
                if f"residual.p{i}" in rank.kept[number - 1]:
                    residual = rank.kept[number - 1][f"residual.p{i}"].view(-1)
                    torch.testing.assert_close(residual, literal.residual[replica][i], **tolerance)


def skipped_at(case: Case) -> int:
    return case.begins + 3


@functools.cache
def with_a_skipped_step(case: Case) -> list[Played]:
    """Return the results of two replicas that skip the step `skipped_at`. Computed once for all tests."""
    return run_replicas(2, lambda collectives: play(collectives, case, nan_at=skipped_at(case)))


def on_gloo(case: Case) -> Played:
    collectives = ReplicaCollectives(dist.group.WORLD)
    collectives.chunk_entries = CHUNK_ENTRIES  # as in `run_replicas`, because padding depends on the chunk size
    played = play(collectives, case)
    # Without states and weights, whose thousands of tensors take longer to send to the test than the steps.
    return Played(given=played.given, sent=played.sent, planned=played.planned)


def mean(step: int, replicas: int) -> list[Tensor]:
    every = [gradients(step, replica) for replica in range(replicas)]
    return [torch.stack(tensors).double().mean(0) for tensors in zip(*every, strict=True)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a.double() - b.double()).norm() <= tolerance * (1.0 + b.double().norm()))

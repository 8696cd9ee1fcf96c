"""NoLoCo compared with the equations of its paper; skipped steps, full exchanges and the model."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.interfaces import COUNTERS, read_interfaces
from tests.logs import logged
from tests.methods.test_local_updates import SHAPES, Literal, build, compared, far, parameters, start, step, trained
from tests.pool import Pool
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.noloco.options import NolocoOptions
from torchtitan_scape.replica.replicate import replicate
from torchtitan_scape.topology.layout import partners

NOLOCO = {"inner_steps": 6, "outer_lr": 0.7, "outer_momentum": 0.5, "averaging_rate": 0.9}


class LiteralNoloco(Literal):
    """Equations 1 to 3 of arXiv:2506.10911 for N replicas in one process, with the sign of Equation 32 before beta.

    Both means are formed, of Delta and of phi, where the method exchanges one tensor.
    """

    def __init__(
        self, replicas: int, inner_steps: int, outer_lr: float, outer_momentum: float, averaging_rate: float
    ) -> None:
        super().__init__(replicas, inner_steps=10**9, outer_lr=1.0, outer_momentum=0.0)
        self.alpha, self.beta, self.gamma, self.m = outer_momentum, outer_lr, averaging_rate, inner_steps
        self.phi = [start() for _ in range(replicas)]
        self.delta = [{n: torch.zeros(shape) for n, shape in SHAPES.items()} for _ in range(replicas)]

    def step(self) -> None:
        super().step()
        if self.t % self.m:
            return
        pairs = partners(self.replicas, self.t // self.m)
        phi = [dict(own) for own in self.phi]
        for i, partner in enumerate(pairs):
            group = [i] if partner is None else sorted((i, partner))
            for n in SHAPES:
                outer_gradient = sum(self.theta[j][n] - phi[j][n] for j in group) / len(group)
                mean = sum(phi[j][n] for j in group) / len(group)
                self.delta[i][n] = (
                    self.alpha * self.delta[i][n] + self.beta * outer_gradient - self.gamma * (phi[i][n] - mean)
                )
                self.phi[i][n] = phi[i][n] + self.delta[i][n]
        self.theta = [dict(own) for own in self.phi]


@pytest.mark.parametrize("gamma", [0.9, 0.7])
def test_equals_the_reference_algorithm(gamma: float, pool1: Pool, pool2: Pool) -> None:
    """One of the five simulated replicas rests."""
    options = NOLOCO | {"averaging_rate": gamma}
    for literal, i, states in compared(partial(LiteralNoloco, **options), "noloco", options, pool1, pool2, 5):
        assert far(states["slow_weights"], literal.phi[i]) < 1e-6
        assert far(states["slow_momentum"], literal.delta[i]) < 1e-5
        assert far(literal.theta[0], literal.theta[1]) > 1e-3  # replicas differ


def test_a_single_replica_takes_the_outer_step_alone(pool1: Pool) -> None:
    """As DiLoCo without Nesterov's look-ahead; with outer_lr = 1 and no momentum, as its inner optimizer."""
    literal = LiteralNoloco(1, **NOLOCO)  # type: ignore[arg-type]
    for _ in range(12):
        literal.step()
    (local,) = pool1(trained, 12, "noloco", NOLOCO, 1)
    assert far(local[-1][0][0], literal.theta[0]) < 1e-6
    plain = {"inner_steps": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
    (alone,), (local,) = pool1(trained, 12, "dense", {}, 1), pool1(trained, 12, "noloco", plain, 1)
    assert far(local[-1][0][0], alone[-1][0][0]) < 1e-6
    assert not any(key.startswith("slow_momentum") for key in local[-1][1][0])


def test_a_skipped_step_exchanges_nothing_and_its_displacement_waits(pool1: Pool) -> None:
    (history,) = pool1(trained, 14, "noloco", NOLOCO, 3, nan_at=6)
    for a, b in zip([*history[4][0], *history[4][1]], [*history[5][0], *history[5][1]], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    slow = [states[0]["slow_weights.embed"] for _, states in history]
    assert [i + 2 for i in range(13) if not torch.equal(slow[i], slow[i + 1])] == [12]
    (clean,) = pool1(trained, 14, "noloco", NOLOCO, 3)
    slow = [states[0]["slow_weights.embed"] for _, states in clean]
    assert [i + 2 for i in range(13) if not torch.equal(slow[i], slow[i + 1])] == [6, 12]


def flushed(replicas: int) -> tuple[list[Any], list[Any], dict[str, float]]:
    """Return (parameters, states) of every replica before and after `flush`, and the metrics."""
    optimizers, found = build("noloco", NOLOCO, replicas), []
    for number in range(1, 9):
        step(optimizers, number)
    for flush in (False, True):
        if flush:
            optimizers.flush()
        states = optimizers.replicas.run(lambda i: optimizers.methods[i].states())
        found.append(
            [
                (own, {s.kind: {n: t.clone() for n, t in s.tensors.items()} for s in each})
                for own, each in zip(parameters(optimizers), states, strict=True)
            ]
        )
    return found[0], found[1], optimizers.metrics()


def test_a_full_exchange_takes_the_outer_step_with_the_means_over_all_replicas(pool1: Pool) -> None:
    ((before, after, metrics),) = pool1(flushed, 4)
    assert metrics["residual_norm"] == 0.0

    def mean(of: Any, n: str) -> Tensor:
        return torch.stack([of(own, states)[n] for own, states in before]).mean(0)

    for n in SHAPES:
        phi, theta = mean(lambda _, s: s["slow_weights"], n), mean(lambda own, _: own, n)
        delta = 0.5 * mean(lambda _, s: s["slow_momentum"], n) + 0.7 * (theta - phi)
        for own, states in after:
            assert torch.equal(own[n], after[0][0][n]) and torch.equal(own[n], states["slow_weights"][n])
            torch.testing.assert_close(states["slow_momentum"][n], delta, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(own[n], phi + delta, rtol=1e-5, atol=1e-6)


def shown(simulated: int) -> tuple[bool, bool, int]:
    """Return whether the model is the mean of the slow weights inside `shared_weights`, and as before outside; and the
    number of counted exchanges."""
    optimizers = build("noloco", NOLOCO, simulated)
    for number in range(1, 21):
        step(optimizers, number)
    before, means = parameters(optimizers)[0], {}
    for n in SHAPES:
        means[n] = torch.stack([method.anchors()[n].double() for method in optimizers.methods]).mean(0)
        optimizers.collectives.sum_over_replicas(means[n])
        means[n] /= optimizers.collectives.replicas
    with optimizers.shared_weights():
        shown, saved = parameters(optimizers)[0], optimizers.saved_model()
    inside = all(
        torch.allclose(shown[n].double(), means[n], rtol=1e-6) and torch.equal(shown[n], saved[n]) for n in means
    )
    outside = all(torch.equal(before[n], after) for n, after in parameters(optimizers)[0].items())
    calls = sum(n for (_, _, kind), n in optimizers.collectives.ledger.calls.items() if kind == "payload")
    return inside, outside, calls


def test_the_model_is_the_mean_of_the_slow_weights(pool1: Pool, pool2: Pool) -> None:
    """With simulated and with real replicas; evaluating it counts no bytes."""
    assert pool1(shown, 3) == [(True, True, 3)]
    assert pool2(shown, 1) == [(True, True, 3)] * 2


def test_an_averaging_rate_that_diverges_is_refused() -> None:
    """Equation 74 of the paper with groups of two: beyond 2 + alpha^2 the variance of the replicas grows."""
    assert NolocoOptions(outer_momentum=0.5, averaging_rate=2.2).averaging_rate == 2.2
    with pytest.raises(ValueError, match=r"averaging_rate = 2.25; .*below 2 \+ outer_momentum\^2 = 2.25"):
        NolocoOptions(outer_momentum=0.5, averaging_rate=2.25)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_planned_memory_is_that_of_the_states(momentum: float, pool1: Pool) -> None:
    options = NolocoOptions(outer_momentum=momentum, inner_steps=3)
    (history,) = pool1(trained, 1, "noloco", {"outer_momentum": momentum, "inner_steps": 3}, 2)
    model = LocalModel(tuple(SHAPES), tuple(SHAPES.values()))
    kinds = options.held_memory(model, 2)
    assert sum(kinds.values()) == sum(values.nbytes for values in history[0][1][0].values())


def first_step(loads: bool) -> tuple[int, list[str], float]:
    """Return the bytes that the loopback carried in the first step, its log lines, and a weight after it."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(1024, 2048)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = replicate(model, inner, NolocoOptions(inner_steps=3), dist.group.WORLD)
    if loads:
        nn.init.constant_(model.weight, 1.0 + dist.get_rank())
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    dist.barrier()
    before = read_interfaces()
    with logged() as lines:
        optimizer.step()
    dist.barrier()
    after = read_interfaces()
    assert before is not None and after is not None
    return after["node"][0] - before["node"][0], lines, float(model.weight[0, 0])


@pytest.mark.skipif(not COUNTERS.exists(), reason="this system has no /proc/net/dev")
def test_the_first_step_sends_weights_only_if_some_were_loaded(pool3: Pool) -> None:
    """The mean of three equal weights is rounded. Repeated, because other programs may use the loopback meanwhile."""
    quiet = [pool3(first_step, False) for _ in range(2)]
    assert min(rank[0] for run in quiet for rank in run) < 1_000_000  # an all-reduce of the weights has 33,000,000
    assert not any("weights were loaded" in line for run in quiet for rank in run for line in rank[1])
    loaded = pool3(first_step, True)
    assert all(any("weights were loaded after" in line for line in rank[1]) and rank[2] == 1.0 for rank in loaded)

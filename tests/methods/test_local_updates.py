"""Local updates: the base class, and DiLoCo and Streaming DiLoCo compared with their papers."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool
from torchtitan_scape.methods.local_options import FragmentSchedule, StreamingDilocoOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions

SHAPES = {
    "embed": (20, 8),
    "layers.0.weight": (8, 9),
    "layers.1.weight": (9, 8),
    "layers.2.weight": (8, 8),
    "layers.2.bias": (8,),
    "norm": (8,),
}
WITHOUT = "layers.2.bias"  # its gradient is always None
LR, BETAS, EPS, DECAY, MAX_NORM = 0.02, (0.9, 0.95), 1e-8, 0.1, 1.0
DILOCO = {"inner_steps": 6, "outer_lr": 0.7, "outer_momentum": 0.9}
STREAMING = {
    "inner_steps": 6,
    "outer_lr": 0.4,
    "outer_momentum": 0.9,
    "fragments": 3,
    "delay": 2,
    "mix": 0.5,
    "code": "float32",
}
Weights = dict[str, Tensor]


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradient(name: str, value: Tensor, step: int, replica: int) -> Tensor:
    """Return the gradient of a quadratic with a random minimum per replica and step."""
    seed = 1000 * step + 10 * replica + list(SHAPES).index(name)
    return 0.2 * (value + torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)))


# ------------------------------------------------------------------------------------------- the literal form


class Literal:
    """Algorithms of arXiv:2311.08105 and arXiv:2501.18512 for N replicas in one process.

    Inner AdamW on each replica's own gradient, clipped by its own norm; outer SGD with Nesterov momentum as in PyTorch.
    """

    def __init__(
        self,
        replicas: int,
        inner_steps: int,
        outer_lr: float,
        outer_momentum: float,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
    ) -> None:
        self.replicas, self.rounds, self.delay, self.mix = replicas, inner_steps, delay, mix
        self.theta = [start() for _ in range(replicas)]
        self.first = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(replicas)]
        self.second = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(replicas)]
        self.anchor = {n: nn.Parameter(value) for n, value in start().items()}
        self.outer = {
            n: torch.optim.SGD([a], lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
            for n, a in self.anchor.items()
        }
        self.parts: list[list[str]] = [list(SHAPES)]
        if fragments > 1:
            self.parts = [["embed", "norm"]] + [[] for _ in range(fragments - 1)]
            for name in SHAPES:
                if name.startswith("layers."):
                    self.parts[1 + int(name.split(".")[1]) % (fragments - 1)].append(name)
        self.due = [round((p + 1) * inner_steps / fragments) % inner_steps for p in range(fragments)]
        self.sent: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.t = 0

    def step(self) -> None:
        self.t += 1
        for i in range(self.replicas):
            grads = {n: gradient(n, value, self.t, i) for n, value in self.theta[i].items()}
            grads[WITHOUT] = torch.zeros(SHAPES[WITHOUT])
            norm = torch.sqrt(sum(((g**2).sum() for g in grads.values()), torch.zeros(())))
            for n, g in grads.items():
                self.inner(i, n, g * min(1.0, MAX_NORM / (norm.item() + 1e-6)))
        for p, names in enumerate(self.parts):
            if (p, self.t - self.delay) in self.sent:
                self.take(names, self.sent.pop((p, self.t - self.delay)))
            if self.t % self.rounds == self.due[p]:
                moved = {n: sum(self.anchor[n].data - th[n] for th in self.theta) / self.replicas for n in names}
                if self.delay:
                    self.sent[p, self.t] = moved  # type: ignore[assignment]
                else:
                    self.take(names, moved)  # type: ignore[arg-type]

    def take(self, names: list[str], moved: dict[str, Tensor]) -> None:
        for n in names:
            self.anchor[n].grad = moved[n]
            self.outer[n].step()
            for theta in self.theta:
                theta[n] = self.mix * theta[n] + (1 - self.mix) * self.anchor[n].data

    def inner(self, i: int, n: str, g: Tensor) -> None:
        b1, b2 = BETAS
        m = self.first[i][n] = b1 * self.first[i][n] + (1 - b1) * g
        v = self.second[i][n] = b2 * self.second[i][n] + (1 - b2) * g**2
        m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
        self.theta[i][n] = (1 - LR * DECAY) * self.theta[i][n] - LR * m / (v.sqrt() + EPS)


# ------------------------------------------------------------------------------------------------ the product


def build(
    method: str, options: dict[str, Any], simulated: int, inner: str = "AdamW", max_norm: float = MAX_NORM
) -> Any:
    from torchtitan_scape.methods.registry import METHODS
    from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
    from torchtitan_scape.optimizers.muon import Muon
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer
    from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
    from torchtitan_scape.topology.in_process import SimulatedReplicas

    class Model(nn.Module):
        def named_parameters(self, *args: Any, **more: Any) -> Any:
            yield from weights.items()

    weights, entry = {n: nn.Parameter(value) for n, value in start().items()}, METHODS[method]
    model = Model()
    for n, weight in weights.items():
        model.register_parameter(n.replace(".", "_"), weight)
    made: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": partial(torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False),
        "AdamS": partial(AdamS, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
        "SGD": partial(torch.optim.SGD, lr=LR),
        "SignSGD": partial(SignSGD, lr=LR, weight_decay=DECAY),
        "Muon": partial(Muon, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
    }
    replicas = SimulatedReplicas(simulated) if simulated > 1 else OneReplica(_group(ReplicaCollectives))
    return ReplicaOptimizer(
        made[inner],
        entry.options(**options),
        replicas,
        model=model,
        max_norm=max_norm,
        reduction="sum",
        total_steps=100,
        max_skipped_steps=5,
    )


def _group(endpoint: Any) -> Any:
    return endpoint(dist.group.WORLD if dist.get_world_size() > 1 else None)


def step(optimizers: Any, number: int, nan: bool = False) -> None:
    """Run one training step, optionally with a NaN in the last replica's gradient."""
    endpoints = optimizers.replicas.endpoints
    for endpoint in endpoints:
        for shard in optimizers.shards():
            if shard.name != WITHOUT:
                value = shard.parameter.detach()
                shard.parameter.grad = gradient(shard.name, value, number, endpoint.replica) / endpoint.replicas
                if nan and endpoint.replica == endpoint.replicas - 1:
                    shard.parameter.grad.view(-1)[0] = torch.nan
        optimizers.stash_replica_gradients()
    optimizers.step()
    for shard in optimizers.shards():
        shard.parameter.grad = None


def parameters(optimizers: Any) -> list[dict[str, Tensor]]:
    """Return the parameters of every replica of this process."""
    each = [one.shards for one in optimizers.weights] if optimizers.weights else [optimizers.shards()]
    return [{shard.name: shard.parameter.detach().clone() for shard in shards} for shards in each]


def kept(optimizers: Any) -> list[dict[str, Tensor]]:
    """Return copies of the method's states of every replica."""
    each = optimizers.replicas.run(lambda i: optimizers.methods[i].states())
    return [{f"{s.kind}.{n}": t.clone() for s in states for n, t in s.tensors.items()} for states in each]


def trained(steps: int, *args: Any, nan_at: int = 0, **more: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return (parameters, states) of every replica of this process after every step."""
    optimizers, found = build(*args, **more), []
    for number in range(1, steps + 1):
        step(optimizers, number, nan=number == nan_at)
        found.append((parameters(optimizers), kept(optimizers)))
    return found


def final(*args: Any, **more: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the last entry of `trained` alone: sending all tensors to the test takes longer than the steps."""
    return trained(*args, **more)[-1:]


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the relative L2 difference of a and b."""
    difference = sum((a[n] - b[n]).double().square().sum() for n in b)
    return float((difference / sum(b[n].double().square().sum() for n in a)) ** 0.5)  # type: ignore[union-attr]


def compared(
    literal_of: Callable[[int], Any], method: str, options: dict[str, Any], pool1: Pool, pool2: Pool, simulated: int = 3
) -> Iterator[tuple[Any, int, dict[str, Weights]]]:
    """Compare the parameters of 27 steps with those of a literal form, with simulated replicas and with two gloo ranks.

    Yield the literal form, the number of a replica, and its states by kind.
    """
    for pool, in_process in ((pool1, simulated), (pool2, 1)):
        ranks = [run[-1] for run in pool(final, 27, method, options, in_process)]
        replicas = [each for own, states in ranks for each in zip(own, states, strict=True)]
        literal = literal_of(len(replicas))
        for _ in range(27):
            literal.step()
        for i, (own, states) in enumerate(replicas):
            assert far(own, literal.theta[i]) < 1e-6
            by_kind: dict[str, Weights] = {}
            for key, value in states.items():
                kind, _, name = key.partition(".")
                by_kind.setdefault(kind, {})[name] = value
            yield literal, i, by_kind


@pytest.mark.parametrize("method, options", [("diloco", DILOCO), ("streaming_diloco", STREAMING)])
def test_equals_the_reference_algorithm(method: str, options: dict[str, Any], pool1: Pool, pool2: Pool) -> None:
    def literal_of(replicas: int) -> Literal:
        return Literal(replicas, **{key: value for key, value in options.items() if key != "code"})

    for literal, _, states in compared(literal_of, method, options, pool1, pool2):
        assert far(states["anchor"], {n: a.data for n, a in literal.anchor.items()}) < 1e-6


@pytest.mark.parametrize("inner", ["AdamW", "AdamS"])
def test_a_single_replica_follows_its_inner_optimizer(inner: str, pool1: Pool) -> None:
    plain = {"inner_steps": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
    (alone,) = pool1(trained, 12, "dense", {}, 1, inner=inner)
    for method, more in (
        ("diloco", {}),
        ("streaming_diloco", {"fragments": 2, "delay": 0, "mix": 0.5, "code": "float32"}),
    ):
        (local,) = pool1(trained, 12, method, plain | more, 1, inner=inner)
        assert far(local[-1][0][0], alone[-1][0][0]) < 1e-6


def test_a_delay_only_delays_the_use_of_the_result(pool1: Pool) -> None:
    """The anchor takes bitwise the same step, `delay` steps later."""
    (late,) = pool1(trained, 9, "streaming_diloco", STREAMING | {"delay": 3, "fragments": 1}, 2)
    (now,) = pool1(trained, 9, "streaming_diloco", STREAMING | {"delay": 0, "fragments": 1}, 2)
    for n in SHAPES:
        anchors = [[states[0][f"anchor.{n}"] for _, states in run] for run in (now, late)]
        begin, moved = anchors[0][0], anchors[0][5]
        assert all(torch.equal(a, begin) for a in (*anchors[0][:5], *anchors[1][:8]))
        assert not torch.equal(moved, begin) and torch.equal(anchors[1][8], moved)


def test_a_skipped_step_starts_and_applies_no_exchange(pool1: Pool) -> None:
    """A fragment that was due is exchanged in the next round; a result that was due is applied in the next step."""
    options = STREAMING | {"fragments": 1, "delay": 1}
    for nan_at, moves in (
        (6, [13]),
        (7, [8, 13]),
    ):  # the step of the start, and the step of the result
        (history,) = pool1(trained, 14, "streaming_diloco", options, 2, nan_at=nan_at)
        before, after = history[nan_at - 2], history[nan_at - 1]
        for a, b in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        anchors = [states[0]["anchor.embed"] for _, states in history]
        assert [i + 2 for i in range(13) if not torch.equal(anchors[i], anchors[i + 1])] == moves
        assert all(t.isfinite().all() for own in history[-1][0] for t in own.values())


def test_a_result_delayed_beyond_the_next_exchange_is_applied_with_it(pool1: Pool) -> None:
    """A checkpoint contains the exchange in flight; its start follows from the step number."""
    options = STREAMING | {"fragments": 1, "inner_steps": 3, "delay": 3}
    (history,) = pool1(trained, 10, "streaming_diloco", options, 2, nan_at=6)
    anchors = [states[0]["anchor.embed"] for _, states in history]
    assert [i + 2 for i in range(9) if not torch.equal(anchors[i], anchors[i + 1])] == [9]


def kept_after_a_skip() -> list[bool]:
    """Return whether quantization errors are stored if a checkpoint reads an exchange after a skipped step."""
    StreamingDilocoOptions.averaging = lambda self: QuantizedOptions()  # type: ignore[method-assign]
    optimizers = build("streaming_diloco", STREAMING | {"fragments": 1, "code": "e2m1"}, 2)
    for number in range(1, 8):
        step(optimizers, number, nan=number == 7)
    return [bool(states["residual.embed"].any()) for states in kept(optimizers)]


def test_an_exchange_uses_the_flag_of_its_own_step(pool1: Pool) -> None:
    """The flag of a step is a tensor that the next step overwrites."""
    assert pool1(kept_after_a_skip) == [[True, True]]


def flushed(method: str, options: dict[str, Any]) -> list[Any]:
    """Return states and residual norm by step, for a full exchange that was requested in a skipped step."""
    optimizers, found = build(method, options, 2), []
    for number in range(1, 9):
        if number == 7:
            optimizers.request_full_exchange()
        step(optimizers, number, nan=number == 7)
        found.append((kept(optimizers)[0], optimizers.metrics()["residual_norm"]))
    return found


def test_a_full_exchange_makes_replicas_equal(pool1: Pool) -> None:
    (history,) = pool1(flushed, "streaming_diloco", STREAMING)
    assert history[5][1] > 0 and history[6][1] == history[5][1] and history[7][1] == 0.0
    assert any(key.startswith("in_flight") for key in history[6][0])
    assert not any(key.startswith("in_flight") for key in history[7][0])


def flushed_alone(method: str, options: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """Return all values before and after `flush`, and whether the inner optimizers are unchanged."""
    optimizers, found = build(method, options, 2), []
    for number in range(1, 9):
        step(optimizers, number)
    before = [copy.deepcopy(one.optimizer.state_dict()) for one in optimizers.weights]
    for flush in (False, True):
        if flush:
            version = optimizers.sharding.version.now()
            optimizers.flush()
            assert optimizers.sharding.version.now() != version  # of weights
        found.append([*parameters(optimizers), *kept(optimizers)])
    after = [one.optimizer.state_dict() for one in optimizers.weights]
    moments = [[s[kind] for s in one["state"].values() for kind in s] for each in (before, after) for one in each]
    same = all(torch.equal(a, b) for i in (0, 1) for a, b in zip(moments[i], moments[i + 2], strict=True))
    return found[0], found[1], same


@pytest.mark.parametrize(
    "method, options", [("diloco", DILOCO), ("streaming_diloco", STREAMING), ("sparta", {"interval": 4})]
)
def test_flush_exchanges_without_an_optimizer_step(method: str, options: dict[str, Any], pool1: Pool) -> None:
    ((before, after, same),) = pool1(flushed_alone, method, options)
    assert same
    for n in SHAPES:
        assert torch.equal(after[0][n], after[1][n]) and torch.equal(after[0][n], after[2][f"anchor.{n}"])
        if method == "diloco":
            mean = before[2][f"anchor.{n}"] - (before[0][n] + before[1][n]) / 2
            velocity = 0.9 * before[2][f"outer_momentum.{n}"] + mean
            wanted = before[2][f"anchor.{n}"] - 0.7 * (mean + 0.9 * velocity)
            torch.testing.assert_close(after[0][n], wanted, rtol=1e-6, atol=1e-6)
    assert not any(key.startswith("in_flight") for key in after[2])


@pytest.mark.slow
def test_states_in_host_memory_have_the_same_bits(pool1: Pool) -> None:
    plain, host = (pool1(trained, 12, "streaming_diloco", STREAMING | {"host": on}, 2)[0][-1] for on in (False, True))
    for a, b in zip([*plain[0], *plain[1]], [*host[0], *host[1]], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def with_a_flipped_bit() -> list[str]:
    """Return the results of the consistency check while parameters differ, and after an anchor differs."""
    from torchtitan_scape.core.consistency import ReplicasDifferError

    optimizers, said = build("diloco", DILOCO, 1), []
    for number in (1, 2):
        step(optimizers, number)
        try:
            optimizers.check_consistency(number)
            said.append("equal")
        except ReplicasDifferError as error:
            said.append(str(error))
        if dist.get_rank() == 1:
            optimizers.saved_model()["embed"].view(-1)[3] += 1e-6
    return said


def test_the_consistency_check_compares_anchors(pool2: Pool) -> None:
    for first, second in pool2(with_a_flipped_bit):
        assert first == "equal" and "anchor of 'embed'" in second


def shown(simulated: int) -> tuple[bool, bool, bool]:
    """Return whether the model has the anchor inside, its own weights outside, and the schedule's learning rate."""
    optimizers = build("diloco", DILOCO, simulated)
    for number in range(1, 9):
        optimizers.inner.param_groups[0]["lr"] = 0.01 / number
        step(optimizers, number)
    before, anchors = parameters(optimizers)[0], optimizers.saved_model()
    with optimizers.shared_weights():
        inside = all(torch.equal(parameters(optimizers)[0][n], anchors[n]) for n in anchors)
    outside = parameters(optimizers)[0]
    rates = {one.optimizer.param_groups[0]["lr"] for one in optimizers.weights}
    return inside, all(torch.equal(before[n], outside[n]) for n in before), rates == {0.01 / 8}


def test_shared_weights_puts_the_anchor_into_the_model(pool1: Pool) -> None:
    for simulated in (1, 3):
        assert pool1(shown, simulated) == [(True, True, True)]


def test_states_exist_before_the_first_step() -> None:
    """Also if a step of length 0 would compute 0 / 0."""
    from torchtitan_scape.core.parameters import collect_shards
    from torchtitan_scape.replica.simulation import ReplicaWeights

    optimizer = torch.optim.AdamW([("p", nn.Parameter(torch.ones(3)))], lr=LR, eps=0.0)
    one = ReplicaWeights.of(collect_shards(optimizer.param_groups), optimizer)
    assert torch.equal(one.shards[0].parameter.detach(), torch.ones(3)) and one.shards[0].parameter.grad is None
    assert [float(n) for n in one.steps()] == [0.0] and not any(m["p"].any() for m in one.moments.values())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (LR, 0.0)


def test_every_entry_is_due_once_per_round() -> None:
    for inner_steps in (1, 2, 5, 30, 100):
        for fragments in (1, 2, 3, 5, 8):
            schedule = FragmentSchedule(inner_steps, fragments)
            for p in range(fragments):
                for begin in (1, 4):
                    steps = range(begin, begin + inner_steps)
                    due = [t for t in steps if schedule.is_due(p, t)]
                    assert (
                        len(due) == 1 and due[0] % inner_steps == round((p + 1) * inner_steps / fragments) % inner_steps
                    )
                    assert schedule.last_due(p, begin + inner_steps - 1) == due[0]
    schedule = FragmentSchedule(30, 4)
    names = ["tok_embeddings.weight", "layers.0.wq.weight", "layers.2.wq.weight", "layers.3.wq.weight", "norm.weight"]
    assert [schedule.fragment_of(name) for name in names] == [0, 1, 3, 1, 0]

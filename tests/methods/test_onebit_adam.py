"""1-bit Adam compared with the paper's algorithm in FP64, its schedules, and its migration rules."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.replicas import run_replicas
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.onebit_adam.method import OnebitAdam
from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.partition import chunks_of

# The last parameter is shorter than a block. One row of the first has no gradient until the variance is frozen.
SHAPES = [(9, 32), (64,), (3, 32), (20,)]
BLOCK, STEPS, WARMUP = 32, 14, 6
LR, BETA1, BETA2, EPS, DECAY, MAX_NORM = 1e-2, 0.9, 0.99, 1e-8, 0.1, 6.0
SEED = 200_000  # with it no scale lies at a border of BF16, where FP32 and FP64 may round it differently
SILENT = slice(64, 96)  # entries of the first parameter


def gradients(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED + 1000 * step + replica)
    found = [torch.randn(prod(shape), generator=generator) + 0.3 * replica for shape in SHAPES]
    if step <= WARMUP:
        found[0][SILENT] = 0.0
    return found


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(
    collectives: ReplicaCollectives, scale: float = 1.0, others: dict[str, Any] | None = None, **options: Any
) -> OnebitAdam:
    """others: Settings of the last two parameters, as a group of their own."""
    collectives.chunk_entries = 128
    named = [(f"p{i}", nn.Parameter(values)) for i, values in enumerate(start())]
    rates: dict[str, Any] = dict(lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    optimizer = torch.optim.AdamW(named if others is None else named[:2], **rates)
    if others is not None:
        optimizer.add_param_group({"params": named[2:], **others})
    shards = collect_shards(optimizer.param_groups)
    context = MethodContext(shards, collectives, optimizer, scale, max_norm=MAX_NORM)
    return OnebitAdam(context, OnebitAdamOptions(**({"warmup_steps": WARMUP, "block": BLOCK} | options)))


def descend(
    collectives: ReplicaCollectives, nan_at: int = 0, scale: float = 1.0, **options: Any
) -> dict[str, list[np.ndarray]]:
    """Return parameters, moments and errors after all steps, flat, and the norms of the steps."""
    method, norms = make(collectives, scale, **options), []
    for number in range(1, STEPS + 1):
        own = [g / scale for g in gradients(number, collectives.replica)]
        with torch.no_grad():
            method.step(own, StepInfo(number, torch.tensor(number != nan_at)))
        norms.append(method.context.grad_norm.double().numpy().copy())
    shards = method.context.shards
    moments = [method.context.optimizer.state[shard.parameter] for shard in shards]
    found = {kind: [m[kind].view(-1).numpy().copy() for m in moments] for kind in ("exp_avg", "exp_avg_sq")}
    found["parameters"] = [s.parameter.detach().view(-1).numpy().copy() for s in shards]
    found["updates"] = [np.asarray(m["step"]) for m in moments]
    found["norms"] = norms
    for state in method.states():
        found[state.kind] = [t.view(-1).numpy().copy() for t in state.tensors.values()]
    return found


# ---------------------------------------------------------------------------------------- written down once more


def one_bit(x: np.ndarray) -> np.ndarray:
    """C of the paper: signs times one scale, here the mean magnitude of a block in BF16; short blocks are repeated."""
    scale = torch.tensor(np.abs(np.resize(x, BLOCK)).mean()).bfloat16().double().item()
    return np.where(x < 0, -scale, scale)


def owned_blocks(replicas: int) -> list[tuple[int, slice, int]]:
    """Return (parameter, its entries, their owner) of every block."""
    found = []
    for chunk in chunks_of([prod(shape) for shape in SHAPES], 128, BLOCK):
        blocks = [
            (s.tensor, a, s.first + s.length) for s in chunk.slices for a in range(s.first, s.first + s.length, BLOCK)
        ]
        each = -(-len(blocks) // replicas)
        found += [(i, slice(a, min(a + BLOCK, end)), n // each) for n, (i, a, end) in enumerate(blocks)]
    return found


def literal(replicas: int) -> dict[str, Any]:
    """Algorithm 1 in FP64 with AdamW's bias corrections.

    Messages and errors are divided by 1 - beta1, because BF16 rounds scales in these units.
    """
    x = [values.double().view(-1).numpy().copy() for values in start()]
    m, v = ([np.zeros(prod(shape)) for shape in SHAPES] for _ in range(2))
    delta = [[np.zeros_like(each) for each in x] for _ in range(replicas)]  # of the workers
    delta_bar = [np.zeros_like(each) for each in x]  # of the servers
    for t in range(1, STEPS + 1):
        g = [[each.double().numpy() for each in gradients(t, r)] for r in range(replicas)]
        counted = min(t, WARMUP)  # updates of the variance, with the mean of the gradients
        if t <= WARMUP:
            mean = [np.mean([own[i] for own in g], 0) for i in range(len(x))]
            norm = np.sqrt(sum((each**2).sum() for each in mean))
            for i, each in enumerate(mean):
                each = each * min(1.0, MAX_NORM / (norm + 1e-6))
                m[i] = BETA1 * m[i] + (1 - BETA1) * each
                v[i] = BETA2 * v[i] + (1 - BETA2) * each**2
                quotient = m[i] / (1 - BETA1**t) / (np.sqrt(v[i] / (1 - BETA2**counted)) + EPS)
                x[i] = x[i] * (1 - LR * DECAY) - LR * quotient
            continue
        for own in g:
            norm = np.sqrt(sum((each**2).sum() for each in own))
            for each in own:
                each *= min(1.0, MAX_NORM / (norm + 1e-6))
        for i, entries, _ in owned_blocks(replicas):
            sent = []
            for own, error in zip(g, delta, strict=True):
                m_i = BETA1 / (1 - BETA1) * m[i][entries] + own[i][entries] + error[i][entries]
                sent.append(one_bit(m_i))
                error[i][entries] = m_i - sent[-1]
            mean = np.mean(sent, 0) + delta_bar[i][entries]
            delta_bar[i][entries] = mean - one_bit(mean)
            m[i][entries] = (1 - BETA1) * one_bit(mean)
        for i in range(len(x)):
            frozen = v[i] / (1 - BETA2**counted)
            quotient = np.where(frozen > 0, m[i] / (1 - BETA1**t) / (np.sqrt(frozen) + EPS), 0.0)
            x[i] = x[i] * (1 - LR * DECAY) - LR * quotient
    return {"parameters": x, "exp_avg": m, "exp_avg_sq": v, "delta": delta, "delta_bar": delta_bar}


def near(found: list[np.ndarray], expected: list[np.ndarray], others: float = 0.0) -> bool:
    """Return whether at most this share of the entries differs by more than rounding."""
    one, other = np.concatenate(found), np.concatenate(expected)
    return bool(np.mean(np.abs(one - other) > 1e-4 * np.sqrt(np.mean(other**2))) <= others)


@pytest.mark.parametrize("replicas", [2, 4])
def test_equals_the_paper(replicas: int) -> None:
    """Including the errors of workers and servers, apart from entries near zero: rounding decides on their signs."""
    expected = literal(replicas)
    ranks = run_replicas(replicas, descend)
    for rank, found in enumerate(ranks):
        for kind in ("parameters", "exp_avg", "exp_avg_sq"):
            assert near(found[kind], expected[kind]), kind
            assert all(np.array_equal(a, b) for a, b in zip(found[kind], ranks[0][kind], strict=True))
        assert near(found["residual"], expected["delta"][rank], 0.01)
        assert all(each == WARMUP for each in found["updates"])
    owners = [np.sum([found["owner_error"][i] for found in ranks], 0) for i in range(len(SHAPES))]
    assert near([each / replicas for each in owners], expected["delta_bar"], 0.01)


def test_a_skipped_step_changes_nothing() -> None:
    """In the warm-up and after it: every replica and its moments."""

    def work(collectives: ReplicaCollectives) -> None:
        method = make(collectives)
        for number in range(1, STEPS + 1):
            before = everything(method)
            own = gradients(number, collectives.replica)
            if number in (4, 5, 9) and collectives.replica == 1:
                own[0][3] = torch.nan
            with torch.no_grad():
                method.step(own, StepInfo(number, torch.tensor(number not in (4, 5, 9))))
            after = everything(method)
            equal = all(torch.equal(values, after[key]) for key, values in before.items())
            assert equal == (number in (4, 5, 9)) and all(t.isfinite().all() for t in after.values()), number

    run_replicas(2, work)


def everything(method: OnebitAdam) -> dict[str, Tensor]:
    found = {f"{s.kind}.{name}": t.clone() for s in method.states() for name, t in s.tensors.items()}
    for shard in method.context.shards:
        found[shard.name] = shard.parameter.detach().clone()
        found |= {
            f"{key}.{shard.name}": t.clone() for key, t in method.context.optimizer.state[shard.parameter].items()
        }
    return found


def test_a_loss_divided_by_the_global_batch_gives_the_same_steps() -> None:
    """Gradients are then N times smaller, and are clipped by the norm of the N times larger ones."""
    one, other = (run_replicas(2, lambda c, scale=scale: descend(c, scale=scale)) for scale in (1.0, 2.0))
    for a, b in zip(one, other, strict=True):
        assert all(np.array_equal(x, y) for key in a for x, y in zip(a[key], b[key], strict=True))


def test_replicas_clip_by_their_own_norms_after_the_warm_up() -> None:
    ranks = run_replicas(2, lambda collectives: descend(collectives))
    for number in range(1, STEPS + 1):
        own = [torch.cat(gradients(number, replica)).norm().item() for replica in range(2)]
        mean = torch.stack([torch.cat(gradients(number, replica)) for replica in range(2)]).mean(0).norm().item()
        expected = own if number > WARMUP else [mean, mean]
        assert [float(found["norms"][number - 1]) for found in ranks] == pytest.approx(expected, rel=1e-5), number


@pytest.mark.parametrize(("before", "warmup"), [(0, WARMUP), (20, 1)])
def test_steps_of_a_constant_gradient_have_the_length_of_the_learning_rate(before: int, warmup: int) -> None:
    """In the warm-up and after it, also if AdamW had made steps before; the momentum has more updates than the
    variance.
    """
    constant = [0.1 * torch.sign(gradient) for gradient in gradients(WARMUP + 1, 0)]  # not clipped

    def work(collectives: ReplicaCollectives) -> None:
        method = make(collectives, code="int8", warmup_steps=warmup)
        for group in method.context.optimizer.param_groups:
            group["weight_decay"] = 0.0
        for _ in range(before):
            for shard, gradient in zip(method.context.shards, constant, strict=True):
                shard.parameter.grad = gradient.view(shard.local_shape).clone()
            method.context.optimizer.step()
        for number in range(1, STEPS + 1):
            start = [shard.parameter.detach().clone() for shard in method.context.shards]
            with torch.no_grad():
                method.step([each.clone() for each in constant], StepInfo(number, torch.tensor(True)))
            for shard, old in zip(method.context.shards, start, strict=True):
                length = (shard.parameter.detach() - old).abs() / LR
                torch.testing.assert_close(length, torch.ones_like(length), rtol=0.01, atol=0)
            assert all(group["lr"] == LR for group in method.context.optimizer.param_groups)

    run_replicas(2, work)


class Recorder:
    """An observer that keeps what it is given."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.seen = names, dict[str, Tensor]()

    def synchronized(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        self.seen = {name: gradient(name).clone() for name in self.names}


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_group_has_its_own_momentum(replicas: int) -> None:
    """The new momentum is that of the gradient that an observer receives; of a single replica, its own gradient."""

    def work(collectives: ReplicaCollectives) -> None:
        method = make(collectives, 2.0, {"lr": 3e-3, "betas": (0.7, 0.98), "weight_decay": 0.0})
        shards = method.context.shards
        method.observer = recorder = Recorder([shard.name for shard in shards])
        for number in range(1, STEPS + 1):
            own = [g / 1000 for g in gradients(number, collectives.replica)]  # not clipped
            state = method.context.optimizer.state
            before = [state[s.parameter]["exp_avg"].clone() for s in shards] if number > 1 else []
            with torch.no_grad():
                method.step([g.clone() for g in own], StepInfo(number, torch.tensor(True)))
            for shard, m, g in zip(shards, before, own, strict=False):
                beta1 = 0.9 if shard.group == 0 else 0.7
                seen = recorder.seen[shard.name]
                new = beta1 * m.view(-1) + (1 - beta1) * seen
                torch.testing.assert_close(state[shard.parameter]["exp_avg"].view(-1), new, rtol=1e-5, atol=1e-8)
                assert replicas > 1 or torch.allclose(seen, 2.0 * g, rtol=1e-4, atol=1e-8)

    run_replicas(replicas, work)


# --------------------------------------------------------------------------------------------------- schedules


def test_the_default_warm_up_is_a_share_of_the_run() -> None:
    assert OnebitAdamOptions().last_update(980) == 147 and OnebitAdamOptions().last_update(1) == 1
    assert OnebitAdamOptions(warmup_steps=7).last_update(0) == 7
    with pytest.raises(ValueError, match=r"warmup_steps = -1; the steps of the run are unknown: set it to 1 or more"):
        OnebitAdamOptions().last_update(0)

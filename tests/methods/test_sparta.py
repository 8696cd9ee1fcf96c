"""SPARTA: schedule of block groups, means, and quantization errors, compared with a reference algorithm."""

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.marks import covering, slow
from tests.methods.test_local_updates import SHAPES, Literal, compared, far
from tests.pool import Pool
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.sparta.method import Sparta
from torchtitan_scape.methods.sparta.options import BLOCK, SpartaOptions, count_blocks, slices_of_group
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.in_process import SimulatedReplicas, collectives_of
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

# More than a block, short last ones, less than a block, nothing.
PARTS = [(5 * BLOCK, 1), (BLOCK + 5, 3), (4, 5), (0, 4), (200,), (9, BLOCK + 1)]


def is_due(shapes: Sequence[tuple[int, ...]], step: int, interval: int) -> list[Tensor]:
    """Return for every tensor, by entry, whether it is averaged in a step."""
    begin, found = 0, []
    for shape in shapes:
        blocks = begin + torch.arange(math.prod(shape)) // BLOCK
        found.append((blocks % interval == step % interval).view(shape))
        begin += -(-math.prod(shape) // BLOCK)
    return found


class LiteralSparta(Literal):
    """Algorithm 1 of the paper in FP32, with cyclic parts. Averaging parameters equals averaging displacements."""

    def __init__(self, replicas: int, interval: int) -> None:
        super().__init__(replicas, inner_steps=10**9, outer_lr=1.0, outer_momentum=0.0)
        self.interval = interval

    def step(self) -> None:
        super().step()
        now = is_due(list(SHAPES.values()), self.t, self.interval)
        for n, turn in zip(SHAPES, now, strict=True):
            mean = torch.stack([theta[n] for theta in self.theta]).mean(0)
            for theta in (*(theta[n] for theta in self.theta), self.anchor[n].data):
                theta.copy_(torch.where(turn, mean, theta))


def test_equals_the_reference_algorithm(pool1: Pool, pool2: Pool) -> None:
    options = {"interval": 3, "code": "float32", "warmup_steps": 0}
    for literal, _, states in compared(partial(LiteralSparta, interval=3), "sparta", options, pool1, pool2):
        assert far(states["anchor"], {n: a.data for n, a in literal.anchor.items()}) < 1e-6


class Alone:
    """Simulated replicas with given parameters."""

    def __init__(self, replicas: int, chunk: int = 1 << 22, steps: int = 0, **options: Any) -> None:
        self.replicas = SimulatedReplicas(replicas)
        self.parameters = [[nn.Parameter(torch.zeros(shape)) for shape in PARTS] for _ in range(replicas)]
        self.methods = []
        for endpoint, own in zip(self.replicas.endpoints, self.parameters, strict=True):
            endpoint.chunk_entries = chunk
            optimizer = torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(own)])
            setting = MethodContext(collect_shards(optimizer.param_groups), endpoint, optimizer, total_steps=steps)
            self.methods.append(Sparta(setting, SpartaOptions(**{"warmup_steps": 0} | options)))

    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for own in self.parameters:
            for p in own:
                p.data += torch.randn(p.shape, generator=generator)

    def step(self, number: int, applied: bool = True) -> None:
        step = StepInfo(number, torch.tensor(applied))
        self.replicas.run(lambda i: self.methods[i].exchange(step))

    def of(self, i: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the anchor and the parameters of a replica."""
        anchor = self.methods[i].states()[0]
        return [t.clone() for t in anchor.tensors.values()], [p.detach().clone() for p in self.parameters[i]]

    def corrected(self, i: int) -> list[Tensor]:
        """Return the parameters of a replica minus its owner error."""
        parameters = [p.detach().clone() for p in self.parameters[i]]
        for state in self.methods[i].states()[1:]:
            for p, owner_error in zip(parameters, state.tensors.values(), strict=True):
                p -= owner_error
        return parameters


@pytest.mark.parametrize("chunk", [1 << 22, 2 * BLOCK])
@pytest.mark.parametrize("interval", [1, 4])
def test_every_entry_is_averaged_once_per_round(interval: int, chunk: int) -> None:
    """No other entry changes, and chunks do not matter."""
    alone = Alone(3, chunk, interval=interval, code="float32")
    for number in range(1, interval + 1):
        alone.move(number)
        before = [alone.of(i) for i in range(3)]
        alone.step(number)
        for i in range(3):
            anchors, thetas = alone.of(i)
            for k, now in enumerate(is_due(PARTS, number, interval)):
                mean = sum(own[1][k] for own in before) / 3
                torch.testing.assert_close(thetas[k][now], mean[now], rtol=1e-6, atol=1e-6)  # type: ignore[index]
                assert torch.equal(anchors[k][now], thetas[k][now])
                for after, then in ((anchors[k], before[i][0][k]), (thetas[k], before[i][1][k])):
                    assert torch.equal(after[~now], then[~now])


CHUNKS = [(3, 1 << 22), (5, 1 << 22), (6, 2 * BLOCK)]


@pytest.mark.parametrize(
    "code, replicas, chunk",
    covering((code, *case) for code, case in product(("2bit", "1bit", "1bit_unbiased", "e2m1", "int8"), CHUNKS)),
)
def test_quantization_errors_stay_in_the_replicas_parameters(code: str, replicas: int, chunk: int) -> None:
    """An encoded exchange preserves the mean of the parameters minus the owners' errors; anchors are bitwise equal.

    During the warm-up slices have other owners.
    """
    alone, count = Alone(replicas, chunk, interval=4, code=code, warmup_steps=6), range(replicas)
    for number in range(1, 18):
        alone.move(number)
        before, corrected_before = [alone.of(i) for i in count], [alone.corrected(i) for i in count]
        alone.step(number)
        after, corrected = [alone.of(i) for i in count], [alone.corrected(i) for i in count]
        block_groups = {group % 4 for group in alone.methods[0].block_groups(number)}
        for k in range(len(PARTS)):
            now = torch.stack([is_due(PARTS, group, 4)[k] for group in block_groups]).any(0)
            means = [sum(own[k] for own in each) / replicas for each in (corrected_before, corrected)]
            torch.testing.assert_close(means[1], means[0], rtol=1e-5, atol=1e-5)
            assert all(torch.equal(own[0][k], after[0][0][k]) for own in after[1:])
            for (anchor, theta), (then, moved) in zip(after, before, strict=True):
                assert torch.equal(anchor[k][~now], then[k][~now]) and torch.equal(theta[k][~now], moved[k][~now])
                assert not now.any() or not torch.equal(anchor[k][now], then[k][now])
    # Pending updates do not grow: even one bit per entry sends as much as is added.
    assert all((a - t).abs().max() < 12 for a, t in zip(*alone.of(0), strict=True) if a.numel())


def test_no_replica_is_far_from_the_mean() -> None:
    """With many replicas, during and after the warm-up: N times the owner's error is a separate state."""
    alone, count, far_off = Alone(16, interval=3, warmup_steps=30), range(16), {1: 0.0, 2: 0.0}
    for number in range(1, 46):
        alone.move(number)
        alone.step(number)
        block_groups = len(alone.methods[0].block_groups(number))
        if block_groups == 3 or number % 2:
            continue
        corrected, own = [alone.corrected(i) for i in count], [alone.of(i)[1] for i in count]
        for k in (k for k, t in enumerate(own[0]) if t.numel()):
            mean = sum(each[k] for each in corrected) / 16
            far_off[block_groups] = max(far_off[block_groups], *((each[k] - mean).abs().max().item() for each in own))
    # Three steps of N(0, 1) and their quantization errors; an owner's errors count 16 times.
    assert far_off[2] < 10.0 and far_off[1] < 15.0


def over_two_nodes() -> list[tuple[list[Tensor], ...]]:
    """Run one of four replicas on two nodes; return its tensors before and after every step.

    They are the anchors, the parameters before and after the exchange, and the latter minus the owner's errors.
    """
    layout = plan_layout(4, ranks_per_node=2, machine=get_machine("frontier"), replicate=4, shard=1)
    collectives = collectives_of(build_groups(layout, timedelta(seconds=60), True))
    own = [nn.Parameter(torch.zeros(shape)) for shape in PARTS]
    optimizer = torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(own)])
    setting = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
    method, found = Sparta(setting, SpartaOptions(code="1bit_unbiased", warmup_steps=4)), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(1, 14):
        for p in own:
            p.data += torch.randn(p.shape, generator=generator)
        before = [p.detach().clone() for p in own]
        method.exchange(StepInfo(number, torch.tensor(number != 7)))
        anchor, owner_error = (state.tensors.values() for state in method.states())
        kept = [p.detach().clone() for p in own]
        found.append(
            ([a.clone() for a in anchor], before, kept, [p - o for p, o in zip(kept, owner_error, strict=True)])
        )
    return found


def test_the_error_of_a_nodes_sum_is_a_separate_state(pool4: Pool) -> None:
    """It belongs to the sum over a node, so that no single replica may apply it. The mean is preserved."""
    owner_error = [torch.zeros(shape) for shape in PARTS]
    for number, steps in enumerate(zip(*pool4(over_two_nodes), strict=True), 1):
        for k in range(len(PARTS)):
            anchors, befores, thetas, corrected = ([each[kind][k] for each in steps] for kind in range(4))
            assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
            torch.testing.assert_close(sum(corrected), sum(befores) - owner_error[k], rtol=1e-5, atol=1e-5)
            owner_error[k] = sum(thetas) - sum(corrected)
            now = thetas[0] != befores[0]
            assert number != 7 or not now.any()
            for anchor, theta in zip(anchors, thetas, strict=True):
                assert torch.equal(theta[now], anchor[now])
    assert any(each.any() for each in owner_error)


def test_the_default_code_and_the_owners_error_depend_on_the_number_of_replicas() -> None:
    default, unbiased = SpartaOptions(), SpartaOptions(code="1bit_unbiased")
    assert [default.encoding(n) for n in (1, 4, 5)] == ["1bit", "1bit", "1bit_unbiased"]
    assert [default.keeps_owner_error(n) for n in (1, 4, 5)] == [False, False, True]
    assert [unbiased.keeps_owner_error(n) for n in (1, 2)] == [False, True]
    assert not SpartaOptions(code="float32").keeps_owner_error(16)


@pytest.mark.parametrize("code", ["1bit", "2bit"])
def test_padding_does_not_change_the_means_of_a_block(code: str) -> None:
    """A code with a block's mean magnitude is exact for equal magnitudes, also for tensors smaller than a block."""
    alone = Alone(2, interval=1, code=code)
    for own in alone.parameters:
        for p in own:
            p.data = torch.where(torch.arange(p.numel()).view(p.shape) % 3 == 0, 0.5, -0.5)
    before = alone.of(0)[1]
    alone.step(1)
    for anchor, theta, then in zip(*alone.of(0), before, strict=True):
        assert torch.equal(theta, then) and torch.equal(anchor, then)


@pytest.mark.parametrize("replicas", [2, slow(3), 5, slow(8)])
def test_a_skipped_step_changes_nothing_and_a_full_exchange_equalizes(replicas: int) -> None:
    alone = Alone(replicas, interval=3)
    for number in range(1, 5):
        alone.move(number)
        alone.step(number)
    alone.move(5)
    before = (*alone.of(0), alone.corrected(0))
    alone.step(5, applied=False)
    for one, other in zip((*alone.of(0), alone.corrected(0)), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    has_owner_error = any((a != b).any() for a, b in zip(alone.of(0)[1], alone.corrected(0), strict=True))
    assert has_owner_error == (replicas > 4)
    mean = [sum(alone.corrected(i)[k] for i in range(replicas)) / replicas for k in range(len(PARTS))]
    for method in alone.methods:
        method.request_full_exchange()
    alone.step(6)
    for i in range(replicas):
        for anchor, theta, wanted in zip(*alone.of(i), mean, strict=True):
            assert torch.equal(anchor, theta)
            torch.testing.assert_close(theta, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interval", [1, 3, 4])
def test_pipeline_stages_have_the_block_groups_of_the_whole_model(interval: int) -> None:
    sizes, stage = [1000, 128, 5, 4096, 300, 77], 3  # the first stage has 3 shards
    first_block = count_blocks(sizes[:stage])
    for group in range(interval):
        first = slices_of_group(sizes[:stage], interval, group)
        second = slices_of_group(sizes[stage:], interval, group, first_block)
        moved = [one._replace(shard=one.shard + stage) for one in second]
        assert [*first, *moved] == slices_of_group(sizes, interval, group)


def test_the_warm_up_averages_more_block_groups() -> None:
    alone = Alone(2, interval=6, warmup_steps=10, code="float32")
    block_groups = [alone.methods[0].block_groups(number) for number in range(1, 14)]
    assert [len(each) for each in block_groups] == [6, 5, 4, 4, 3, 2, 2, 2, 1, 1, 1, 1, 1]
    assert [group for each in block_groups for group in each] == list(range(1, 34))
    for number in (1, 2, 9, 10):
        alone.move(number)
        alone.step(number)
        first, second = ([t for t in alone.of(i)[1] if t.numel() > 3 * BLOCK] for i in range(2))
        equal = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
        assert all(equal) == (number == 1)


@pytest.mark.parametrize(("interval", "warmup"), [(14, 49), (6, 49), (30, 250), (5, 0), (1, 7)])
def test_no_block_group_waits_for_more_than_one_round(interval: int, warmup: int) -> None:
    method = Alone(2, interval=interval, warmup_steps=warmup).methods[0]
    last = dict.fromkeys(range(interval), 0)
    for number in range(1, warmup + 3 * interval):
        for group in method.block_groups(number):
            waited, last[group % interval] = number - last[group % interval], number
            assert waited <= interval
    assert min(last.values()) > warmup + interval


def test_the_default_warm_up_is_5_percent_of_the_run() -> None:
    alone = Alone(2, steps=400, interval=8, warmup_steps=-1)
    assert [len(alone.methods[0].block_groups(number)) for number in (1, 11, 21, 22)] == [8, 3, 1, 1]

"""Contract of every method of the replicate axis. A method is tested by adding it to `cases.CASES`."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import slow
from tests.methods.cases import CASES, CHUNK_ENTRIES, EQUAL, SHAPES, STEPS, WITHOUT, Case
from tests.methods.steps import (
    Played,
    as_replicas,
    close,
    exchanged,
    gradients,
    is_local,
    kept,
    make,
    mean,
    on_gloo,
    pending,
    play,
    run_replicas,
    sent_by_level,
    skipped_at,
    update,
    updates,
    with_a_skipped_step,
)
from tests.on_a_gpu import AsOnAGpu, waits_here
from tests.pool import Pool, attempts
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.methods.radius.method import Radius
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups
from torchtitan_scape.topology.in_process import DryRunCollectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.stages import Codec, Handle
from torchtitan_scape.topology.traffic import (
    LevelSize,
    Stage,
    all_gather_stages,
    all_reduce_stages,
    bytes_by_level,
    reduce_scatter_stages,
)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=[case for case in CASES if not is_local(case) and not updates(case)], ids=str)
def synchronizing(request: pytest.FixtureRequest) -> Case:
    """A case of a `GradientMethod`."""
    return request.param


@pytest.mark.parametrize("replicas", [1, 2, 3, slow(4)])
def test_applied_plus_pending_equals_the_sum_of_gradients(case: Case, replicas: int) -> None:
    """In the mean over replicas, for every parameter and step; and all replicas receive the same bits."""
    ranks = as_replicas(case, replicas)
    total, delivered = ([torch.zeros_like(t) for t in mean(0, 1)] for _ in range(2))
    rounds = any(values.dtype == torch.bfloat16 for values in ranks[0].kept[0].values())
    for i in range(STEPS):
        for n, (all_given, got) in enumerate(zip(mean(i + 1, replicas), ranks[0].given[i], strict=True)):
            assert all(torch.equal(got, rank.given[i][n]) for rank in ranks), (i, n)
            if not case.conserves:
                continue
            total[n] += all_given
            delivered[n] += got.double()
            left = torch.stack([rank.pending[i][n] for rank in ranks]).mean(0)
            assert close(delivered[n] + left, total[n], 2e-3 if rounds else 1e-5), (i, n)
    assert all(rank.kept[-1].keys() == ranks[0].kept[-1].keys() for rank in ranks)
    assert torch.equal(ranks[0].given[-1][WITHOUT], torch.zeros_like(ranks[0].given[-1][WITHOUT]))


def test_replicated_states_are_bitwise_equal(case: Case) -> None:
    first, second = as_replicas(case, 2)
    assert first.replicated == second.replicated
    assert all(torch.equal(first.kept[-1][key], second.kept[-1][key]) for key in first.replicated)


def test_a_skipped_step_changes_no_state(case: Case) -> None:
    """States are bitwise unchanged, and later steps contain no NaN."""
    at = skipped_at(case)
    for rank in with_a_skipped_step(case):
        before, after = rank.kept[at - 2], rank.kept[at - 1]
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(t.isfinite().all() for tensors in rank.given[at:] for t in tensors)
        assert all(t.isfinite().all() for t in rank.kept[-1].values())


# The default run has steps of warm-up, and all phases of rounds of two to four steps.
@pytest.mark.parametrize("at", [slow(1), 2, 3, 4, 5, slow(6), slow(7)])
def test_declared_states_determine_all_later_steps(case: Case, at: int) -> None:
    """A new method object with the states of another one continues bitwise like that one, in any phase."""
    wholes = as_replicas(case, 2)

    def work(collectives: ReplicaCollectives) -> Played:
        whole, method = wholes[collectives.replica], make(case, collectives)
        for key in whole.kept[at - 1]:
            method.allocate(*key.split(".", 1))
        for state in method.states():
            for name, values in state.tensors.items():
                start = state.starts[name] if state.starts else 0
                kept_values = whole.kept[at - 1][f"{state.kind}.{name}"].view(-1)
                values.copy_(kept_values[start : start + values.numel()].view(values.shape))
        parameters, optimizer_state = whole.trained[at - 1]
        for shard, values in zip(method.context.shards, parameters, strict=True):
            shard.parameter.data.copy_(values)
        method.context.optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        return play(collectives, case, method=method, first=at + 1)

    for whole, rest in zip(wholes, run_replicas(2, work), strict=True):
        for one, other in zip(whole.given[at:], rest.given, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(torch.equal(values, rest.kept[-1][key]) for key, values in whole.kept[-1].items())


@pytest.mark.parametrize("replicas", [1, 2, 3, slow(4)])
def test_sent_bytes_equal_the_planned_bytes(case: Case, replicas: int) -> None:
    for rank in as_replicas(case, replicas):
        steady = rank.sent[case.begins :]
        for first in range(len(steady) - case.period + 1):
            assert sum(steady[first : first + case.period]) == pytest.approx(case.period * rank.planned, rel=EQUAL)


def test_sent_bytes_on_two_levels_equal_the_planned_bytes(case: Case) -> None:
    """With buffers that are padded so that every level can divide them."""
    collectives = DryRunCollectives(
        ReplicaGroups(None, None, levels=(RankGroup("node", 2, 0), RankGroup("network", 3, 0)))
    )
    collectives.chunk_entries = CHUNK_ENTRIES
    played = play(collectives, case)
    steady = played.sent[case.begins : case.begins + case.period]
    assert sum(steady) == pytest.approx(case.period * played.planned, rel=EQUAL)


@pytest.mark.parametrize("levels", [(("node", 4),), (("node", 2), ("network", 3))], ids=str)
def test_plan_and_ledger_have_equal_bytes_on_every_level(case: Case, levels: tuple[tuple[str, int], ...]) -> None:
    """The plan is computed from names, shapes and options, without a method object."""
    groups = tuple(RankGroup(level, size, 0) for level, size in levels)
    collectives = DryRunCollectives(ReplicaGroups(None, None, levels=groups))
    method = make(case, collectives)
    model = LocalModel(tuple(f"p{i}" for i in range(len(SHAPES))), tuple(SHAPES))
    sizes = [LevelSize(level, size) for level, size in levels]
    calls = METHODS[case.method].options(**case.options).collective_calls(model, sizes)
    assert calls == method.collective_calls()
    planned = bytes_by_level([stage for call in calls for stage in call.stages(sizes)])
    before: dict[str, float] = {}
    for number in range(1, case.begins + case.period + 1):
        if number == case.begins + 1:
            before = sent_by_level(collectives)
        with torch.no_grad():
            exchanged(method, gradients(number, 0), StepInfo(number, torch.tensor(True)))
    counted = {level: sent - before.get(level, 0.0) for level, sent in sent_by_level(collectives).items()}
    assert counted == pytest.approx({level: case.period * sent for level, sent in planned.items()}, rel=EQUAL)


class CountingCollectives(DryRunCollectives):
    """Counts the consecutive messages of a rank, as `topology.traffic` prices them."""

    messages = 0.0

    def _count_messages(self, stages: list[Stage]) -> Handle:
        self.messages += sum(stage.rounds for stage in stages)
        return Handle()

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        super()._all_reduce(tensor, divisor, codec, error, carried_error)
        encoded = None if codec is None else codec.message_bytes
        return self._count_messages(all_reduce_stages(tensor.numel(), self.levels, encoded))

    def _reduce_scatter(self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None) -> Handle:
        super()._all_reduce(tensor, divisor, codec, error, None)
        return self._count_messages(reduce_scatter_stages(0, self.levels))

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        super()._send_to_owners(received, messages, owners)
        return self._count_messages(reduce_scatter_stages(0, self.levels))

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        super()._all_gather(output, input)
        return self._count_messages(all_gather_stages(input.nbytes, self.levels))

    def _all_reduce_or(self, bits: Tensor) -> Handle:
        return self._count_messages(all_reduce_stages(bits.nbytes // 4, self.levels))

    def _pair_mean(self, tensor: Tensor, draw: int) -> Handle:
        paired = self.partner(draw) is not None
        inside = 2 * sum(level.size - 1 for level in self.levels[:-1])
        return self._count_messages([Stage("any", inside + paired, 0.0)])


@pytest.mark.parametrize("chunk_entries", [64, 0])
@pytest.mark.parametrize("levels", [(("node", 4),), (("node", 2), ("network", 3))], ids=str)
def test_the_plan_prices_every_message(case: Case, levels: tuple[tuple[str, int], ...], chunk_entries: int) -> None:
    """The latency of every chunk counts, not only that of the first one."""
    groups = tuple(RankGroup(level, size, 0) for level, size in levels)
    collectives = CountingCollectives(ReplicaGroups(None, None, levels=groups))
    collectives.chunk_entries = chunk_entries
    method = make(case, collectives)
    planned = sum(stage.rounds for call in method.collective_calls() for stage in call.stages(collectives.levels))
    before = 0.0
    for number in range(1, case.begins + case.period + 1):
        if number == case.begins + 1:
            before = collectives.messages
        with torch.no_grad():
            exchanged(method, gradients(number, 0), StepInfo(number, torch.tensor(True)))
    assert collectives.messages - before == pytest.approx(case.period * planned, rel=EQUAL)


def test_the_dense_limit_equals_dense_training(case: Case) -> None:
    dense = case.dense or {}
    for rank in run_replicas(3, lambda collectives: play(collectives, case, **dense)):
        assert not any(t.any() for tensors in rank.given[: case.lag] for t in tensors)
        for i in range(case.lag, STEPS):
            wanted = mean(i + 1 - case.lag, 3)
            assert all(close(a, b, case.tolerance) for a, b in zip(rank.given[i], wanted, strict=True)), i


def test_a_gradient_scale_of_n_equals_n_times_larger_gradients(synchronizing: Case) -> None:
    """If the loss is divided by the global token count, gradients are N times smaller."""

    def work(collectives: ReplicaCollectives) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for scale in (1.0, 2.0):
            method = make(synchronizing, collectives, scale)
            for number in range(1, synchronizing.begins + 4):
                own = [g / scale for g in gradients(number, collectives.replica)]
                with torch.no_grad():
                    result = method.synchronize(own, StepInfo(number, torch.tensor(True)))
            found.append([g.clone() for g in result])
        return found[0], found[1]

    for one, other in run_replicas(2, work):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_asynchronous_exchange_has_the_same_bits(synchronizing: Case) -> None:
    """Including states, although replicas run another collective meanwhile."""

    def work(collectives: ReplicaCollectives) -> Played:
        begun, found = make(synchronizing, collectives), Played()
        for number in range(1, STEPS + 1):
            with torch.no_grad():
                step = StepInfo(number, torch.tensor(True))
                take = begun.start(gradients(number, collectives.replica), step)
                collectives.minimum_over_all(torch.tensor(True))
                given = take()
                found.given.append([g.clone() for g in given])
                update(begun, given, step)
                begun.after_optimizer_step(step)
            found.kept.append(kept(begun))
        return found

    for one, other in zip(as_replicas(synchronizing, 2), run_replicas(2, work), strict=True):
        for i in range(STEPS):
            assert all(torch.equal(a, b) for a, b in zip(one.given[i], other.given[i], strict=True))
            assert all(torch.equal(values, other.kept[i][key]) for key, values in one.kept[i].items())


def test_a_full_exchange_leaves_no_residual(case: Case) -> None:
    def work(collectives: ReplicaCollectives) -> list[Tensor]:
        method = make(case, collectives)
        play(collectives, case, method=method)
        method.request_full_exchange()
        with torch.no_grad():
            exchanged(method, gradients(STEPS + 1, collectives.replica), StepInfo(STEPS + 1, torch.tensor(True)))
        return pending(method)

    for left in run_replicas(2, work):
        assert all(not t.any() for t in left)


@pytest.fixture(scope="module")
def on_ranks(pool2: Pool, pool4: Pool) -> Callable[[int], list[list[tuple[bool, Any]]]]:
    """Return the results of every case on every gloo rank. The ranks are started once for all cases."""
    pools = {2: pool2, 4: pool4}
    return functools.cache(lambda world: pools[world](attempts, on_gloo, *((case,) for case in CASES)))


@pytest.mark.parametrize("world", [2, slow(4)])
def test_simulated_replicas_equal_gloo_ranks(case: Case, world: int, on_ranks: Any) -> None:
    """Up to the order of sums; gloo ranks receive the same bits as each other, and the counted bytes are equal."""
    outcomes = [rank[CASES.index(case)] for rank in on_ranks(world)]
    assert all(good for good, _ in outcomes), outcomes
    real, simulated = [played for _, played in outcomes], as_replicas(case, world)
    for mine, theirs in zip(simulated, real, strict=True):
        assert mine.sent == pytest.approx(theirs.sent) and mine.planned == theirs.planned
        for i in range(STEPS):
            assert all(torch.equal(a, b) for a, b in zip(theirs.given[i], real[0].given[i], strict=True))
    # Compare the first steps only: later, rounding may change the selection among nearly equal entries.
    for i in range(case.begins + 2):
        assert all(close(a, b) for a, b in zip(simulated[0].given[i], real[0].given[i], strict=True)), i


def test_every_method_is_in_the_contract() -> None:
    """Methods with `holds_optimizer_state` have separate tests."""
    own_tests = {name for name, entry in METHODS.items() if entry.options.holds_optimizer_state}
    assert {case.method for case in CASES} == METHODS.keys() - own_tests


@pytest.mark.parametrize("case", [case for case in CASES if not is_local(case)], ids=str)
def test_a_gpu_never_waits_and_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including a skipped step. Exceptions: Radius reads unknown mask sizes, and local updates wait at exchanges."""
    waits_here(monkeypatch, Radius, "_entries_in_mask")
    expected, at, plain = with_a_skipped_step(case), skipped_at(case), exchanged

    def on_a_gpu(*arguments: Any) -> list[Tensor]:
        with AsOnAGpu():
            return plain(*arguments)

    monkeypatch.setitem(globals(), "exchanged", on_a_gpu)
    for found, wanted in zip(run_replicas(2, lambda c: play(c, case, nan_at=at)), expected, strict=True):
        for ours, theirs in zip(found.kept, wanted.kept, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        for number, (ours, theirs) in enumerate(zip(found.given, wanted.given, strict=True), 1):
            assert number == at or all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

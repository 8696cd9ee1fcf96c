"""`quantized_update` with an interval: a step updates a group of parameters with the gradients of several steps."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.test_bases import gradients
from tests.methods.test_quantized_update import NAMED, make, run_replicas, start_of, steps, weights
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.base import scaled_for_steps
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.options import share_of_dense
from torchtitan_scape.methods.quantized_update.method import QuantizedUpdate
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.planner.candidates import fastest, make_request
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.sharding.matrix_cost import optimizer_flops
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import DryRunCollectives

INTERVAL = 3


def group_of(name: str) -> int:
    """Return the group of a parameter; step n exchanges group n modulo the interval."""
    groups = make(DryRunCollectives(replicas=2), interval=INTERVAL)._groups
    number = list(NAMED).index(name)
    return next(k for k, group in enumerate(groups) if number in group.tensors)


def reference(count: int, replicas: int, rate: float, max_norm: float) -> list[Tensor]:
    """Return the weights after some steps of AdamW, written out for every parameter, without encodings.

    All are exchanged in the last step.
    """
    found = {name: start_of(name).detach().view(-1) for name in NAMED}
    collected: dict[str, list[Tensor]] = {name: [] for name in NAMED}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in found.items()}
    squares = [0.0] * INTERVAL
    for n in range(1, count + 1):
        each = [gradients(n, replica) for replica in range(replicas)]
        for name, *own in zip(NAMED, *each, strict=True):
            collected[name].append(torch.stack(own).mean(0))
        due = {
            name: torch.stack(collected[name]).mean(0) for name in NAMED if n == count or group_of(name) == n % INTERVAL
        }
        for k in {group_of(name) for name in due}:
            squares[k] = sum(float(mean.square().sum()) for name, mean in due.items() if group_of(name) == k)
        factor = min(1.0, max_norm / sum(squares) ** 0.5)
        for name, mean in due.items():
            k, (m, v) = len(collected[name]), moments[name]
            b1, b2 = 0.9**k, 0.95**k
            m.mul_(b1).add_(factor * mean, alpha=1 - b1)
            v.mul_(b2).add_((factor * mean).square(), alpha=1 - b2)
            found[name] *= 1 - k * rate * 0.1
            found[name] -= k * rate * (m / (1 - 0.9**n)) / ((v / (1 - 0.95**n)).sqrt() + 1e-8)
            collected[name] = []
    return list(found.values())


def with_adamw(collectives: ReplicaCollectives, rate: float, **options: Any) -> QuantizedUpdate:
    parameters = [(name, start_of(name)) for name in NAMED]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer, max_norm=0.5)
    return QuantizedUpdate(context, QuantizedUpdateOptions(block=32, interval=INTERVAL, whiten_every=0, **options))


@pytest.mark.parametrize(("replicas", "tolerance"), [(1, 2.5e-2), (3, 5e-2)])
def test_a_parameter_is_updated_every_few_steps_with_the_mean_of_its_gradients(replicas: int, tolerance: float) -> None:
    """One replica sends nothing, so that it has no errors of encodings; residuals are rounded to BF16."""

    def run(collectives: ReplicaCollectives) -> list[Tensor]:
        method = with_adamw(collectives, 1e-2, code="int8", update_code="int8")
        steps(method, range(1, 8))
        method.request_full_exchange()
        taken = steps(method, range(8, 9))[-1]
        assert float(method.owned.applied) == 8.0
        return [each.view(-1) for each in taken]

    wanted = reference(8, replicas, 1e-2, 0.5)
    start = [start_of(name).detach().view(-1) for name in NAMED]
    for found in run_replicas(replicas, run):
        for a, b, first in zip(found, wanted, start, strict=True):
            assert (a - b).norm() < tolerance * (b - first).norm()


def test_only_the_parameters_of_a_group_move() -> None:
    def run(collectives: ReplicaCollectives) -> list[list[bool]]:
        method = make(collectives, interval=INTERVAL)
        each = [weights(method), *steps(method, range(1, 8))]
        return [[torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in pairwise(each)]

    for same in run_replicas(2, run):
        for n, equal in enumerate(same, start=1):
            assert equal == [group_of(name) != n % INTERVAL for name in NAMED]


def test_a_full_exchange_delivers_what_was_collected() -> None:
    """In the step of a full exchange all parameters move, and nothing stays pending."""

    def run(collectives: ReplicaCollectives) -> tuple[list[bool], float]:
        method = make(collectives, interval=INTERVAL)
        before = steps(method, range(1, 6))[-1]
        method.request_full_exchange()
        after = steps(method, range(6, 7))[-1]
        pending = sum(
            float(t.abs().sum()) for state in method.states() if state.is_pending for t in state.tensors.values()
        )
        return [torch.equal(a, b) for a, b in zip(before, after, strict=True)], pending

    for same, pending in run_replicas(3, run):
        assert not any(same) and pending < 1e-4


@pytest.mark.parametrize("interval", [1, INTERVAL])
@pytest.mark.parametrize("skipped", [(), (4, 6)])
def test_resume_is_exact_and_a_skipped_step_changes_nothing(skipped: tuple[int, ...], interval: int) -> None:
    """Accumulated gradients, their number, and the norms of other groups, for clipping, are part of the state."""

    def run(collectives: ReplicaCollectives) -> bool:
        whole, first, second = (make(collectives, max_norm=0.5, interval=interval) for _ in range(3))
        wanted = steps(whole, range(1, 11), skipped)
        steps(first, range(1, 6), skipped)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        second.context.optimizer.load_state_dict(copy.deepcopy(first.context.optimizer.state_dict()))
        for one, other in zip(first.context.shards, second.context.shards, strict=True):
            other.parameter.data.copy_(one.parameter.data)
        for n in skipped:
            assert all(map(torch.equal, wanted[n - 1], wanted[n - 2]))
        return all(map(torch.equal, steps(second, range(6, 11), skipped)[-1], wanted[-1]))

    assert all(run_replicas(3, run))


def test_gradients_are_added_to_the_residual_unless_the_step_is_skipped() -> None:
    method = with_adamw(DryRunCollectives(replicas=1), 1e-2)
    name = next(name for name in NAMED if group_of(name) == 0)
    residual = next(state for state in method.states() if state.kind == "residual").tensors[name].view(-1)
    number = list(NAMED).index(name)
    with torch.no_grad():
        method.step(gradients(1, 0), StepInfo(1, torch.tensor(True)))
        method.finish_previous_step(True)
        method.step([torch.full_like(g, torch.nan) for g in gradients(2, 0)], StepInfo(2, torch.tensor(False)))
        method.finish_previous_step(False)
    assert method._accumulated.tolist() == [1, 0, 1]
    torch.testing.assert_close(residual.float(), gradients(1, 0)[number], rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_bytes_fall_with_the_interval(interval: int) -> None:
    """To a share of those of the same codes without bases in every step."""
    options = QuantizedUpdateOptions(update_code="1bit_unbiased", whiten_every=0, interval=interval)
    share = share_of_dense(options, get_workload("llama_1_8b").local(1), 16)
    assert share == pytest.approx(0.0487 / interval, rel=0.02)
    assert options.label() == "quantized_update 2bit, 1bit_unbiased" + (
        f", interval {interval}" if interval > 1 else ""
    )


def test_the_number_of_steps_is_dropped_with_their_gradients() -> None:
    method = make(DryRunCollectives(replicas=2), interval=INTERVAL)
    method._accumulated += 1
    dropped = {s.kind: s.tensors for s in method.checkpoint_states("drop")}
    assert not any(bool(t.any()) for t in dropped["accumulated_steps"].values())
    exact = {s.kind: s.tensors for s in method.checkpoint_states("exact")}
    assert all(int(t.sum()) == INTERVAL for t in exact["accumulated_steps"].values())


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Muon])
def test_optimizers_with_other_rates_are_refused(kind: Any) -> None:
    """PyTorch's own Muon too."""
    optimizer = kind([nn.Parameter(torch.zeros(4, 4))], lr=0.01)
    context = MethodContext(collect_shards(optimizer.param_groups), DryRunCollectives(replicas=2), optimizer)
    known = (
        rf"interval = 2 with torch.optim\S*{kind.__name__}: .* known for torchtitan_scape.Muon, Adam, .*interval = 1"
    )
    with pytest.raises(ValueError, match=known):
        QuantizedUpdate(context, QuantizedUpdateOptions(interval=2))


def test_muon_orthogonalizes_a_part_of_the_matrices() -> None:
    """Each step of 4 replicas half of them with an interval of 2; of 64 the busiest has one matrix instead of two."""
    workload = get_workload("llama_1_8b")
    runs = [PlannedRun(QuantizedUpdateOptions(interval=k), "Muon") for k in (1, 2)]
    for replicas, ratio in ((4, 2.0), (64, 2.0), (1024, 1.0)):
        one, other = (optimizer_flops(run.options, run.optimizer, workload.whole(), replicas) for run in runs)
        assert one / other == pytest.approx(ratio, rel=0.15), replicas


@pytest.mark.parametrize(
    ("replicas", "interval", "milliseconds"), [(16, 1, 670), (16, 4, 185), (64, 1, 817), (64, 4, 354)]
)
def test_the_exchange_times_on_the_page_are_those_of_the_planner(
    replicas: int, interval: int, milliseconds: float
) -> None:
    case = make_request("vista", replicas, "llama_1_8b", network_bandwidth=1.0)
    run = PlannedRun(QuantizedUpdateOptions(update_code="1bit_unbiased", interval=interval), "Muon")
    assert 1e3 * fastest(case, [run]).prediction.exchange == pytest.approx(milliseconds, abs=0.6)


def optimizers(rate: Tensor | float) -> list[tuple[nn.Parameter, torch.optim.Optimizer]]:
    each = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    return [
        (each[0], torch.optim.AdamW([each[0]], lr=rate, betas=(0.9, 0.95), weight_decay=0.0, eps=0.0)),
        (each[1], torch.optim.SGD([each[1]], lr=rate, momentum=0.5)),
        (each[2], torch.optim.SGD([each[2]], lr=rate)),
    ]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_one_step_stands_for_several(rate: Tensor | float) -> None:
    """Equal gradients move the weights about as far, and the rates are those of before afterwards."""
    for (one, single), (other, several) in zip(optimizers(rate), optimizers(rate), strict=True):
        before = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        for count in range(30):
            one.grad = torch.ones(4)
            single.step()
            if count % 3 == 2:
                other.grad = torch.ones(4)
                with scaled_for_steps(several, 3):
                    several.step()
        after = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        assert after == before and after["lr"] is rate
        assert float(other.detach()[0] / one.detach()[0]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "at_first", "later"), [("AdamW", 1.0, 1.0), ("AdamS", 0.83, 0.97), ("SGD", 1.52, 1.10)]
)
def test_equal_gradients_move_a_parameter_about_as_far_as_in_single_steps(
    kind: str, at_first: float, later: float
) -> None:
    """At its first exchange, in step 4, and at its fifth one: the figures of the page of the method."""
    torch.manual_seed(0)
    gradient = torch.randn(64, 32).sign()

    def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if kind == "SGD":
            return torch.optim.SGD(named, lr=0.01, momentum=0.9)
        made = AdamS if kind == "AdamS" else torch.optim.AdamW
        return made(named, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)

    def run(collectives: ReplicaCollectives) -> list[float]:
        named = [(f"weight{i}", nn.Parameter(torch.zeros(64, 32))) for i in range(4)]
        optimizer = make_optimizer(named)
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        options = QuantizedUpdateOptions(code="int8", update_code="int8", whiten_every=0, interval=4)
        method, found = QuantizedUpdate(context, options), []
        for n in range(1, 21):
            method.step([gradient.flatten().clone() for _ in named], StepInfo(n, torch.tensor(True)))
            method.finish_previous_step(True)
            found.append(max(float(weight.detach().norm()) for _, weight in named))
        return [found[3], found[19]]

    with torch.no_grad():
        moved = run_replicas(2, run)[0]
    weight = nn.Parameter(torch.zeros(64, 32))
    single, distances = make_optimizer([("weight", weight)]), []
    for _ in range(20):
        weight.grad = gradient.clone()
        single.step()
        distances.append(float(weight.detach().norm()))
    assert moved[0] / distances[3] == pytest.approx(at_first, abs=0.01)
    assert moved[1] / distances[19] == pytest.approx(later, abs=0.01)


@pytest.mark.parametrize("replicas", [2, 16, 64])
def test_updates_of_the_busiest_replica(replicas: int) -> None:
    """It owns about as much as with a single group, and updates a part of that in a step."""
    model = get_workload("llama_1_8b").local(1)
    one, other = (QuantizedUpdateOptions(interval=k) for k in (1, 8))
    whole, parts = one.updated_model(model, replicas).entries, other.updated_model(model, replicas).entries
    assert whole <= parts < 1.5 * whole

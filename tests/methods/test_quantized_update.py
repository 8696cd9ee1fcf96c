"""Updates in few bits by the owners of parameters: Muon's matrices, bases, skipped steps, resume, cost."""

import copy
import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from tests.methods.steps import of_all_replicas
from tests.methods.test_bases import SHAPES as NAMED
from tests.methods.test_bases import gradients, ill_conditioned
from tests.pool import Pool
from tests.replicas import run_replicas as run_with_chunks
from tests.topology.test_stages import collectives as on_levels
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import LocalModel, get_workload
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.quantized_update import bases
from torchtitan_scape.methods.quantized_update.method import QuantizedUpdate
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.replicate import replicate
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import DryRunCollectives, SimulatedReplicas
from torchtitan_scape.topology.traffic import LevelSize

APPLIED = torch.tensor(True)
OPTIONS: dict[str, Any] = {"block": 32, "whiten_every": 3}
run_replicas = functools.partial(run_with_chunks, chunk_entries=512)
MATRICES = [name for name in NAMED if name.startswith("layers.")]


def make(collectives: ReplicaCollectives, max_norm: float | None = None, **options: Any) -> QuantizedUpdate:
    optimizer = Muon([(name, start_of(name)) for name in NAMED], lr=0.02, weight_decay=0.1)
    context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer, max_norm=max_norm)
    return QuantizedUpdate(context, QuantizedUpdateOptions(**(OPTIONS | options)))


def start_of(name: str) -> nn.Parameter:
    generator = torch.Generator().manual_seed(len(name))
    return nn.Parameter(0.1 * torch.randn(NAMED[name], generator=generator))


def weights(method: QuantizedUpdate) -> list[Tensor]:
    return [shard.parameter.detach().clone() for shard in method.context.shards]


def steps(method: QuantizedUpdate, numbers: range, skipped: tuple[int, ...] = ()) -> list[list[Tensor]]:
    found = []
    for n in numbers:
        own = gradients(n, method.collectives.replica)
        if n in skipped:
            own[1][0] = torch.nan
        with torch.no_grad():
            method.step(own, StepInfo(n, torch.tensor(n not in skipped)))
            method.finish_previous_step(n not in skipped)
        found.append(weights(method))
    return found


def dense(count: int, replicas: int, max_norm: float | None = None) -> list[Tensor]:
    parameters = {name: start_of(name) for name in NAMED}
    optimizer = Muon(list(parameters.items()), lr=0.02, weight_decay=0.1)
    for n in range(1, count + 1):
        each = [gradients(n, replica) for replica in range(replicas)]
        for parameter, *own in zip(parameters.values(), *each, strict=True):
            parameter.grad = torch.stack(own).mean(0).view(parameter.shape)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters.values(), max_norm)
        optimizer.step()
    return [parameter.detach() for parameter in parameters.values()]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_without_an_encoding_it_is_dense_muon(replicas: int) -> None:
    def run(collectives: ReplicaCollectives) -> list[Tensor]:
        method = make(collectives, max_norm=0.5)
        for n in range(1, 6):
            method.request_full_exchange()
            steps(method, range(n, n + 1))
        return weights(method)

    wanted = dense(5, replicas, max_norm=0.5)
    for found in run_replicas(replicas, run):
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).norm() < 2e-2 * (b.norm() + 1e-6)  # Newton-Schulz rounds to BF16


@pytest.mark.parametrize("code", ["int8", "2bit"])
def test_all_replicas_have_the_same_bits_and_owners_have_the_exact_weights(code: str) -> None:
    def run(collectives: ReplicaCollectives) -> tuple[list[list[Tensor]], list[Tensor]]:
        method = make(collectives, code=code, update_code=code)
        found = steps(method, range(1, 8))
        unsent = next(state for state in method.states() if state.kind == "unsent_update")
        whole = of_all_replicas(method, unsent)
        return found, [whole[name].view(NAMED[name]) for name in NAMED]

    first, *others = run_replicas(3, run)
    for other in others:
        assert all(
            torch.equal(a, b) for x, y in zip(first[0], other[0], strict=True) for a, b in zip(x, y, strict=True)
        )
        assert all(map(torch.equal, first[1], other[1]))
    assert all(error.norm() > 0 for error in first[1])
    if code == "int8":
        for weight, unsent, wanted in zip(first[0][-1], first[1], dense(7, 3), strict=True):
            assert unsent.norm() < 0.05 * (weight - unsent).norm()
            assert (weight - unsent - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("update_code", "momentum", "lag"),
    [
        ("1bit", 0.9, 0.85),
        ("1bit", 0.95, 1.1),
        ("1bit_unbiased", 0.9, 0.15),
        ("1bit_unbiased", 0.95, 0.21),
        ("e2m1", 0.9, 0.0),
    ],
)
def test_the_weights_are_so_many_steps_behind_the_updates_of_a_momentum(
    update_code: str, momentum: float, lag: float
) -> None:
    """The code of one bit with the least error delays the updates; the others hardly do."""

    def run(collectives: ReplicaCollectives) -> float:
        parameter = nn.Parameter(torch.zeros(64, 32))
        optimizer = torch.optim.SGD([("weight", parameter)], lr=1.0)
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        method = QuantizedUpdate(context, QuantizedUpdateOptions(code="int8", update_code=update_code))
        generator, update, delays = torch.Generator().manual_seed(5), torch.zeros(2048), []
        exact = torch.zeros(2048)
        for n in range(1, 101):
            update = momentum * update + torch.randn(2048, generator=generator)
            exact += update
            method.step([-update], StepInfo(n, APPLIED))
            delays.append(float((exact - parameter.detach().view(-1)) @ update / update.square().sum()))
        return sum(delays[50:]) / 50

    with torch.no_grad():
        found = run_replicas(2, run)
    assert found[0] == pytest.approx(lag, abs=0.05)


def test_a_replica_updates_only_what_it_owns() -> None:
    """Matrices of Muon have one owner each; no replica computes the momentum of another's."""

    def run(collectives: ReplicaCollectives) -> dict[str, int]:
        method = make(collectives)
        steps(method, range(1, 3))
        return {name: moment.numel() for name, moment in method.owned.moments["exp_avg"].items() if moment.any()}

    held = run_replicas(3, run)
    assert all([own[name] for own in held if name in own] == [torch.Size(NAMED[name]).numel()] for name in MATRICES)
    assert all(sum(own.get(name, 0) for own in held) == torch.Size(shape).numel() for name, shape in NAMED.items())


def test_bases_are_equal_on_all_replicas_and_change_with_the_moments_of_the_owner() -> None:
    def run(collectives: ReplicaCollectives) -> dict[str, Tensor]:
        method = make(collectives)
        steps(method, range(1, 6))
        return dict(next(s for s in method.states() if s.kind == "basis").tensors)

    each = run_replicas(2, run)
    first, second = each
    start = next(s for s in make(DryRunCollectives(replicas=2)).states() if s.kind == "basis").tensors
    equal = [name for name in first if name.endswith("forward")]
    assert {name.rpartition(".left")[0] or name.rpartition(".right")[0] for name in equal} == set(MATRICES)
    assert all(torch.equal(first[name], second[name]) for name in equal)
    assert not any(torch.equal(first[name], start[name]) for name in equal)
    # What its owner alone uses, no other replica has.
    for kind in ("backward", "moment"):
        owned = [{name for name in tensors if name.endswith(kind)} for tensors in each]
        assert not owned[0] & owned[1] and len(owned[0] | owned[1]) == len(equal)


def test_weak_directions_keep_their_signal() -> None:
    """The weights are nearer to those of dense Muon than without bases."""
    exact = dense(20, 2)

    def distance(**options: Any) -> float:
        found = run_replicas(2, lambda collectives: steps(make(collectives, **options), range(1, 21))[-1])[0]
        pairs = dict(zip(NAMED, zip(found, exact, strict=True), strict=True))
        return sum(float((a - b).norm() / b.norm()) for a, b in (pairs[name] for name in MATRICES))

    assert distance() < 0.8 * distance(whiten_every=0)


def test_a_skipped_step_changes_nothing() -> None:
    def run(collectives: ReplicaCollectives) -> list[bool]:
        method, same = make(collectives), []
        for n in range(1, 9):
            before, held = copy.deepcopy(method.state_dict()), weights(method)
            steps(method, range(n, n + 1), skipped=(4, 6))  # 4 changes the bases
            if n in (4, 6):
                after = method.state_dict()
                assert torch.equal(before.pop("applied_steps"), after.pop("applied_steps"))
                same += [torch.equal(before[k][name], v) for k, kind in after.items() for name, v in kind.items()]
                same += list(map(torch.equal, held, weights(method)))
        return same

    for same in run_replicas(3, run):
        assert all(same) and len(same) > 40


def test_weights_in_fp16_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4, dtype=torch.float16))])
    context = MethodContext(collect_shards(optimizer.param_groups), DryRunCollectives(replicas=2), optimizer)
    with pytest.raises(ValueError, match=r"needs weights in FP32 or BF16, and 'group0\.0' is torch\.float16"):
        QuantizedUpdate(context, QuantizedUpdateOptions())


@pytest.mark.parametrize("update_code", ["int8", "1bit_unbiased"])
def test_owners_of_weights_in_bf16_have_them_in_fp32(update_code: str) -> None:
    """Steps far below the rounding of BF16 add up, and weight minus unsent update is what FP32 gives."""

    def run(collectives: ReplicaCollectives, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        parameter = nn.Parameter(torch.ones(64, 32, dtype=dtype))
        optimizer = torch.optim.SGD([("weight", parameter)], lr=1e-4)
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        method = QuantizedUpdate(context, QuantizedUpdateOptions(code="int8", update_code=update_code))
        for n in range(1, 101):
            method.step([torch.ones(2048) + 0.5 * collectives.replica], StepInfo(n, APPLIED))
            method.finish_previous_step(True)
        unsent = next(state for state in method.states() if state.kind == "unsent_update")
        return parameter.detach(), parameter.detach().float() - of_all_replicas(method, unsent)["weight"].view(64, 32)

    with torch.no_grad():
        in_fp32 = run_replicas(2, lambda collectives: run(collectives, torch.float32))
        (first, exact), (second, _) = run_replicas(2, lambda collectives: run(collectives, torch.bfloat16))
    assert torch.equal(first, second) and first.dtype == torch.bfloat16
    assert torch.allclose(exact, in_fp32[0][1], atol=1e-5)
    assert (first.float() - exact).abs().max() < 2**-7  # the spacing of BF16 below 1 is 2^-8


def test_muon_accepts_weights_in_bf16_only_where_owners_have_them_in_fp32() -> None:
    def made(method: str) -> ReplicaOptimizer:
        named = [(name, nn.Parameter(start_of(name).bfloat16())) for name in NAMED]
        options = METHODS[method].options()
        return ReplicaOptimizer(Muon(named, lr=0.02), options, SimulatedReplicas(2))

    assert all(part.values.dtype == torch.float32 for part in made("quantized_update").methods[0].owned.parts.values())
    with pytest.raises(ValueError, match="Muon needs parameters in FP32"):
        made("dense")


def test_bases_change_early_and_then_at_multiples() -> None:
    bases = make(DryRunCollectives(replicas=2), whiten_every=200)._bases
    assert bases is not None
    assert [n - 1 for n in range(1, 302) if bases.is_due(n)] == [10, 20, 40, 80, 160, 200]
    assert make(DryRunCollectives(replicas=2), whiten_every=0)._bases is None


def test_bases_change_early_again_after_a_load_that_resets_them() -> None:
    """And an exact resume continues the count."""

    def run(collectives: ReplicaCollectives) -> tuple[list[int], int]:
        method = make(collectives, whiten_every=200)
        steps(method, range(1, 4))
        saved = copy.deepcopy(method.state_dict())
        method.prepare_to_load()
        assert method._bases is not None
        (basis, *_) = method._bases.bases.values()
        changed = []
        for n in range(4011, 4034):
            before = {name: t.clone() for name, t in basis.tensors().items() if name.endswith("forward")}
            steps(method, range(n, n + 1))
            changed += [n] if any(not torch.equal(t, basis.tensors()[name]) for name, t in before.items()) else []
        method.load_state_dict(saved)
        return changed, int(method._bases.start)

    assert run_replicas(2, run) == [([4021, 4031], 0)] * 2


def test_the_residual_norm_needs_no_inverse_besides_those_of_the_owner() -> None:
    """A matrix counts with the residual of its owner, which is as large as those of others."""

    def run(collectives: ReplicaCollectives) -> tuple[float, float]:
        method = make(collectives)
        steps(method, range(1, 6))
        norm, residual = method.metrics()["residual_norm"], method.states()[0]
        return norm, sum(float(method.pending_gradient(residual, name).square().sum()) for name in NAMED)

    found = run_replicas(3, run)
    exact = (sum(squares for _, squares in found) / 3) ** 0.5
    assert [norm for norm, _ in found] == [pytest.approx(exact, rel=0.2)] * 3
    method = make(DryRunCollectives(replicas=3))
    with patch.object(bases, "inverse", side_effect=AssertionError):
        method.metrics()


# ---------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_the_mean_of_the_sent_bytes_is_the_planned_one(replicas: int) -> None:
    def run(collectives: ReplicaCollectives) -> tuple[float, float]:
        method = make(collectives, whiten_every=4)
        steps(method, range(1, 5))
        collectives.ledger.sent.clear()
        steps(method, range(5, 9))  # the first of them changes the bases
        kinds = collectives.ledger.sent_by_level_and_kind().items()
        return sum(sent for (_, kind), sent in kinds if kind != "norm") / 4, method.planned_bytes()

    found = run_replicas(replicas, run)
    assert sum(sent for sent, _ in found) / replicas == pytest.approx(found[0][1])
    model, options = LocalModel(tuple(NAMED), tuple(NAMED.values())), QuantizedUpdateOptions(block=32, whiten_every=4)
    levels = [LevelSize("network", replicas)]
    calls = options.collective_calls(model, levels, 512)
    assert sum(stage.sent for call in calls for stage in call.stages(levels)) == pytest.approx(found[0][1])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_planned_memory_of_bases_is_that_of_the_busiest_owner(replicas: int) -> None:
    def run(collectives: ReplicaCollectives) -> int:
        states = {state.kind: state for state in make(collectives).states()}
        return sum(t.nbytes for t in states["basis"].tensors.values()) if "basis" in states else 0

    model, cost = LocalModel(tuple(NAMED), tuple(NAMED.values())), QuantizedUpdateOptions(block=32)
    assert cost.held_memory(model, replicas).get("bases", 0) == max(run_replicas(replicas, run))


@pytest.mark.parametrize(("replicas", "per_parameter"), [(8, 1.224), (64, 0.700)])
def test_bases_of_llama_1_8b_are_small(replicas: int, per_parameter: float) -> None:
    """As the page says."""
    model = get_workload("llama_1_8b").local(1)
    bases = QuantizedUpdateOptions().held_memory(model, replicas)["bases"]
    assert bases / model.entries == pytest.approx(per_parameter, abs=0.001)


def test_the_planned_products_are_those_of_the_bases() -> None:
    """Of both owners together, with a change of the bases in every third step."""
    counted = 0
    for replica in range(2):
        collectives = DryRunCollectives(replicas=2)
        collectives.replica = replica
        method = make(collectives)
        assert method._bases is not None
        with FlopCounterMode(display=False) as counter:
            method._bases.change(method._residual.tensors, APPLIED)
            for n in range(1, 4):
                own = gradients(n, 0)
                method._bases.encode(own)
                method._bases.decode_and_observe(own, APPLIED, range(len(own)))
        counted += counter.get_total_flops()
    model, cost = LocalModel(tuple(NAMED), tuple(NAMED.values())), QuantizedUpdateOptions(**OPTIONS)
    assert cost.matrix_flops(model, 1) == (0.0, 0.0)
    planned = 2 * 3 * sum(cost.matrix_flops(model, 2))
    assert planned < counted < 1.5 * planned  # a change also decodes and encodes residuals, and rotates the roots


def test_a_gradient_of_few_directions_is_learned() -> None:
    """A run in two bits follows the descent of dense Muon on a quadratic of ill-conditioned noise."""
    goal = ill_conditioned(NAMED["layers.0.wq"], torch.Generator().manual_seed(3))

    def loss_after(collectives: ReplicaCollectives) -> float:
        method = make(collectives, whiten_every=10)
        number = list(NAMED).index("layers.0.wq")
        for n in range(1, 31):
            own = gradients(n, collectives.replica)
            weight = method.context.shards[number].parameter.detach()
            own[number] = (weight - goal).view(-1) + 0.05 * own[number]
            method.step(own, StepInfo(n, APPLIED))
        return float((method.context.shards[number].parameter.detach() - goal).norm())

    with torch.no_grad():
        found = run_replicas(3, loss_after)
    assert len(set(found)) == 1
    assert found[0] < 0.5 * float((start_of("layers.0.wq").detach() - goal).norm())


@pytest.mark.parametrize("make_optimizer", [Muon, torch.optim.AdamW], ids=["Muon", "AdamW"])
def test_simulated_replicas_with_one_optimizer_equal_separate_ones(make_optimizer: Any) -> None:
    """Several replicas own parts of one parameter."""
    replicas = 5

    def separate(collectives: ReplicaCollectives) -> list[Tensor]:
        optimizer = make_optimizer([(name, start_of(name)) for name in NAMED], lr=0.02, weight_decay=0.1)
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        method = QuantizedUpdate(context, QuantizedUpdateOptions(**OPTIONS))
        return steps(method, range(1, 7), skipped=(3,))[-1]

    parameters = {name: start_of(name) for name in NAMED}
    optimizer = make_optimizer(list(parameters.items()), lr=0.02, weight_decay=0.1)
    shared = ReplicaOptimizer(optimizer, QuantizedUpdateOptions(**OPTIONS), SimulatedReplicas(replicas))
    for n in range(1, 7):
        for replica in range(replicas):
            for parameter, gradient in zip(parameters.values(), gradients(n, replica), strict=True):
                parameter.grad = gradient.view(parameter.shape)
                if n == 3:
                    parameter.grad[0] = torch.nan
            shared.stash_replica_gradients()
        shared.step()
    for found in run_with_chunks(replicas, separate, chunk_entries=0):
        assert all(map(torch.equal, found, (parameter.detach() for parameter in parameters.values())))
    shared.finish_previous_step()
    assert [float(method.owned.applied) for method in shared.methods] == [5.0] * replicas
    assert not optimizer.state  # the parts of all replicas together have it


# ------------------------------------------------------------------------------------------- on real ranks


def on_two_levels() -> tuple[list[Tensor], dict[str, int]]:
    """Two levels of two ranks, where the owner's number and its rank in the group differ.

    Returns:
        The weights, and the numbers of entries of which this replica has moments.
    """
    collectives = on_levels("pairs")
    assert len(collectives.levels) == 2
    method = make(collectives, code="int8", update_code="int8")
    taken = steps(method, range(1, 4))[-1]
    return taken, {name: moment.numel() for name, moment in method.owned.moments["exp_avg"].items()}


def test_owners_on_two_levels_have_the_moments(pool4: Pool) -> None:
    results = pool4(on_two_levels)
    wanted = dense(3, 4)
    for name, shape in NAMED.items():
        held = [owned[name] for _, owned in results if name in owned]
        assert sum(held) == torch.Size(shape).numel() and (len(held) == 1 or name not in MATRICES)
    for taken, _ in results:
        assert all(map(torch.equal, taken, results[0][0]))
    for name, weight, exact in zip(NAMED, results[0][0], wanted, strict=True):
        assert (weight - exact).norm() < 0.05 * exact.norm(), name


class TwoMatrices(nn.Module):
    """One of a single row, so that the second of two shards has none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 1, bias=False), nn.Linear(8, 6, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).sum(-1) for layer in self.layers), torch.zeros(()))


def with_an_empty_shard(interval: int) -> tuple[float, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(TwoMatrices(), mesh=mesh["shard"])
    optimizer = Muon(list(model.named_parameters()), lr=0.02)
    wrapped = replicate(
        model,
        optimizer,
        {"method": "quantized_update", "block": 32, "code": "int8", "interval": interval},
        mesh["replicate"],
    )
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        wrapped.step()
        wrapped.zero_grad()
    return wrapped.grad_norm.item(), [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("interval", [1, 2])
def test_a_rank_without_rows_of_a_matrix_participates(interval: int, pool4: Pool) -> None:
    results = pool4(with_an_empty_shard, interval)
    assert [norm for norm, _ in results] == [pytest.approx((8 + 48) ** 0.5, rel=0.02)] * 4
    assert all(all(map(torch.equal, weights, results[0][1])) for _, weights in results)


def with_divided_and_whole_vectors(optimizer_name: str) -> list[Tensor]:
    """Two replicas of a sharded model, whose norm one replica owns and whose embedding both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = TwoMatrices()
    model.embedding, model.norm = nn.Embedding(64, 8), nn.LayerNorm(8)
    fully_shard(model, mesh=mesh["shard"])
    named = list(model.named_parameters())
    if optimizer_name == "Muon":
        optimizer: torch.optim.Optimizer = Muon(named, lr=0.02, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    wrapped = replicate(
        model, optimizer, {"method": "quantized_update", "block": 32, "code": "int8"}, mesh["replicate"]
    )
    for _ in range(2):
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        wrapped.step()
        wrapped.zero_grad()
    return [parameter.full_tensor().detach() for _, parameter in named]


@pytest.mark.parametrize("optimizer_name", ["Muon", "AdamW"])
def test_fused_optimizers_update_parts_of_sharded_parameters(optimizer_name: str, pool2: Pool) -> None:
    first, second = pool2(with_divided_and_whole_vectors, optimizer_name)
    assert all(map(torch.equal, first, second)) and not any(torch.equal(each, torch.ones_like(each)) for each in first)


def test_muon_may_have_other_names_than_the_model() -> None:
    model = TwoMatrices()
    optimizer = Muon(
        [(f"mine.{name}", p) for name, p in model.named_parameters()], lr=0.02, matrices=["mine.layers.1.*"]
    )
    wrapped = replicate(model, optimizer, {"method": "quantized_update", "block": 32}, SimulatedReplicas(2))
    held = {kind: set() for kind in ("exp_avg", "exp_avg_sq")}
    for owned in (method.owned for method in wrapped.methods):
        for kind, names in held.items():
            names.update(owned.moments[kind])
    assert held == {"exp_avg": {"layers.0.weight", "layers.1.weight"}, "exp_avg_sq": {"layers.0.weight"}}


def test_the_state_that_an_optimizer_has_is_kept() -> None:
    """Of two parameters, one has taken a step before."""
    first, second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([first, second], lr=0.1)
    first.grad = torch.ones(8)
    optimizer.step()
    moment = optimizer.state[first]["exp_avg"].clone()
    context = MethodContext(collect_shards(optimizer.param_groups), DryRunCollectives(replicas=1), optimizer)
    owned = QuantizedUpdate(context, QuantizedUpdateOptions()).owned
    assert torch.equal(owned.moments["exp_avg"]["group0.0"], moment) and float(owned.applied) == 1.0
    assert not owned.moments["exp_avg"]["group0.1"].any()


@pytest.mark.parametrize("block", [512, 64])
def test_other_optimizers_and_blocks_of_several_rows_are_reported(block: int, caplog: pytest.LogCaptureFixture) -> None:
    def start(collectives: ReplicaCollectives) -> None:
        shapes = {"wide": (4, 512), "narrow": (4, 80)}
        optimizer = torch.optim.AdamW([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()])
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        QuantizedUpdate(context, QuantizedUpdateOptions(block=block))

    run_replicas(2, start)
    assert caplog.text.count("use Muon, or method 'quantized'") == 1
    assert ("with rows of 80 entries, set block = 64" in caplog.text) == (block > 64)


def test_muon_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    run_replicas(2, make)
    assert "without Muon" not in caplog.text


def test_parameters_that_are_not_contiguous_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4, 8).T)])
    context = MethodContext(collect_shards(optimizer.param_groups), DryRunCollectives(replicas=2), optimizer)
    with pytest.raises(ValueError, match=r"needs contiguous parameters, and 'group0\.0' is not"):
        QuantizedUpdate(context, QuantizedUpdateOptions())


def test_the_planner_has_no_bases_without_muon() -> None:
    model = get_workload("llama_1_8b").local(1)
    muon, adamw = (PlannedRun(QuantizedUpdateOptions(), name) for name in ("Muon", "AdamW"))
    assert muon.device_memory(model, 16)["bases"] > 4e8
    assert "bases" not in adamw.device_memory(model, 16)
    assert adamw.options.matrix_flops(model, 16) == (0.0, 0.0)


def test_the_share_on_the_page_is_that_of_llama_1_8b() -> None:
    model = get_workload("llama_1_8b").local(1)
    updated = QuantizedUpdateOptions().updated_model(model, 64)
    assert updated.entries / model.entries == pytest.approx(0.019, abs=0.0005)


@pytest.mark.parametrize(("levels", "times"), [([384], 1.0), ([8, 48], 4.7)])
def test_rows_are_padded_to_the_longest_one_on_several_levels(levels: list[int], times: float) -> None:
    """As the page says."""
    model, sizes = get_workload("llama_500m").local(1), [LevelSize("network", size) for size in levels]
    calls = QuantizedUpdateOptions(whiten_every=0).collective_calls(model, sizes)
    sent = sum(call.active * call.count for call in calls if call.kind == "reduce_scatter")
    assert sent / model.entries == pytest.approx(times, abs=0.05)

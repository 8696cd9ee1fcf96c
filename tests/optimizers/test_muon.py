"""Muon for the matrices of the blocks: against PyTorch's Muon, against its formula, and in the containers."""

import math
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.methods import test_local_updates as local
from tests.methods.test_local_updates import BETAS, DECAY, DILOCO, EPS, LR, SHAPES, far, trained
from tests.pool import Pool
from torchtitan_scape.core.workloads import LocalModel, Workload, get_workload
from torchtitan_scape.methods.local_options import DilocoOptions
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.optimizers import muon
from torchtitan_scape.optimizers.cost import get_optimizer_cost, muon_flops, muon_parts
from torchtitan_scape.optimizers.muon import Muon, ReplicaShare, orthogonalized
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import Assumptions, Prediction, predict
from torchtitan_scape.sharding.matrix_cost import divides_matrices, gather_stages, gathered_matrices
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import Links, get_machine

HIDDEN = ("layers.0.weight", "layers.1.weight", "layers.2.weight")
RATES: dict[str, Any] = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in local.start().items()}


def set_gradients(weights: dict[str, nn.Parameter], step: int) -> None:
    for name, weight in weights.items():
        weight.grad = None if name == local.WITHOUT else local.gradient(name, weight.detach(), step, 0)


def make_pytorch_optimizers(weights: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon([weights[n] for n in HIDDEN], LR, DECAY, momentum=BETAS[0], adjust_lr_fn="match_rms_adamw")
    rest = [weight for name, weight in weights.items() if name not in HIDDEN]
    return [muon, torch.optim.AdamW(rest, **RATES)]


def test_equals_pytorchs_muon_and_adamw_also_when_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise with BF16 products; a parameter without gradients does not change."""
    monkeypatch.setattr(muon, "products_dtype", lambda device: torch.bfloat16)
    weights, theirs = parameters(), parameters()
    optimizer, plain = Muon(weights.items(), **RATES), make_pytorch_optimizers(theirs)
    for step in range(1, 9):
        set_gradients(weights, step)
        set_gradients(theirs, step)
        if step == 4:
            resumed = Muon(weights.items(), **RATES | {"lr": 1.0})
            resumed.load_state_dict(optimizer.state_dict())
            optimizer = resumed
        for one in (optimizer, *plain):
            one.step()
        assert all(torch.equal(weights[n].detach(), theirs[n].detach()) for n in SHAPES), step
    state = {name: optimizer.state[weight] for name, weight in weights.items()}
    assert all(torch.equal(state[n]["exp_avg"], plain[0].state[theirs[n]]["momentum_buffer"]) for n in HIDDEN)
    assert [n for n in SHAPES if "exp_avg_sq" not in state[n]] == list(HIDDEN)
    assert {n: float(s["step"]) for n, s in state.items()} == {n: 0.0 if n == local.WITHOUT else 8.0 for n in SHAPES}
    assert torch.equal(weights[local.WITHOUT].detach(), local.start()[local.WITHOUT])


@pytest.mark.parametrize("shape", [(48, 48), (96, 40), (40, 96)])
def test_products_on_a_cpu_round_like_bf16(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their error relative to FP64 equals that of BF16 products, and the difference to these is less than one rounding
    per entry.
    """
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = quintic(matrix.double())
    assert muon.products_dtype(torch.device("cpu")) is torch.float32
    own = orthogonalized(matrix)
    monkeypatch.setattr(muon, "products_dtype", lambda device: torch.bfloat16)
    in_bf16 = orthogonalized(matrix)
    assert own.dtype is in_bf16.dtype is torch.bfloat16
    assert relative_error(own, exact) < 1.1 * relative_error(in_bf16, exact) < 0.02
    assert relative_error(own, in_bf16.double()) < 2**-8


def relative_error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


def quintic(matrix: Tensor) -> Tensor:
    """Return the Newton-Schulz iterations in the precision of the argument."""
    x = matrix / matrix.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def test_the_step_size_matches_adamw() -> None:
    """With FP64 iterations (BF16 reduces the norm by 1 %): a root mean square of 0.2 lr at full rank."""
    weights = {"layers.0.weight": nn.Parameter(torch.zeros(24, 40))}
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    weights["layers.0.weight"].grad = gradient.clone()
    Muon(weights.items(), lr=0.01, weight_decay=0.0).step()
    x = quintic(gradient.double())
    moved = weights["layers.0.weight"].detach().double()
    expected = -0.01 * 0.2 * 40**0.5 * x
    assert relative_error(moved, expected) < 0.02
    assert 0.7 < float(moved.square().mean().sqrt()) / (0.2 * 0.01) < 1.2


# More than the ranks, no multiple of them; high, wide and square; rows that do not divide, and too few for all ranks.
CUT = {
    **{f"layers.{i}.weight": shape for i, shape in enumerate([(8, 12), (7, 5), (3, 9), (6, 6), (10, 4), (2, 16)])},
    "embedding.weight": (9, 4),
    "norm.weight": (5,),
}


def step_sharded_and_whole() -> tuple[bool, list[int]]:
    """Return whether the shards are bitwise equal to those of an unsharded Muon, and the bytes sent from this rank to
    each.
    """
    generator, mesh = torch.Generator().manual_seed(3), init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in CUT.items()}
    cut = {name: nn.Parameter(distribute_tensor(own.detach(), mesh, [Shard(0)])) for name, own in whole.items()}
    sent = [0] * dist.get_world_size()

    def count(sizes: Sequence[int]) -> None:
        sent[:] = [a + b for a, b in zip(sent, sizes, strict=True)]

    ours, theirs = Muon(cut.items(), **RATES, count=count), Muon(whole.items(), **RATES)
    for step in range(4):
        sent[:] = [0] * len(sent)
        for name, own in whole.items():
            own.grad = None if (name, step) == ("layers.1.weight", 1) else torch.randn(CUT[name], generator=generator)
            cut[name].grad = None if own.grad is None else distribute_tensor(own.grad, mesh, [Shard(0)])
        ours.step()
        theirs.step()
    pairs = [(cut[n], whole[n]) for n in CUT]
    pairs += [(ours.state[a]["exp_avg"], theirs.state[b]["exp_avg"]) for a, b in pairs]
    return all(torch.equal(a.full_tensor(), b.detach()) for a, b in pairs), sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_sharded_matrices_are_exchanged(ranks: int, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(f"pool{ranks}")(step_sharded_and_whole)
    assert all(equal for equal, _ in results)
    to_others = sum(size for i, (_, sent) in enumerate(results) for j, size in enumerate(sent) if i != j)
    parts = muon_parts(LocalModel(tuple(CUT), tuple(CUT.values())), ranks)
    assert len(parts) == 6 and to_others == sum(2 * (ranks - 1) * part for _, part in parts)


def refused(style: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    if style:
        parallelize_module(model, mesh["tensor"], {"0": {"columns": ColwiseParallel, "rows": RowwiseParallel}[style]()})
        fully_shard(model, mesh=mesh["shard"])
        (parameter,) = model.parameters()
    else:
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["shard"], [Shard(1)]))
    with pytest.raises(ValueError) as error:
        Muon([("layers.0.weight", parameter)])
    return str(error.value)


@pytest.mark.parametrize("style", ["", "columns", "rows"])
def test_other_shardings_are_refused(style: str, pool4: Pool) -> None:
    """By columns; by tensor parallelism below FSDP2's shards."""
    assert all("sharded by rows only, and 'layers.0.weight' of (4, 4) is not" in text for text in pool4(refused, style))


class Literal(local.Literal):
    """DiLoCo with PyTorch's Muon and AdamW as inner optimizers, with separate moments per replica (MuLoCo,
    2505.23725).
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.weights = [parameters() for _ in range(self.replicas)]
        self.optimizers = [make_pytorch_optimizers(weights) for weights in self.weights]

    def inner(self, i: int, n: str, g: Tensor) -> None:
        weights = self.weights[i]
        for name, weight in weights.items():
            weight.grad = g if name == n else None
        weights[n].data.copy_(self.theta[i][n])
        for one in self.optimizers[i]:
            one.step()
        self.theta[i][n] = weights[n].detach().clone()


def test_local_updates_have_a_muon_per_replica(pool1: Pool, pool2: Pool) -> None:
    """Three replicas of one process, and two gloo ranks: parameters of all. Sums in another FP32 order may round
    differently in the BF16 iterations.
    """
    for replicas in (3, 2):
        literal = Literal(replicas, **DILOCO)  # type: ignore[arg-type]
        for _ in range(20):
            literal.step()
        if replicas == 3:
            ((own, _),) = (run[-1] for run in pool1(trained, 20, "diloco", DILOCO, 3, inner="Muon"))
        else:
            own = [run[-1][0][0] for run in pool2(trained, 20, "diloco", DILOCO, 1, inner="Muon")]
        for i in range(replicas):
            assert far(own[i], literal.theta[i]) < 1e-3


@pytest.mark.parametrize(
    "method, options",
    [
        ("quantized", {"block": 32}),
        ("quantized", {"block": 32, "code": "1bit"}),
        ("powersgd", {"rank": 2, "start": 2}),
        ("topk", {"density": 0.1, "block_size": 32}),
    ],
)
def test_with_synchronized_gradients(method: str, options: dict[str, Any], pool1: Pool, pool2: Pool) -> None:
    """Replicas stay bitwise equal, and simulated replicas equal real ones."""
    first, second = (run[-1][0][0] for run in pool2(trained, 8, method, options, 1, inner="Muon"))
    ((own, _),) = (run[-1] for run in pool1(trained, 8, method, options, 2, inner="Muon"))
    assert all(torch.equal(first[n], second[n]) for n in SHAPES)
    assert far(own[0], first) < 1e-5


def test_the_planner_knows_its_memory_and_flops() -> None:
    shapes = [(20, 8), (8, 9), (9, 8), (8,), (20, 8)]
    weights = {f"{'layers.0.' if i in (1, 2) else ''}p{i}": nn.Parameter(torch.zeros(s)) for i, s in enumerate(shapes)}
    optimizer, model = Muon(weights.items()), LocalModel(tuple(weights), tuple(shapes))
    held = sum(t.nbytes for state in optimizer.state.values() for kind, t in state.items() if kind != "step")
    assert get_optimizer_cost("Muon").state(model) == held
    assert muon_flops(model, 1) == 5 * 2 * (4 * 8 * 8 * 9 + 2 * 8**3)
    assert muon_flops(model, 2) == muon_flops(model, 3) == 5 * (4 * 8 * 8 * 9 + 2 * 8**3)
    assert muon_parts(model, 2) == [(0, 2 * 4 * 9), (1, 2 * 5 * 8)]


def test_the_planner_divides_the_work_and_counts_the_exchange() -> None:
    """Eight ranks of a Frontier node: 56 matrices of three shapes in seven rounds, there and back. The network is too
    slow to divide the work among nodes.
    """
    workload, machine = replace(get_workload("llama_1_8b"), layers=8), get_machine("frontier")
    links = Links.from_machine(machine).with_bandwidth("network", 1e6)

    def predicted(shard: int, optimizer: str) -> Prediction:
        layout = plan_layout(16, ranks_per_node=8, machine=machine, replicate=-1, shard=shard)
        return predict(
            PlannedRun(DenseOptions(), optimizer),
            workload,
            layout,
            links,
            batch=1024,
            micro_batch=1,
        )

    products = {n: predicted(n, "Muon").optimizer - optimizer_bytes_seconds(workload, n) for n in (1, 8)}
    assert products[8] == pytest.approx(products[1] / 8)
    more = predicted(8, "Muon").shard - predicted(8, "AdamW").shard
    part = sum(nbytes for _, nbytes in muon_parts(workload.whole(), 8))
    # One of seven parts of an exchange uses the faster link within a GPU, and each exchange incurs one latency.
    expected = 2 * part / 8 * (1 / 200e9 + 6 / 50e9) + 14 * (2e-6 + 6 * 3e-6)
    assert more == pytest.approx(expected)


def optimizer_bytes_seconds(workload: Workload, shard: int) -> float:
    """Return the time of Muon's passes and the gradients' copies, as `predict` has it."""
    nbytes = get_optimizer_cost("Muon").traffic(workload.local(shard))
    nbytes += DenseOptions().memory_traffic(workload.local(shard), 16 // shard, several_levels=shard == 1)[1]
    return nbytes / (get_machine("frontier").device.memory_bandwidth * 1e9 * Assumptions().memory_efficiency)


def test_a_step_releases_the_gradients() -> None:
    """Otherwise they would be kept through the next backward pass."""
    weights = parameters()
    optimizer = Muon(weights.items(), **RATES)
    set_gradients(weights, 1)
    held = [weakref.ref(w.grad.untyped_storage()) for w in weights.values() if w.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    assert held and not any(storage() for storage in held)


class Gathers:
    """All-gathers of replicas that are threads."""

    def __init__(self, replicas: int) -> None:
        self.inputs: list[Any] = [None] * replicas
        self.barrier = threading.Barrier(replicas, timeout=60)
        self.calls = 0

    def share(self, replica: int) -> ReplicaShare:
        def all_gather(output: Tensor, input: Tensor) -> None:
            assert input.nbytes % 16 == 0 and output.numel() == len(self.inputs) * input.numel()
            self.inputs[replica] = input
            self.barrier.wait()
            torch.cat(self.inputs, out=output)
            self.calls += replica == 0
            self.barrier.wait()

        return ReplicaShare(len(self.inputs), replica, all_gather)


@pytest.mark.parametrize("replicas, calls", [(2, 2), (3, 1), (5, 1)])
def test_replicas_that_divide_the_matrices_have_the_same_bits(replicas: int, calls: int) -> None:
    """Three matrices: in two rounds of two, in one, and with replicas that have none."""
    plain = parameters()
    optimizer = Muon(plain.items(), **RATES)
    gathers, every = Gathers(replicas), [parameters() for _ in range(replicas)]

    def train(replica: int) -> Muon:
        own = Muon(every[replica].items(), **RATES, share=gathers.share(replica))
        for step in range(1, 4):
            set_gradients(every[replica], step)
            own.step()
        return own

    for step in range(1, 4):
        set_gradients(plain, step)
        optimizer.step()
    with ThreadPoolExecutor(replicas) as pool:
        owns = list(pool.map(train, range(replicas)))
    assert gathers.calls == 3 * calls
    for weights, own in zip(every, owns, strict=True):
        for name, weight in weights.items():
            assert torch.equal(weight, plain[name]), name
            assert torch.equal(own.state[weight]["exp_avg"], optimizer.state[plain[name]]["exp_avg"])


def test_ranks_without_rows_gather_empty_matrices() -> None:
    """As the last ranks of a replica, if there are fewer rows than ranks."""
    gathers, shapes = Gathers(2), [[torch.Size([0, 4]), torch.Size([0, 8])], [torch.Size([0, 4])]]

    def gather(replica: int) -> list[Tensor]:
        own = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes[replica]]
        return gathers.share(replica).gather(own, shapes, torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        assert all([m.shape for m in found] == [*shapes[0], *shapes[1]] for found in pool.map(gather, range(2)))


def test_a_fused_step_is_skipped_on_the_device() -> None:
    """With found_inf = 1 nothing changes, whatever the gradients are; with 0 the step is as without it."""
    weights, plain = parameters(), parameters()
    optimizer, other = Muon(weights.items(), **RATES, fused=True), Muon(plain.items(), **RATES, fused=True)
    for step, found_inf in ((1, 0.0), (2, 1.0), (3, 0.0)):
        set_gradients(weights, step)
        set_gradients(plain, step)
        if found_inf:
            for weight in weights.values():
                if weight.grad is not None:
                    weight.grad.fill_(torch.inf)
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        if not found_inf:
            other.step()
    for name, weight in weights.items():
        state, expected = optimizer.state[weight], other.state[plain[name]]
        assert torch.equal(weight, plain[name]), name
        assert state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in state), name


def test_the_planner_divides_matrices_among_replicas_if_that_is_faster() -> None:
    """On Vista; not over 10 Gb/s, not without a known GPU, not if every replica has its own gradients.

    A method that compresses is chosen for links that are slower than their nominal speed, so they must be measured.
    """
    workload = get_workload("llama_1_8b")

    def of(machine: str, options: Any, optimizer: str = "Muon", replicas: int = 8, speed: float = 0.0) -> bool:
        layout = plan_layout(replicas, ranks_per_node=1, machine=get_machine(machine), replicate=-1, shard=1)
        links = Links.from_machine(layout.machine)
        links = links.with_bandwidth("network", speed) if speed else links
        return divides_matrices(options, optimizer, workload.whole(), layout, links)

    assert of("vista", DenseOptions()) and not of("vista", QuantizedOptions())
    assert of("vista", QuantizedOptions(), speed=50e9) and not of("vista", QuantizedOptions(), speed=3.5e9)
    assert not of("vista", DenseOptions(), "AdamW") and not of("vista", DenseOptions(), replicas=1)
    assert not of("vista", SpartaOptions()) and not of("vista", DilocoOptions()) and not of("vista", ScapeOptions())
    assert not of("ethernet-10g", DenseOptions()) and not of("local", DenseOptions())


def test_the_gather_between_replicas_is_counted() -> None:
    """Eight replicas on Vista: 168 matrices in 21 all-gathers, of the largest matrix of each round."""
    workload, machine = get_workload("llama_1_8b"), get_machine("vista")
    layout = plan_layout(8, ranks_per_node=1, machine=machine, replicate=-1, shard=1)
    sizes = sorted((2 * math.prod(s) for s in workload.whole().hidden_shapes), reverse=True)
    assert len(sizes) == 168 and gathered_matrices("Muon", workload.whole(), layout) == sizes[::8]
    stages = gather_stages("Muon", workload.whole(), layout)
    assert sum(stage.sent for stage in stages) == 7 * sum(sizes[::8])
    with_muon, links = PlannedRun(DenseOptions(), "Muon"), Links.from_machine(machine)
    predicted = predict(with_muon, workload, layout, links, batch=64, micro_batch=1)
    alone = predict(with_muon, workload, layout, links.with_bandwidth("network", 1e6), batch=64, micro_batch=1)
    products = muon_flops(workload.whole(), 1) - muon_flops(workload.whole(), 8)
    assert alone.optimizer - predicted.optimizer == pytest.approx(products / (989e12 * Assumptions().mfu))
    assert predicted.shard == pytest.approx(7 * sum(sizes[::8]) / 50e9 + 21 * 7 * 5e-6) and alone.shard == 0.0


def test_a_deleted_found_inf_is_forgotten() -> None:
    """`GradScaler` sets it for one step."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))
    muon = Muon([("layers.0.w.weight", weight), ("norm", bias)], fused=True, kernels="torch")
    weight.grad, bias.grad = torch.randn(8, 4), torch.randn(4)
    before = weight.detach().clone(), bias.detach().clone()
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])
    del muon.found_inf
    muon.step()
    assert not torch.equal(weight, before[0]) and not torch.equal(bias, before[1])

"""A gradient far above a replica's usual norm, a norm that is not finite, and rates that differ."""

import math
import os
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.logs import logged
from tests.pool import Pool, attempts
from tests.replica.own_loop import loss_of, make_model, make_optimizer, weights
from torchtitan_scape import AdamS, Muon, ReplicaOptimizer, checkpoint_states, load_checkpoint, replicate
from torchtitan_scape.checkpoint.state import check_states
from torchtitan_scape.checkpoint.storage import MANIFEST, newest_to_leave_out, note_failed_step
from torchtitan_scape.core.consistency import DamagedParametersError
from torchtitan_scape.topology.in_process import SimulatedReplicas

REPLICAS, SPIKE_AT = 4, 16
MUON, ADAMW = partial(Muon, lr=1e-2), partial(torch.optim.AdamW, lr=1e-2)
WITH_A_RESIDUAL: dict[str, tuple[dict[str, Any], Any]] = {
    "scape": ({"method": "scape", "density": 0.1, "block_size": 64}, partial(AdamS, lr=1e-2)),
    "topk": ({"method": "topk", "density": 0.1, "block_size": 64}, ADAMW),
    "topk 2bit": ({"method": "topk", "density": 0.1, "selection": "tile", "code": "2bit"}, ADAMW),
    "tagc": ({"method": "tagc", "density": 0.1}, ADAMW),
    "demo": ({"method": "demo", "chunk": 8, "k": 4}, partial(torch.optim.SGD, lr=1e-2)),
    "powersgd": ({"method": "powersgd", "rank": 2, "start": 0}, ADAMW),
    "quantized": ({"method": "quantized", "block": 64}, MUON),
    "quantized 1bit": ({"method": "quantized", "block": 64, "code": "1bit"}, ADAMW),
    "quantized_update": ({"method": "quantized_update"}, MUON),
    "quantized_update 2": ({"method": "quantized_update", "interval": 2}, MUON),
    "onebit_adam": ({"method": "onebit_adam", "warmup_steps": 3}, ADAMW),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.emb = nn.Embedding(24, 32)


def build(name: str, **arguments: Any) -> ReplicaOptimizer:
    method, optimizer = WITH_A_RESIDUAL[name]
    arguments = {"max_norm": 1e9, "total_steps": 300, **arguments}
    return replicate(Net(), optimizer, method, SimulatedReplicas(REPLICAS), **arguments)


def step(optimizer: ReplicaOptimizer, number: int, factor: float = 1.0, of_all: bool = False) -> float:
    """Run a step with random gradients, those of the first replica or of all multiplied; return the norm."""
    assert optimizer.model is not None
    generator = torch.Generator().manual_seed(number)
    for replica in range(REPLICAS):
        for parameter in optimizer.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (
                factor if of_all or not replica else 1.0
            )
        optimizer.stash_replica_gradients()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.grad_norm.item()


@pytest.mark.parametrize("name", WITH_A_RESIDUAL)
def test_a_spike_of_one_replica_is_forgotten_within_three_steps(name: str) -> None:
    """Its residual would otherwise raise the norm above 1.5 times the usual one for 13 steps and more."""
    optimizer = build(name)
    usual = median([step(optimizer, number) for number in range(SPIKE_AT)][SPIKE_AT // 2 :])
    with logged() as lines:
        step(optimizer, SPIKE_AT, factor=100.0)
        after = [step(optimizer, SPIKE_AT + i) for i in range(1, 6)]
    assert max(after[2:]) < 1.5 * usual
    limited = [line for line in lines if "times its usual norm, and was scaled down to 4 times it" in line]
    assert len(limited) == 1 and "the gradient of replica 0 had " in limited[0]
    assert optimizer.metrics()["skipped_steps"] == 0


@pytest.mark.parametrize("name", WITH_A_RESIDUAL)
def test_a_huge_finite_gradient_leaves_no_trace(name: str) -> None:
    """It would overflow where it is squared or encoded."""
    for size in (1e14, 1e20, 1e36):
        optimizer, clipped = build(name, max_norm=1.0), []
        for number in range(12):
            step(optimizer, number, factor=size if number == 5 else 1.0)
            clipped.append(optimizer.clip_factor.item())
        assert optimizer.model is not None and weights(optimizer.model).isfinite().all()
        assert min(clipped[6:]) > 1e-4
        skipped = optimizer.metrics()["skipped_steps"]
        assert skipped == (size > 1e17), "a smaller one is scaled down"


def test_a_spike_does_not_spoil_a_whitening_basis() -> None:
    """The bases average squares, in which a spike would outweigh hundreds of steps."""

    def basis(factor: float) -> Tensor:
        section = {"method": "quantized_update", "whiten_every": 3}
        optimizer = replicate(Net(), MUON, section, SimulatedReplicas(REPLICAS), max_norm=1e9)
        for number in range(24):
            step(optimizer, number, factor if number == SPIKE_AT else 1.0)
        states = [state for state in optimizer.methods[0].states() if state.kind == "basis"]
        tensors = states[0].tensors.values()
        return torch.cat([values.flatten().abs() for values in tensors if values.is_floating_point()])

    usual, spiked, reference = basis(1.0), basis(1e3), basis(2.0)
    assert (spiked - usual).norm() < 3.0 * (reference - usual).norm(), "about as after a gradient of twice the size"


def spike_during_the_backward_pass() -> tuple[bool, float, list[str]]:
    """With overlap the values were sent before the norm is known: the step is skipped, on every rank."""
    model = make_model()
    optimizer = make_optimizer(model, "quantized", overlap=True)
    before, changed = weights(model), True
    with logged() as lines:
        for number in range(1, 9):
            optimizer.prepare_last_backward()
            (loss_of(model, number, dist.get_rank()) * (1e3 if number == 6 and dist.get_rank() == 0 else 1)).backward()
            before = weights(model)
            optimizer.step()
            optimizer.zero_grad()
            changed = changed if number != 6 else not torch.equal(before, weights(model))
        optimizer.finish_previous_step()
    return changed, optimizer.metrics()["skipped_steps"], lines


def test_a_spike_that_was_sent_already_skips_the_step(pool2: Pool) -> None:
    for changed, skipped, lines in pool2(spike_during_the_backward_pass):
        assert not changed and skipped == 1
        assert any("times its usual norm, and its exchange had begun (1 in a row)" in line for line in lines)


# --------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("value", [3e38, 1e12])
@pytest.mark.parametrize("name", ["quantized_update", "topk", "quantized 1bit", "powersgd"])
def test_a_damaged_residual_is_sent_away_or_ends_the_run(name: str, value: float) -> None:
    """Its exchange makes the norm infinite or absurd, while all gradients are finite. The weights stay finite."""
    optimizer = build(name, max_norm=1.0, max_skipped_steps=6)
    usual = median([step(optimizer, number) for number in range(24)][12:])
    state = next(state for state in optimizer.methods[1].states() if state.kind == "residual")
    next(iter(state.tensors.values())).view(-1)[7] = value
    try:
        norms = [step(optimizer, number) for number in range(24, 40)]
        assert norms[0] > 1e4 * usual
        if name == "powersgd":  # M - P Q^T keeps what replicas do not have in common, which a save finds
            with pytest.raises(DamagedParametersError, match="residual of"):
                check_states(optimizer, optimizer.methods[1].states(), {})
        else:
            assert norms[-1] < 1.5 * usual
    except DamagedParametersError as error:
        assert "the memory of a device may be damaged; start the run again" in str(error) and optimizer.guard.alarm
        assert name not in ("quantized_update", "topk"), "their codes send the largest entries first"
    assert optimizer.model is not None and weights(optimizer.model).isfinite().all()


def damaged_state(kind: str, value: float, folder: str) -> str:
    """Return the error of a save after rank 1's state was damaged."""
    model = make_model()
    optimizer = make_optimizer(model, "quantized" if kind == "residual" else "dense")
    optimizer.consistency_interval = 0  # or the comparison finds damage of one replica first
    for number in range(1, 4):
        loss_of(model, number, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 1:
        parameter = optimizer.shards()[1].parameter
        state = optimizer.inner.state[parameter] if kind == "exp_avg" else optimizer.methods[0].states()[0].tensors
        (state[kind] if kind == "exp_avg" else state[optimizer.shards()[1].name]).view(-1)[3] = value
    try:
        dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
    except DamagedParametersError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind, value", [("residual", 1e30), ("residual", math.nan), ("exp_avg", math.inf)])
def test_a_damaged_state_is_not_saved(kind: str, value: float, pool2: Pool, tmp_path: Path) -> None:
    """Every restart from it would fail, and the older checkpoints would be deleted meanwhile."""
    for error in pool2(damaged_state, kind, value, str(tmp_path / "step-3")):
        assert f"step 3: rank 1, {'state.' if kind == 'exp_avg' else ''}" in error and kind in error
    assert not (tmp_path / "step-3" / ".metadata").exists()


@pytest.mark.parametrize("factor", [0.1, 10.0, 1e5])
def test_a_change_of_the_norm_that_lasts_is_followed(factor: float) -> None:
    """It is neither a spike nor damage."""
    optimizer = build("quantized 1bit")
    norms = [step(optimizer, number, 1.0) for number in range(12)]
    for number in range(12, 30):
        norms.append(step(optimizer, number, factor, of_all=True))
    assert norms[-1] == pytest.approx(factor * median(norms[6:12]), rel=0.3)
    assert optimizer.metrics()["skipped_steps"] == 0 and not optimizer.guard.alarm


def test_a_run_that_fails_twice_at_a_step_goes_back_one_checkpoint(tmp_path: Path) -> None:
    folder, steps, newest = str(tmp_path), [20, 40, 60], tmp_path / "step-60" / MANIFEST
    newest.parent.mkdir()
    newest.touch()
    os.utime(newest, (0, 0))
    left_out = []
    for failed in (70, 70, 70, 70, 71, 71):
        note_failed_step(folder, failed)
        left_out.append(newest_to_leave_out(folder, steps))
    assert left_out == [(0, 70), (1, 70), (2, 70), (2, 70), (0, 71), (1, 71)]
    assert newest_to_leave_out(folder, [*steps, 80]) == (0, 0), "it was overcome"
    os.utime(newest, (1e12, 1e12))
    assert newest_to_leave_out(folder, steps) == (0, 0), "the newest is another one"


# ----------------------------------------------------------------------------------------------------- rates


def with_other_rates(method: str, change: str) -> None:
    """Train with rates that rank 1 changes after step 4; "plateau" by its own loss in every step."""
    model = make_model()
    optimizer = make_optimizer(model, method)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for number in range(1, 9):
        loss = loss_of(model, number, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if change == "plateau":
            plateau.step(loss.item() if dist.get_rank() else -number)
        elif number == 4 and dist.get_rank() == 1:
            group = optimizer.param_groups[0]
            group |= {"lr": {"lr": 0.5}, "weight_decay": {"weight_decay": 0.5}, "betas": {"betas": (0.5, 0.95)}}[change]


@pytest.mark.parametrize("method", ["dense", "scape", "quantized_update", "sparta"])
def test_rates_that_differ_end_the_run_on_every_rank(method: str, pool2: Pool) -> None:
    """The weights of replicas would drift apart, or every owner would use its own rate."""
    changes = ("lr", "weight_decay", "betas", "plateau")
    for good, error in (
        each for rank in pool2(attempts, with_other_rates, *((method, c) for c in changes)) for each in rank
    ):
        assert not good and "rank 1 has " in error and "every replica needs the same" in error, error


@pytest.mark.parametrize("name", ["topk", "scape"])
@pytest.mark.parametrize("form", ["files of each rank", "distributed checkpoint"])
def test_the_usual_norm_is_part_of_a_checkpoint(form: str, name: str, tmp_path: Path) -> None:
    """Otherwise a spike after a resume would not be limited as in the uninterrupted run."""
    whole = build(name)
    for number in range(SPIKE_AT):
        step(whole, number)
    assert whole.model is not None
    resumed = build(name)
    assert resumed.model is not None
    if form == "distributed checkpoint":
        dcp.save(checkpoint_states(whole.model, whole), checkpoint_id=tmp_path)
        load_checkpoint(tmp_path, resumed.model, resumed)
    else:
        resumed.load_state_dict(deepcopy(whole.state_dict()))
        resumed.model.load_state_dict(whole.model.state_dict())
    assert step(resumed, SPIKE_AT, factor=100.0) == step(whole, SPIKE_AT, factor=100.0) > 0.0
    assert torch.equal(weights(resumed.model), weights(whole.model))


# ---------------------------------------------------------------------------------------- ranks of one replica


class Block(nn.Module):
    """Its norm is a copy on each rank of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.norm(x))))


def copies_after_a_spike(method: str) -> tuple[float, float]:
    """Return the largest difference of the copies on the ranks of a replica, and how far these have moved."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Block()
    parallelize_module(model, mesh["shard"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    kind = AdamS if method == "scape" else torch.optim.AdamW
    inner = kind(list(model.named_parameters()), lr=1e-2)
    optimizer = replicate(model, inner, method, mesh["replicate"], max_norm=1.0, total_steps=50)
    replica = mesh.get_local_rank("replicate")
    for number in range(12):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * number + replica))
        (model(x).square().mean() * (1e3 if number == 6 and replica == 0 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.norm.weight.detach()
    every = [torch.empty_like(weight) for _ in range(4)]
    dist.all_gather(every, weight)
    return max((one - weight).abs().max().item() for one in every), (weight - 1.0).abs().max().item()


def test_a_spike_leaves_the_copies_of_tensor_parallelism_equal(pool4: Pool) -> None:
    for difference, moved in pool4(copies_after_a_spike, "topk"):
        assert difference == 0.0 < moved


def rates_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Block(), mesh=mesh["shard"])
    optimizer = replicate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "dense", mesh["replicate"])
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_local_rank("shard") == 1:
            optimizer.param_groups[0]["lr"] = 5e-3


def test_rates_of_the_shards_of_one_replica_are_compared(pool4: Pool) -> None:
    for ((good, error),) in pool4(attempts, rates_of_shards, ()):
        assert not good and "rank 1 has lr=0.005 in param group 0, rank 0 has 0.01" in error


class Estimating(torch.optim.AdamW):
    """Keeps an estimate in its groups, as Prodigy does."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.param_groups[0]["d"] = 1e-6

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] = max(group["d"], max(p.grad.norm().item() for p in group["params"]))
        return super().step(closure)


def with_an_estimate(method: str) -> None:
    """Local updates have other estimates on every rank."""
    model = make_model()
    optimizer = replicate(
        model, Estimating(model.parameters(), lr=1e-3, fused=False), method, dist.group.WORLD, consistency_interval=1
    )
    for number in range(1, 6):
        loss_of(model, number, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_previous_step()


def test_estimates_of_the_optimizer_may_differ(pool2: Pool) -> None:
    """But not those of shares of the parameters, which are other estimates than those of all."""
    for (good, error), (shares, refusal) in pool2(attempts, with_an_estimate, ("sparta",), ("quantized_update",)):
        assert good, error
        assert not shares and "rank 1 has d=" in refusal and "needs another method, such as 'quantized'" in refusal


def overlapped_with_unused_parameters(method: str) -> float:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = replicate(
        model, torch.optim.AdamW(model.parameters()), method, dist.group.WORLD, overlap=True, consistency_interval=1
    )
    for _ in range(3):
        optimizer.prepare_last_backward()
        used = model if dist.get_rank() == 0 else model[:1]
        nn.Sequential(*used)(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.stats()["steps"]


@pytest.mark.parametrize("method", ["dense", "quantized_update"])
def test_checks_do_not_meet_an_overlapped_exchange(method: str, pool2: Pool) -> None:
    """Ranks whose backward pass completes other chunks would run them at another place among the collectives."""
    assert pool2(overlapped_with_unused_parameters, method) == [3.0, 3.0]

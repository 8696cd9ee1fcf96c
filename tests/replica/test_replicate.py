"""`replicate` in training loops of real gloo ranks, against one process."""

import math
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.logs import logged
from tests.marks import slow
from tests.pool import Pool, attempts
from tests.replica.own_loop import (
    batch,
    loss_of,
    make_model,
    make_optimizer,
    one_process,
    shard,
    shared,
    through_a_file,
    train,
    weights,
)
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.replicate import Scape, replicate
from torchtitan_scape.topology.in_process import SimulatedReplicas

# ---------------------------------------------------------------------------------------- one process


def distance_to_one_process(shards: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh

    model, replicas = make_model(), None
    if shards > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
        model, replicas = shard(model, mesh["shard"]), mesh["replicate"]
    optimizer = make_optimizer(model, "dense", replicas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, half_each_step)
    train(model, optimizer, range(1, 9), scheduler.step)
    expected = one_process(dist.get_world_size(), range(1, 9), factor=half_each_step)
    return float((weights(model) - expected).norm() / expected.norm())


def half_each_step(step: int) -> float:
    return 0.5**step


@pytest.mark.parametrize("shards", [1, 2])
def test_dense_with_a_scheduler_equals_one_process(shards: int, pool4: Pool) -> None:
    assert max(pool4(distance_to_one_process, shards)) < 1e-6


def norms(reduction: str) -> list[float]:
    """Return gradient norms of losses that are means over a replica's batch, or over the batches of all replicas."""
    found = []
    for method in ("dense", "quantized", "scape"):
        model = make_model()
        optimizer = make_optimizer(model, method, reduction=reduction, max_norm=None)
        for step in range(1, 4):
            loss = loss_of(model, step, dist.get_rank())
            (loss / (dist.get_world_size() if reduction == "sum" else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.stats()["grad_norm"])
    return found


def test_mean_and_sum_have_the_same_norm(pool2: Pool) -> None:
    mean, total = pool2(norms, "mean"), pool2(norms, "sum")
    assert mean[0] == mean[1] and mean[0] == pytest.approx(total[0], rel=1e-5)
    assert min(mean[0]) > 0.1


def after_loading(method: str) -> tuple[list[float], str]:
    """Return the shared weights after some steps without a learning rate, and the log; rank 1 loads other weights."""
    model = make_model()
    optimizer = make_optimizer(model, method, lr=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0 + dist.get_rank())
    with logged() as lines:
        train(model, optimizer, range(1, 9))
    with optimizer.shared_weights():
        return weights(model).unique().tolist(), "\n".join(lines)


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.options.per_replica_weights])
def test_replicas_start_from_weights_that_were_loaded_later(method: str, pool2: Pool) -> None:
    """Local updates do not send the difference to the weights before; all replicas start from those of the first."""
    for found, log in pool2(after_loading, method):
        assert found == pytest.approx([7.0]) and "all replicas start from those of the first one" in log


def errors_of_unequal_replicas() -> list[str]:
    """Return the errors of a step and of a save after rank 1 alone has changed its weights."""
    from torchtitan_scape.checkpoint.own_loop import checkpoint_states
    from torchtitan_scape.core.consistency import ReplicasDifferError

    errors = []
    for steps in (0, 1):
        model = make_model()
        optimizer = make_optimizer(model, "dense")
        train(model, optimizer, range(steps))
        with torch.no_grad():
            model[0].weight += dist.get_rank()
        try:
            train(model, optimizer, range(1)) if steps == 0 else checkpoint_states(model, optimizer)
            errors.append("")
        except ReplicasDifferError as error:
            errors.append(str(error))
    return errors


def test_weights_of_one_rank_are_refused_in_the_first_step_and_in_checkpoints(pool2: Pool) -> None:
    for errors in pool2(errors_of_unequal_replicas):
        for error in errors:
            assert error.startswith("step 1: ranks 0 and 1 differ in '0.weight'"), error
            assert "weights were loaded or changed on some ranks only" in error


def continued(method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a plain loop, and those with `replicate` and one replica from its third step."""
    group, ends = dist.new_group([dist.get_rank()], use_local_synchronization=True), []
    for wrapped in (False, True):
        model = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            if wrapped and step == 2:
                optimizer = replicate(model, optimizer, method, group, total_steps=5)
            train(model, optimizer, range(step, step + 1))
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("method", ["quantized", "quantized_update"])
def test_the_moments_of_a_run_without_replicate_continue(method: str, pool2: Pool) -> None:
    for plain, with_one_replica in pool2(continued, method):
        assert torch.equal(plain, with_one_replica)


def accumulated(method: str, parts: int, overlap: bool) -> torch.Tensor:
    model = make_model()
    optimizer = make_optimizer(model, method, overlap=overlap)
    for step in range(1, 5):
        x, y = batch(step, dist.get_rank())
        for part in range(parts):
            if part == parts - 1:
                optimizer.prepare_last_backward()
            loss = nn.functional.cross_entropy(model(x.chunk(parts)[part]), y.chunk(parts)[part])
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_micro_batches_equal_the_full_batch(pool2: Pool) -> None:
    whole, parts = (pool2(accumulated, "dense", n, False)[0] for n in (1, 4))
    assert (whole - parts).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("method", ["dense", "quantized"])
def test_replicate_with_overlap_does_not_change_a_bit(method: str, pool2: Pool) -> None:
    assert torch.equal(*(pool2(accumulated, method, 2, overlap)[0] for overlap in (False, True)))


# ----------------------------------------------------------------------------------------- all methods


def train_and_resume(name: str) -> dict[str, Any]:
    """Train 18 steps, once without interruption and once from a state that was saved after 11 steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = make_model(seed=rank)  # replica 0 broadcasts its weights
    optimizer = make_optimizer(model, name)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    first = loss_of(model, 100, rank).item()
    train(model, optimizer, range(1, 12), scheduler.step)
    saved = through_a_file([optimizer.state_dict(), model.state_dict(), scheduler.state_dict()])
    train(model, optimizer, range(12, 19), scheduler.step)
    final, stats = shared(model, optimizer), optimizer.stats()

    again = make_model(seed=7)
    again.load_state_dict(saved[1])  # before `replicate`, which broadcasts the weights of replica 0
    resumed = make_optimizer(again, name)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(resumed, T_max=24)
    resumed.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[2])
    train(again, resumed, range(12, 19), scheduler.step)
    rows = [torch.empty_like(final) for _ in range(world)]
    dist.all_gather(rows, final)
    return {
        "losses": (first, loss_of(model, 100, rank).item()),
        "replicas are equal": all(torch.equal(row, final) for row in rows),
        "resumed shared": torch.equal(final, shared(again, resumed)),
        "resumed local": torch.equal(weights(model), weights(again)),
        "resumed stats": stats == resumed.stats(),
        "stats": stats,
    }


@pytest.fixture(scope="module")
def outcomes(pool2: Pool) -> dict[str, list[tuple[bool, Any]]]:
    """Return the outcomes of `train_and_resume` by method and rank. The ranks are started once for all methods."""
    ranks = pool2(attempts, train_and_resume, *((name,) for name in METHODS), timeout=300)
    return dict(zip(METHODS, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_and_resumes_bitwise(name: str, outcomes: dict[str, list[tuple[bool, Any]]]) -> None:
    for good, found in outcomes[name]:
        assert good, found
        before, after = found["losses"]
        assert after < before - 0.05
        assert {key: value for key, value in found.items() if value is False} == {}
        stats = found["stats"]
        assert {"density", "clip_factor", "skipped_steps", "grad_norm", "steps", "sent_bytes", "dense_bytes"} <= set(
            stats
        )
        assert all(math.isfinite(value) for value in stats.values())
        assert stats["steps"] == 18
        # 2 (n - 1) / n messages of 4 bytes per parameter: weights and biases of the three layers.
        assert stats["dense_bytes"] == 4 * (33 * 64 + 65 * 64 + 65 * 10)
        if name == "dense":
            assert stats["sent_bytes"] == pytest.approx(stats["dense_bytes"], abs=64)  # flags, checksum and norm
        elif name not in ("powersgd", "radius"):  # its first steps are dense
            assert stats["sent_bytes"] < 0.5 * stats["dense_bytes"]


def shards_and_replicas(name: str) -> tuple[float, bool, bool]:
    """Train with FSDP2 2 x 2. Return the final loss, whether replicas are equal, and whether a resumed run is equal."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make_model(), mesh["shard"])
    optimizer = make_optimizer(model, name, mesh["replicate"])
    train(model, optimizer, range(1, 8))
    saved = through_a_file(optimizer.state_dict())
    parameters = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    train(model, optimizer, range(8, 15))
    again = shard(make_model(seed=5), mesh["shard"])
    with torch.no_grad():
        for own, values in zip(again.parameters(), parameters, strict=True):
            own.to_local().copy_(values)  # type: ignore[attr-defined]
    resumed = make_optimizer(again, name, mesh["replicate"])
    resumed.load_state_dict(saved)
    train(again, resumed, range(8, 15))
    final = shared(model, optimizer)
    rows = [torch.empty_like(final) for _ in range(4)]
    dist.all_gather(rows, final)
    same = torch.equal(final, shared(again, resumed)) and torch.equal(weights(model), weights(again))
    return loss_of(model, 100, 0).item(), all(torch.equal(final, row) for row in rows), same


@pytest.mark.parametrize("name", [slow("quantized"), "scape", "sparta"])
def test_fsdp2_resumes_bitwise(name: str, pool4: Pool) -> None:
    for loss, equal, same in pool4(shards_and_replicas, name):
        assert loss < 2.2 and equal and same


def trained_by_scape(kind: str) -> torch.Tensor:
    """Return the weights after three steps, with a scheduler of the wrapped optimizer, which must not warn."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    replicas = mesh["replicate"] if kind == "mesh" else dist.group.WORLD
    optimizer = Scape(model.named_parameters(), lr=1e-2, replicas=replicas)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.inner, half_each_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1, 4), scheduler.step)
    return weights(model)


def test_scape_takes_a_mesh_as_replicate_does(pool2: Pool) -> None:
    on_a_mesh, other = pool2(trained_by_scape, "mesh")
    assert torch.equal(on_a_mesh, other) and torch.equal(on_a_mesh, pool2(trained_by_scape, "group")[0])


def test_torchtitan_is_not_imported() -> None:
    """In a new interpreter, so that no module is there because another one imported it."""
    code = (
        "import sys, torch\n"
        "from torchtitan_scape import replicate\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), 'sparta')\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
        "assert 'torchtitan' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------------- simulated replicas


def simulate(method: str, steps: range, state: Any = None) -> tuple[torch.Tensor, Any]:
    """Train two simulated replicas with the data of two ranks. Return the shared weights and the final state."""
    model = make_model()
    optimizer = replicate(
        model,
        partial(torch.optim.AdamW, lr=1e-2),
        method,
        SimulatedReplicas(2),
        max_norm=1.0,
        total_steps=24,
    )
    if state:
        model.load_state_dict(state[1])
        optimizer.load_state_dict(state[0])
    for step in steps:
        for replica in range(2):
            loss_of(model, step, replica).backward()
            optimizer.stash_replica_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return shared(model, optimizer), through_a_file([optimizer.state_dict(), model.state_dict()])


def real(method: str, steps: range) -> torch.Tensor:
    model = make_model()
    optimizer = replicate(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        method,
        dist.group.WORLD,
        max_norm=1.0,
        total_steps=24,
    )
    train(model, optimizer, steps)
    return shared(model, optimizer)


@pytest.mark.parametrize("method", ["dense", "topk", "sparta"])
def test_simulated_replicas_equal_ranks_in_an_own_loop(method: str, pool2: Pool) -> None:
    expected = pool2(real, method, range(1, 10))[0]
    found, _ = simulate(method, range(1, 10))
    assert (found - expected).norm() < 1e-4 * expected.norm()
    _, half = simulate(method, range(1, 6))
    resumed, _ = simulate(method, range(6, 10), half)
    assert torch.equal(found, resumed)


def test_simulated_replicas_with_own_weights_need_an_optimizer_factory() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="pass a function that builds one"):
        replicate(model, torch.optim.AdamW(model.parameters()), "sparta", SimulatedReplicas(2))


def test_a_missing_stash_leaves_the_weights_of_the_first_replica() -> None:
    model = make_model()
    optimizer = replicate(model, partial(torch.optim.AdamW, lr=1e-2), "sparta", SimulatedReplicas(2))
    for replica in range(2):
        loss_of(model, 0, replica).backward()
        optimizer.stash_replica_gradients()
    optimizer.step()
    before = weights(model)
    loss_of(model, 1, 0).backward()
    optimizer.stash_replica_gradients()
    with pytest.raises(ValueError, match="the gradients of 1 replicas were stashed, and 2 replicas are simulated"):
        optimizer.step()
    assert torch.equal(weights(model), before)


# ------------------------------------------------------------------------------- gradients that overflow


def overflows(reduction: str) -> list[str]:
    """Return the methods whose parameters or state are not finite after a gradient entry of 2e38 on every rank."""
    failed = []
    for name in METHODS:
        model = make_model()
        optimizer = make_optimizer(model, name, reduction=reduction)
        for step in range(6):
            loss_of(model, step, dist.get_rank()).backward()
            if step == 3:
                model[0].weight.grad.view(-1)[5] = 2e38
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish_previous_step()
        tensors = [*model.parameters(), *(t for state in optimizer.methods[0].states() for t in state.tensors.values())]
        finite = all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())
        if not finite or optimizer.guard.skipped != 1:
            failed.append(name)
    return failed


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_finite_gradients_whose_sum_overflows_are_skipped(reduction: str, pool2: Pool) -> None:
    assert pool2(overflows, reduction) == [[], []]

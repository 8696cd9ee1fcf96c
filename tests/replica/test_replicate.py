"""`replicate` in plain training loops: equality with one process, every method, resuming, and refusals."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.pool import Pool
from tests.toy import copied
from torchtitan_scape import AdamS, QuantizedOptions, ReplicaOptimizer, replicate
from torchtitan_scape.methods.registry import METHODS

# Options with which a short run reaches every part of a method.
OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"start": 2},
    "radius": {"start": 2, "interval": 3},
    "diloco": {"inner_steps": 4},
    "streaming_diloco": {"inner_steps": 6, "fragments": 2, "delay": 2},
    "sparseloco": {"inner_steps": 4, "density": 0.1},
    "sparta": {"interval": 4, "warmup_steps": 2},
    "scape": {"density": 0.1, "block_size": 64, "density_warmup_steps": 3},
}
STEPS, AT = 12, 7


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    inputs = torch.randn(8, 16, generator=generator)
    return inputs, inputs[:, :8].argmax(1)


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    inputs, labels = batch(step, replica)
    return nn.functional.cross_entropy(model(inputs), labels)


def make_inner(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind = AdamS if name == "scape" else torch.optim.AdamW
    return kind(model.parameters(), lr=1e-2)


def make(name: str, replicas: Any = None, **more: Any) -> tuple[nn.Module, ReplicaOptimizer]:
    model = make_model()
    method = {"method": name, **OPTIONS.get(name, {})}
    world = dist.group.WORLD if replicas is None and dist.get_world_size() > 1 else replicas
    return model, replicate(model, make_inner(name, model), method, world, max_norm=1.0, total_steps=STEPS, **more)


def train(model: nn.Module, optimizer: ReplicaOptimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def one_process(steps: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Parameters, and the norm of the first gradient, of one process that averages over all replicas' batches."""
    model = make_model()
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.zeros(())
    for step in range(steps):
        (sum(loss_of(model, step, r) for r in range(replicas)) / replicas).backward()  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first = first if step else norm
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), first


def dense(sharded: bool, reduction: str, micro: bool) -> tuple[float, float]:
    """Relative distance to one process: of the parameters, and of the first gradient norm."""
    model, replicas = make_model(), dist.group.WORLD
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh["shard"])
        replicas = mesh["replicate"]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = replicate(model, inner, "dense", replicas, max_norm=1.0, reduction=reduction)  # type: ignore[arg-type]
    first = torch.zeros(())
    for step in range(STEPS):
        scale = 1.0 / dist.get_world_size() if reduction == "sum" else 1.0
        for _ in range(2 if micro else 1):
            (loss_of(model, step, dist.get_rank()) * scale / (2 if micro else 1)).backward()
        optimizer.step()
        first = first if step else optimizer.grad_norm.clone()
        optimizer.zero_grad()
    expected, norm = one_process(STEPS, dist.get_world_size())
    return float((flat(model) - expected).norm() / expected.norm()), float((first - norm).abs() / norm)


@pytest.mark.parametrize(
    "sharded, reduction, micro", [(False, "mean", False), (False, "sum", False), (False, "mean", True)]
)
def test_dense_training_equals_one_process(sharded: bool, reduction: str, micro: bool, pool2: Pool) -> None:
    for parameters, norm in pool2(dense, sharded, reduction, micro):
        assert parameters < 1e-6 and norm < 1e-5


def test_dense_training_equals_one_process_under_fsdp2(pool4: Pool) -> None:
    for parameters, norm in pool4(dense, True, "mean", False):
        assert parameters < 1e-6 and norm < 1e-5


def every_method() -> dict[str, dict[str, Any]]:
    """For each method: its shared weights, and whether a run resumed after step AT equals the undisturbed one."""
    found = {}
    for name in METHODS:
        model, optimizer = make(name)
        train(model, optimizer, range(AT))
        saved = copied(model.state_dict()), copied(optimizer.state_dict())
        train(model, optimizer, range(AT, STEPS))
        stats = optimizer.stats()
        with optimizer.shared_weights():
            shared = flat(model).clone()
        again, resumed = make(name)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, range(AT, STEPS))
        found[name] = {"shared": shared, "same": torch.equal(flat(model), flat(again)), "stats": stats}
    return found


def test_every_method_trains_and_resumes_bit_for_bit(pool2: Pool) -> None:
    first, second = pool2(every_method)
    assert first.keys() == METHODS.keys()
    for name, result in first.items():
        assert result["same"] and second[name]["same"], name
        assert torch.equal(result["shared"], second[name]["shared"]), name
        assert not torch.equal(result["shared"], flat(make_model())), name
        stats = result["stats"]
        assert stats["steps"] == STEPS and stats["skipped_steps"] == 0
        assert stats["sent_bytes"] > 0 and stats["dense_bytes"] > 0, name
    assert first["dense"]["stats"]["sent_bytes"] >= first["quantized"]["stats"]["sent_bytes"]


def scheduled() -> tuple[float, float]:
    """Rates after three steps of a scheduler on the returned optimizer, and after a closure's step."""
    model, optimizer = make("dense")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        scheduler.step()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 3, dist.get_rank())
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return optimizer.inner.param_groups[0]["lr"], float(loss)


def test_schedulers_and_closures(pool2: Pool) -> None:
    for rate, loss in pool2(scheduled):
        assert rate == pytest.approx(1e-2 * 0.125) and loss > 0


def simulated() -> bool:
    from topology.in_process import SimulatedReplicas

    model = make_model()
    make_optimizer = partial(torch.optim.AdamW, lr=1e-2)
    optimizer = replicate(model, make_optimizer, {"method": "diloco", "inner_steps": 3}, SimulatedReplicas(2))
    for step in range(6):
        for replica in range(2):
            loss_of(model, step, replica).backward()
            optimizer.stash_replica_gradients()
        optimizer.step()
    anchors = optimizer.saved_model()
    return all(torch.equal(p.detach(), anchors[name]) for name, p in model.named_parameters())


def test_simulated_replicas(pool1: Pool) -> None:
    """After an exchange the replicas' weights are the anchor."""
    assert pool1(simulated) == [True]


def refused(case: str) -> str:
    """The message of the error that a mistake raises on this rank."""
    model, rank = make_model(), dist.get_rank()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        if case == "ddp":
            replicate(DistributedDataParallel(model), inner)
        elif case == "foreign":
            replicate(make_model(), inner)
        elif case == "missing":
            replicate(model, torch.optim.AdamW(model[0].parameters()))
        elif case == "method":
            replicate(model, inner, "zip")
        elif case == "option":
            replicate(model, inner, {"method": "topk", "rank": 3})
        elif case == "optimizer":
            replicate(model, inner, "scape")
        elif case == "mesh":
            replicate(model, inner, "dense", init_device_mesh("cpu", (2, 1)))
        elif case == "overlap":
            replicate(model, inner, "topk", overlap=True)
        elif case == "disagree":
            replicate(model, inner, QuantizedOptions(code="int8" if rank else "int4"), dist.group.WORLD)
        elif case == "state":
            _, saving = make("topk")
            _, loading = make("dense")
            loading.load_state_dict(saving.state_dict())
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "case, text",
    [
        ("ddp", "wrapped in DistributedDataParallel.*model.module"),
        ("foreign", "a parameter of shape .* that the model does not contain"),
        ("missing", "4 trainable parameters are not in the optimizer, first '2.weight'"),
        ("method", "method is 'zip'; it must be one of dense, scape"),
        ("option", "method 'topk' has no option 'rank'; its options are density"),
        ("optimizer", "method 'scape' works with AdamS, not with AdamW"),
        ("mesh", "a mesh of 2 dimensions"),
        ("overlap", "overlap = True does not go with method 'topk'"),
        ("disagree", "rank . has code=.*every replica needs the same"),
        ("state", "the saved state has method='topk', this run has 'dense'"),
    ],
)
def test_mistakes_end_in_one_message_on_every_rank(case: str, text: str, pool2: Pool) -> None:
    import re

    for message in pool2(refused, case):
        assert re.search(text, message), message


def test_torchtitan_is_not_imported() -> None:
    code = "import sys, torchtitan_scape as t; t.replicate, t.Scape; assert 'torchtitan' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

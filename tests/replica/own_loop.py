"""A small classifier, its data and a training loop around `replicate`, for tests inside the ranks of a pool."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.replicate import replicate

# Schedules that fit into a few steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"start": 3},
    "radius": {"start": 3, "interval": 4},
    "topk": {"density": 0.1},
    "onebit_adam": {"warmup_steps": 4},
    "diloco": {"inner_steps": 3},
    "streaming_diloco": {"inner_steps": 4, "fragments": 2},
    "sparseloco": {"inner_steps": 3, "density": 0.1},
    "co2": {"inner_steps": 3},
    "noloco": {"inner_steps": 3},
}


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(step: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :10].argmax(1)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return cross_entropy(model(x), y)


def make_optimizer(
    model: nn.Module,
    method: str,
    replicas: Any = None,
    lr: float = 1e-2,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    kind: Any = AdamS if method == "scape" else torch.optim.AdamW
    section = {"method": method, **OPTIONS.get(method, {}), **(options or {})}
    settings = {"max_norm": 1.0, "total_steps": 24} | more
    return replicate(model, kind(model.parameters(), lr=lr), section, replicas or dist.group.WORLD, **settings)


def train(
    model: nn.Module, optimizer: ReplicaOptimizer, steps: range, after: Callable[[], None] = lambda: None
) -> None:
    for step in steps:
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def weights(model: nn.Module) -> Tensor:
    """Return all parameters, whole and flat."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]).clone()


def shared(model: nn.Module, optimizer: ReplicaOptimizer) -> Tensor:
    optimizer.finish_previous_step()
    with optimizer.shared_weights():
        return weights(model)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def one_process(world: int, steps: range, lr: float = 1e-2, factor: Callable[[int], float] = lambda _: 1.0) -> Tensor:
    """Return the weights of a single process that trains on the mean of all ranks' losses."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in steps:
        loss = sum((loss_of(model, step, rank) for rank in range(world)), torch.zeros(())) / world
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return weights(model)

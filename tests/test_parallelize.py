"""FSDP2 as the trainer applies it: gradients of a single shard are not divided."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from scripts.benchmarks.step_operators import StepCounter
from tests.pool import Pool
from torchtitan_scape.trainer.parallelize import parallelize


def fsdp(model: nn.Module, dims: Any, config: Any) -> nn.Module:
    """Do what TorchTitan's functions do: shard the model, and turn the division of gradients off by a factor of 1."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    cast(FSDPModule, model).set_gradient_divide_factor(1.0)
    return model


def backward(shards: int) -> tuple[list[Tensor], float]:
    """Return the gradients, and the bytes per parameter that the operators of a backward pass move."""
    training = SimpleNamespace(mixed_precision_param="bfloat16", mixed_precision_reduce="float32", dtype="float32")
    levels = SimpleNamespace(levels=SimpleNamespace(active=False))
    config = cast(Any, SimpleNamespace(training=training, comm=SimpleNamespace(mode="default"), sharding=levels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = parallelize(model, cast(Any, SimpleNamespace(tp=1, cp=1, dp_shard=shards)), config, family=fsdp)
    loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum()
    with (counter := StepCounter("cpu")):
        loss.backward()
    gradients = [cast(Any, p.grad).to_local() for p in model.parameters()]
    return gradients, counter.count.bytes / sum(g.numel() for g in gradients)


def test_gradients_of_a_single_shard_are_not_divided(pool1: Pool) -> None:
    """The division by a factor of 1 is a pass over memory, 8 bytes per parameter."""
    ((divided, more),), ((gradients, moved),) = pool1(backward, 2), pool1(backward, 1)
    assert all(torch.equal(a, b) for a, b in zip(divided, gradients, strict=True))
    assert more - moved == 8.0

"""Overlap of the exchange with the backward pass gives the same bits as an exchange after it."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.marks import slow
from tests.pool import Pool
from tests.toy import sum_gradients
from torchtitan_scape.core.parameters import local
from torchtitan_scape.methods.overlap import BackwardOverlap
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

STEPS, NAN_AT, UNUSED_AT, FAILS_AT = 6, 1, (2, 3), 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.norm(x)))


class Net(nn.Module):
    """A net with two blocks that replicas run in different orders, so that their gradients are completed in
    different orders. Some chunks are parts of one gradient, and aligned, so that they are exchanged in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = nn.Linear(6, 12), Block(), Block(), nn.Linear(12, 4)
        self.extra = nn.Linear(12, 12)
        self.block = Block()

    def forward(self, x: Tensor, replica: int, uses_extra: bool) -> Tensor:
        x = self.first(x)
        sides = [self.left, self.right] if replica % 2 else [self.right, self.left]
        x = sum(side(x) for side in sides)  # type: ignore[assignment]
        x = x + self.extra(x) if uses_extra else x
        x = checkpoint(self.block, x, use_reentrant=False)
        if self.fails and torch.is_grad_enabled():
            x.register_hook(_fail)
        return self.last(x)

    fails = False


def _fail(_: Tensor) -> None:
    raise RuntimeError("a failing backward pass")


def train(name: str, overlap: bool, shard: int, options: dict[str, Any]) -> dict[str, Any]:
    from torchtitan_scape.optimizers.elementwise import AdamS
    from torchtitan_scape.replica.optimizer import ReplicaOptimizer

    world, rank = dist.get_world_size(), dist.get_rank()
    replicate = world // shard
    layout = plan_layout(world, ranks_per_node=shard, machine=get_machine("local"), replicate=replicate, shard=shard)
    collectives = ReplicaCollectives(build_groups(layout, timedelta(seconds=60)))
    collectives.chunk_entries = 64
    torch.manual_seed(0)
    model, replica = Net(), rank // shard
    model.block.compile(backend="aot_eager")
    if shard > 1:
        mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))["shard"]
        for module in (model.left, model.right, model.block, model.extra, model):
            fully_shard(module, mesh=mesh)
        sum_gradients(model)
    entry = METHODS[name]
    optimizers = ReplicaOptimizer(
        partial(AdamS, lr=1e-2),
        entry.options(**options),
        OneReplica(collectives),
        model=model,
        max_norm=0.5,
        reduction="sum",
        total_steps=STEPS,
        max_skipped_steps=5,
        overlap=overlap,
    )
    begun: list[int] = []
    unchecked: list[Tensor] = []

    def micro_batch(step: int, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
        x = torch.randn(4, 6, generator=generator)
        x[0, 0] = torch.nan if step == NAN_AT and rank == world - 1 else x[0, 0]
        if number == 1:
            optimizers.prepare_last_backward()
        model(x, replica, uses_extra=step not in UNUSED_AT or replica == 0).square().mean().backward()

    for step in range(STEPS):
        optimizers.zero_grad()
        if step == FAILS_AT and shard == 1:
            optimizers.request_full_exchange()
            model.fails = rank == 0  # after the last layer's gradients; the other replica has started all of them
            try:
                micro_batch(step, 1)
            except RuntimeError:
                assert model.fails
            model.fails = False
            optimizers.zero_grad()
        for number in range(2):
            micro_batch(step, number)
        if isinstance(optimizers._overlap, BackwardOverlap):
            begun.append(len(optimizers._overlap._in_flight))
            for chunk in optimizers._overlap._in_flight:
                chunk.handle.wait()
        unchecked += [local(p.grad).reshape(-1).clone() for p in model.parameters() if p.grad is not None]
        optimizers.step()
    optimizers.finish_previous_step()
    kept = [t for state in optimizers.methods[0].states() for t in state.tensors.values()]
    return {
        "parameters": torch.cat([local(p).detach().reshape(-1) for p in model.parameters()]),
        "kept": torch.cat([t.reshape(-1) for t in kept]) if kept else torch.empty(0),
        "skipped": optimizers.guard.skipped,
        "unchecked": torch.cat(unchecked),
        "chunks": len(optimizers.methods[0].chunks),  # type: ignore[attr-defined]
        "begun": begun,
        "residual": optimizers.metrics().get("residual_norm"),
    }


def both(shard: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = []
    for name, options in (("dense", {}), ("quantized", {"block": 32})):
        runs = [train(name, overlap, shard, options) for overlap in (False, True)]
        found.append((runs[0], runs[1]))
    return found


@pytest.mark.parametrize("world, shard", [(2, 1), slow(4, 2)])
def test_overlap_does_not_change_a_bit(world: int, shard: int, request: pytest.FixtureRequest) -> None:
    """Two micro-batches, a step with a NaN, a step with a missing gradient, and a step after a failed backward pass.

    Blocks are compiled and checkpointed, with and without FSDP.
    """
    ranks = request.getfixturevalue(f"pool{world}")(both, shard)
    for rank in ranks:
        for after, during in rank:
            assert torch.equal(after["parameters"], during["parameters"]) and torch.equal(after["kept"], during["kept"])
            torch.testing.assert_close(after["unchecked"], during["unchecked"], rtol=0, atol=0, equal_nan=True)
            assert after["skipped"] == during["skipped"] == 1 and after["begun"] == []
            assert len(during["begun"]) == STEPS and during["chunks"] > 4
    for method in range(2):
        replicas = [ranks[i][method][1] for i in range(0, world, shard)]
        assert torch.equal(replicas[0]["parameters"], replicas[1]["parameters"])
        # With a missing gradient its chunk and all later ones start at the end; in the next step only its chunk does.
        chunks, (held, alone) = replicas[0]["chunks"], UNUSED_AT
        assert replicas[0]["begun"] == [chunks] * STEPS
        assert replicas[1]["begun"][held] < replicas[1]["begun"][alone] < chunks
        assert all(n == chunks for i, n in enumerate(replicas[1]["begun"]) if i not in UNUSED_AT)


def used_twice() -> None:
    collectives = ReplicaCollectives(dist.group.WORLD)
    from torchtitan_scape.core.parameters import collect_shards
    from torchtitan_scape.methods.interface import MethodContext

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.named_parameters())
    shards, entry = collect_shards(optimizer.param_groups), METHODS["dense"]
    method = entry.method(MethodContext(shards, collectives, optimizer), entry.options())
    assert BackwardOverlap.of([method, method], shards) is None, "simulated replicas ignore it"
    overlap = BackwardOverlap.of([method], shards)
    assert overlap is not None
    overlap.begin(1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()


def test_a_second_gradient_of_a_parameter_raises_an_error(pool2: Pool) -> None:
    for good, text in pool2.outcomes(used_twice):
        assert not good and "' was completed twice; call it before" in text and "[sync] overlap = false" in text

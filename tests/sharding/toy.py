"""A tiny model under FSDP2 on real ranks: uneven rows, norms next to matrices, a group of two modules, empty shards."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.toy import sum_gradients
from torchtitan_scape.sharding import build
from torchtitan_scape.sharding.base import Sharding, param_groups_of
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.topology.layout import Layout, plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.torch_version import fsdp_parameter_group
from torchtitan_scape.topology.traffic import SHARD, TrafficLedger

# Row counts that no number of ranks divides. `gate` is a matrix of one row, so all but one rank have an empty shard.
ROWS, WIDTH = 13, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(3, 5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h))) * self.gate(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, ROWS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@dataclass
class Run:
    """A model in training.

    Attributes:
        gathers: Output of every all-gather, in order.
        gradients: Gradients of every step.
        losses: Loss of every micro-batch.
    """

    model: nn.Module
    sharding: Sharding
    traffic: TrafficLedger
    gathers: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def sent(self) -> dict[tuple[str, str], float]:
        return self.traffic.sent_by_level_and_kind(SHARD)


def layout_of(ranks_per_node: int) -> Layout:
    world = dist.get_world_size()
    return plan_layout(world, ranks_per_node=ranks_per_node, machine=get_machine("local"), replicate=1, shard=world)


def make(
    ranks_per_node: int,
    options: ShardingOptions,
    raw: bool = False,
    param_dtype: torch.dtype | None = None,
    hold: Any = None,
) -> Run:
    """Build the model and install its hooks.

    Args:
        raw: Send quantized parts unencoded.
        hold: Called with the model after `fully_shard`.
    """
    torch.manual_seed(3)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32)}
    fully_shard(model.embedding, **policy)
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard([model.norm, model.output], **policy, reshard_after_forward=False)
    fully_shard(model, **policy)
    sum_gradients(model)
    if hold:
        hold(model)
    layout, traffic = layout_of(ranks_per_node), TrafficLedger()
    options.check(layout)
    with patch.object(build, "_code", lambda *_: None) if raw else nullcontext():
        groups = build.groups_for(options, layout, timedelta(seconds=60))
        sharding = build.build_sharding(model, options, groups, traffic, kernels="torch")
    return Run(model, sharding, traffic)


def train(run: Run, steps: int = 2, micro_batches: int = 2, first: int = 1, skip: int = 0, lr: float = 0.1) -> Run:
    """Run plain gradient-descent steps. `skip` is a step whose gradients are dropped, as in a skipped step."""
    rank = dist.get_rank()
    for step in range(first, first + steps):
        for number in range(micro_batches):
            run.sharding.before_micro_batch(number, number + 1 == micro_batches)
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
            tokens = (torch.randint(0, ROWS, (2, 1), generator=generator) + 3 * torch.arange(6)) % ROWS
            logits = run.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 20
            loss.backward()
            run.losses.append(loss.item())
        trained = [p for p in run.model.parameters() if p.requires_grad]
        run.gradients.append(torch.cat([local(p.grad).reshape(-1) for p in trained]))
        with torch.no_grad():
            for p in trained if step != skip else ():
                local(p).sub_(local(p.grad), alpha=lr)
        for p in trained:
            p.grad = None
        run.sharding.version.changed_if(lambda step=step: step != skip)
    return run


def local(tensor: Any) -> Tensor:
    return tensor.to_local()


def weights(run: Run) -> Tensor:
    return torch.cat([local(p).detach().reshape(-1) for p in run.model.parameters()])


def record_gathers(run: Run) -> Run:
    """Record the output of every all-gather in `run.gathers` from now on."""
    for flat in param_groups_of(run.model):
        group = param_group(flat.modules[0])
        gather = group._all_gather_comm

        def keep(*, _gather: Any = gather, _name: str = flat.name, **arguments: Any) -> Any:
            done = _gather(**arguments)
            run.gathers.append((_name, arguments["output_tensor"].clone()))
            return done

        group._all_gather_comm = _Recording(gather, keep)
    return run


class _Recording:
    def __init__(self, gather: Any, call: Any) -> None:
        self.allocate, self._call = gather.allocate, call

    def __call__(self, **arguments: Any) -> Any:
        return self._call(**arguments)


def param_group(module: Any) -> Any:
    return fsdp_parameter_group(module)

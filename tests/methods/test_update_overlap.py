"""`quantized_update` with overlap, beside the backward pass and the next forward pass, has the bits of no overlap."""

import copy
import io
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.marks import slow
from tests.pool import Pool
from tests.toy import sum_gradients
from torchtitan_scape.core.parameters import collect_shards, local
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.methods.overlap import ForwardOverlap
from torchtitan_scape.methods.quantized_update.columns import Columns
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.stages import Handle

STEPS, NAN_AT, UNUSED_AT, FAILS_AT, LOADS_AT, FULL_AT = 9, 2, (3, 4), 5, 6, 7
WIDTH, LAYERS = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.mix(self.norm(x))))


class Net(nn.Module):
    """Replicas run layers 2 and 3 in different orders, one of them omits a layer in some steps, and the weights of the
    last layer are used without a call of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.fails = False

    def forward(self, tokens: Tensor, replica: int = 0, uses_extra: bool = True) -> Tensor:
        x = self.embeddings(tokens) * self.scale
        order = list(range(LAYERS))
        order[2:4] = order[2:4][:: -1 if replica % 2 else 1]
        for i in order:
            x = checkpoint(self.layers[i], x, use_reentrant=False) if i % 2 else self.layers[i](x)
        x = x + self.extra(x) if uses_extra else x
        if self.fails and torch.is_grad_enabled():
            x.register_hook(_fail)
        return self.head(x) if isinstance(self.head, FSDPModule) else F.linear(x, self.head.weight, self.head.bias)


def _fail(_: Tensor) -> None:
    raise RuntimeError("a failing backward pass")


def build(
    overlap: bool,
    shard: int,
    collectives: ReplicaCollectives,
    options: dict[str, Any],
    other: nn.Module | None = None,
) -> ReplicaOptimizer:
    torch.manual_seed(0)
    model = Net()
    if other is None:
        model.layers[1].compile(backend="aot_eager")
        model.layers[4] = torch.compile(model.layers[4], backend="aot_eager", fullgraph=True)
    if shard > 1:
        shape = dist.get_world_size() // shard, shard
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))["shard"]
        for module in model.layers:
            fully_shard(module, mesh=mesh)
        fully_shard([model.extra, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        sum_gradients(model)
        model.layers[5].set_modules_to_forward_prefetch([model.layers[6]])
    return ReplicaOptimizer(
        partial(Muon, lr=1e-2),
        QuantizedUpdateOptions(block=32, whiten_every=4, **options),
        OneReplica(collectives),
        model=model if other is None else other,
        max_norm=0.5,
        reduction="sum",
        total_steps=STEPS,
        max_skipped_steps=5,
        overlap=overlap,
    )


def train(overlap: bool, shard: int, options: dict[str, Any]) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    replicate, replica = world // shard, rank // shard
    layout = plan_layout(world, ranks_per_node=shard, machine=get_machine("local"), replicate=replicate, shard=shard)
    collectives = ReplicaCollectives(build_groups(layout, timedelta(seconds=60)))
    collectives.chunk_entries = 1536
    optimizers = build(overlap, shard, collectives, options)
    begun: list[int] = []
    left: list[int] = []

    def micro_batch(step: int, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
        tokens = torch.randint(48, (4, 6), generator=generator)
        if number == 1:
            optimizers.prepare_last_backward()
        assert isinstance(optimizers.model, Net)
        logits = optimizers.model(tokens, replica, uses_extra=step not in UNUSED_AT or replica == 0)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1))
        (loss * torch.nan if step == NAN_AT and rank == world - 1 else loss).backward()

    for step in range(STEPS):
        if step == LOADS_AT and shard == 1:
            weights = copy.deepcopy(optimizers.model.state_dict())  # type: ignore[union-attr]
            saved = copy.deepcopy(optimizers.state_dict())
            optimizers = build(overlap, shard, collectives, options)
            optimizers.load_state_dict(saved)
            optimizers.model.load_state_dict(weights)  # type: ignore[union-attr]
        optimizers.zero_grad()
        if step == FAILS_AT and shard == 1:
            optimizers.model.fails = rank == 0  # type: ignore[union-attr, assignment]
            try:
                micro_batch(step, 1)
            except RuntimeError:
                assert rank == 0
            optimizers.model.fails = False  # type: ignore[union-attr, assignment]
            optimizers.zero_grad()
        if step == FULL_AT:
            optimizers.request_full_exchange()
        for number in range(2):
            micro_batch(step, number)
        if optimizers._overlap is not None:
            begun.append(len(optimizers._overlap._in_flight))
        optimizers.step()
        if optimizers._arriving is not None:
            left.append(len(optimizers._arriving._in_flight))
    optimizers.finish_previous_step()
    method: Any = optimizers.methods[0]
    kept = [t.float() for state in [*method.states(), *method.owned.states()] for t in state.tensors.values()]
    return {
        "parameters": torch.cat([local(p).detach().reshape(-1) for p in optimizers.model.parameters()]),  # type: ignore[union-attr]
        "kept": torch.cat([t.reshape(-1) for t in kept]),
        "skipped": optimizers.guard.skipped,
        "columns": [len(group.columns) for group in method._groups],
        "begun": begun,
        "left": left,
    }


def both(shard: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    add = Columns._add

    def add_late(*arguments: Any) -> None:
        time.sleep(0.003)  # the forward pass comes to the layer before its weights
        add(*arguments)

    with patch.object(Columns, "_add", add_late):
        return [train(overlap, shard, options) for overlap in (False, True)]


@pytest.mark.parametrize(
    ("world", "shard", "options"),
    [(2, 1, {}), (2, 1, {"interval": 2}), slow(4, 2, {}), slow(4, 2, {"interval": 2, "update_code": "int8"})],
)
def test_overlap_does_not_change_a_bit(
    world: int, shard: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Two micro-batches, a NaN, a missing gradient, a failed backward pass, a load, a full exchange, bases that change.

    Blocks are compiled and checkpointed, with and without FSDP.
    """
    ranks = request.getfixturevalue(f"pool{world}")(both, shard, options)
    for after, during in ranks:
        assert torch.equal(after["parameters"], during["parameters"])
        assert torch.equal(after["kept"], during["kept"])
        assert after["skipped"] == during["skipped"] == 1
        assert after["begun"] == after["left"] == []
        columns = during["columns"]
        exchanged = [columns[(step + 1) % len(columns)] for step in range(STEPS)]
        assert min(columns) > 3
        # Bases change before the fifth step and the ninth, and the full exchange is that of the eighth.
        begun = [n > 0 for step, n in enumerate(during["begun"]) if step not in UNUSED_AT]
        assert begun == [step not in (4, 8, FULL_AT) for step in range(STEPS) if step not in UNUSED_AT]
        if shard == 1:  # one forward pass is needed after a load
            assert during["left"] == [0 if step == FULL_AT else n for step, n in enumerate(exchanged)]
    for i in range(0, world, shard):
        assert torch.equal(ranks[i][1]["parameters"], ranks[0][1]["parameters"])


def test_modules_wait_for_their_own_weights_only() -> None:
    """The model waits for its direct parameters, and for a module that it does not call, before its forward pass."""
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    shards = collect_shards([{"params": list(model.parameters()), "param_names": names}])
    overlap = ForwardOverlap(model, shards, PhaseTimer(torch.device("cpu")))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    assert not overlap.is_ready
    model(tokens)
    assert overlap.is_ready
    for i in range(len(names)):
        overlap.start([i], (Handle(), lambda: None))
    left: dict[str, set[str]] = {}

    def note(name: str, *_: Any) -> None:
        left[name] = {names[i] for arrival in overlap._in_flight for i in arrival.numbers}

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, name))
    model(tokens)
    assert set(names) - left["embeddings"] == {"embeddings.weight", "scale", "head.weight", "head.bias"}
    assert left["layers.0"] - left["layers.1"] == {name for name in names if name.startswith("layers.1.")}
    assert left["layers.6"] - left["layers.7"] == {name for name in names if name.startswith("layers.7.")}
    assert not overlap._in_flight
    assert copy.deepcopy(model)(tokens).shape == (1, 2, 48)
    with pytest.raises(ValueError, match=r"save model.state_dict\(\) in place of the model"):
        torch.save(model, io.BytesIO())


def test_weights_are_complete_where_a_model_is_saved(pool2: Pool) -> None:
    assert all(pool2(saves))


def saves() -> bool:
    optimizers = started()
    model: Any = optimizers.model
    assert optimizers._arriving is not None
    saved = copy.deepcopy(model.state_dict())
    assert not optimizers._arriving._in_flight
    optimizers.finish_previous_step()
    return all(torch.equal(values, saved[name]) for name, values in model.state_dict().items())


class Stack(nn.Module):
    def __init__(self, uses_layer_early: bool = False) -> None:
        super().__init__()
        self.embeddings, self.head = nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 48)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.uses_layer_early = uses_layer_early

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        if self.uses_layer_early:
            x = x + F.linear(F.linear(x, self.layers[5].mix.weight), self.layers[5].mix.weight.T)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def started(model: nn.Module | None = None) -> ReplicaOptimizer:
    """Return an optimizer of two replicas after two steps, with changes of the weights in flight."""
    layout = plan_layout(2, ranks_per_node=1, machine=get_machine("local"), replicate=2, shard=1)
    collectives = ReplicaCollectives(build_groups(layout, timedelta(seconds=60)))
    collectives.chunk_entries = 1536
    optimizers = build(True, 1, collectives, {}, model)
    for _ in range(2):
        backward(optimizers)
        optimizers.step()
    assert optimizers._arriving is not None and optimizers._arriving._in_flight
    return optimizers


def backward(optimizers: ReplicaOptimizer) -> None:
    optimizers.zero_grad()
    optimizers.prepare_last_backward()
    assert optimizers.model is not None
    optimizers.model(torch.arange(24).view(4, 6)).square().mean().backward()


def test_other_code_sees_complete_weights(pool2: Pool) -> None:
    """A copied model does not wait; evaluation, checks of parameters and compiled modules without their code do."""
    for found in pool2(late, reads):
        assert found == {"copy": True, "check": False, "evaluation": 0, "compiled": [True, True]}


def late(function: Callable[[], Any]) -> Any:
    add = Columns._add

    def add_late(*arguments: Any) -> None:
        time.sleep(0.01)
        add(*arguments)

    with patch.object(Columns, "_add", add_late):
        return function()


def reads() -> dict[str, Any]:
    tokens = torch.arange(24).view(4, 6)
    found: dict[str, Any] = {}
    optimizers = started()
    model: Any = optimizers.model
    arriving: Any = optimizers._arriving
    copy.deepcopy(model)(tokens)
    found["copy"] = bool(arriving._in_flight)
    optimizers.check_parameters(2)
    found["check"] = bool(arriving._in_flight)
    backward(optimizers)
    optimizers.step()
    left: list[int] = []
    model.embeddings.register_forward_hook(lambda *_: left.append(len(arriving._in_flight)))
    with torch.no_grad():
        model(tokens)
    found["evaluation"] = left[0]
    compiled: Any = torch.compile(Stack(), backend="aot_eager", fullgraph=True)
    optimizers = started(compiled)
    original: Any = compiled._orig_mod
    saved = copy.deepcopy(original.state_dict())
    optimizers.finish_previous_step()
    equal = [all(torch.equal(values, saved[name]) for name, values in original.state_dict().items())]
    backward(optimizers)
    optimizers.step()
    early = original(tokens)
    optimizers.wait_for_weights()
    found["compiled"] = [*equal, torch.equal(early, original(tokens))]
    return found


def test_memory_of_an_exchange(pool2: Pool) -> None:
    """Sent messages exist until weights were waited for; a canceled exchange keeps neither gradients nor copies."""
    for kept, left, canceled in pool2(late, memory):
        assert all(kept) and len(kept) > 3 and not any(left)
        assert canceled == (0, 0)


def memory() -> tuple[list[bool], list[bool], tuple[int, int]]:
    optimizers = started()
    sent: list[Any] = []
    send_change = Columns.send_change

    def note(self: Columns, column: Any, code: Any, message: Tensor) -> Any:
        sent.append(weakref.ref(message))
        return send_change(self, column, code, message)

    backward(optimizers)
    with patch.object(Columns, "send_change", note):
        optimizers.step()
    for arrival in optimizers._arriving._in_flight:  # type: ignore[union-attr]
        arrival.wait()
    del arrival
    kept = [one() is not None for one in sent]
    backward(optimizers)
    method: Any = optimizers.methods[0]
    bound, held = len(method._columns.gradients), len(method._bases.copies)
    assert bound and held
    optimizers.zero_grad()
    return kept, [one() is not None for one in sent], (len(method._columns.gradients), len(method._bases.copies))


def test_weights_used_before_their_module_is_called_are_an_error(pool2: Pool) -> None:
    assert all("modified by an inplace operation" in text for text in pool2(late, uses_early))


def uses_early() -> str:
    try:
        backward(started(Stack(uses_layer_early=True)))
    except RuntimeError as error:
        return str(error)
    return ""


def test_copies_in_bases_replace_all_gradients_that_have_one(pool2: Pool) -> None:
    """The table of addresses does not change for a column whose kernels may still run."""
    assert all(pool2(copies))


def copies() -> bool:
    optimizers = started()
    backward(optimizers)
    method: Any = optimizers.methods[0]
    bases, gradients = method._bases, [shard.parameter.grad for shard in optimizers.shards()]
    found = bases.encoded(gradients, ())
    assert bases.copies
    return all(
        (found[i] is bases.copies[i]) if i in bases.copies else found[i] is gradients[i] for i in range(len(found))
    )

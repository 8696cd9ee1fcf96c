"""Muon on stacks of matrices and on blocks of fused matrices: against PyTorch's Muon on each of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optimizers.test_muon import RATES, Gathers
from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape import AdamS, Muon, checkpoint_states, load_checkpoint, replicate
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.quantized_update.method import QuantizedUpdate
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.optimizers import muon
from torchtitan_scape.topology.collectives import ReplicaCollectives

EXPERTS = "layers.0.moe.experts.w1"  # more experts than ranks, no multiple of them
QKV, GQA, CONV1D = "layers.0.attn.c_attn.weight", "layers.1.attn.wqkv.weight", "h.0.attn.c_attn.weight"
MODEL = {
    "wte.weight": (20, 8),
    EXPERTS: (5, 8, 12),
    "layers.0.moe.experts.w13": (5, 12, 6),
    QKV: (24, 8),
    GQA: (20, 8),
    CONV1D: (8, 30),
    "layers.1.mlp.weight": (8, 16),
    "norm.weight": (8,),
}
OPTIONS: dict[str, Any] = RATES | {"split": {QKV: 3, GQA: [12, 4, 4], CONV1D: (14, 8, 8), "*.w13": 2}}


def parameters(seed: int = 1) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in MODEL.items()}


def gradient_of(name: str, step: int, replica: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * replica + list(MODEL).index(name))
    return torch.randn(MODEL[name], generator=generator)


def blocks_of(name: str, values: Tensor) -> list[Tensor]:
    """Return the matrices that are orthogonalized one by one."""
    if name == EXPERTS:
        return list(values)
    if name.endswith("w13"):
        return [half for expert in values for half in expert.split(6)]
    sizes = {QKV: [8, 8, 8], GQA: [12, 4, 4], CONV1D: [14, 8, 8]}.get(name)
    return [values] if sizes is None else list(values.split(sizes, 1 if name == CONV1D else 0))


class Separate:
    """PyTorch's Muon on a parameter for every block, and its AdamW."""

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        own = {name: w for name, w in weights.items() if name.startswith(("layers", "h."))}
        self.blocks = {name: [nn.Parameter(b.clone()) for b in blocks_of(name, w.detach())] for name, w in own.items()}
        self.rest = {name: nn.Parameter(w.detach().clone()) for name, w in weights.items() if name not in own}
        lr, decay, momentum = RATES["lr"], RATES["weight_decay"], RATES["betas"][0]
        every = [block for blocks in self.blocks.values() for block in blocks]
        muon = torch.optim.Muon(every, lr, decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.optimizers = [muon, torch.optim.AdamW(self.rest.values(), **RATES)]

    def step(self, step: int) -> None:
        for name, weight in self.rest.items():
            weight.grad = gradient_of(name, step)
        for name, blocks in self.blocks.items():
            for block, gradient in zip(blocks, blocks_of(name, gradient_of(name, step)), strict=True):
                block.grad = gradient.clone()
        for one in self.optimizers:
            one.step()

    def equal(self, name: str, values: Tensor) -> bool:
        if name in self.rest:
            return torch.equal(self.rest[name], values)
        return all(map(torch.equal, self.blocks[name], blocks_of(name, values)))


def test_equals_pytorchs_muon_on_every_expert_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise with BF16 products."""
    monkeypatch.setattr(muon, "products_dtype", lambda device: torch.bfloat16)
    weights = parameters()
    optimizer, separate = Muon(weights.items(), **OPTIONS), Separate(weights)
    assert len(optimizer.hidden) == 6
    for step in range(1, 6):
        for name, weight in weights.items():
            weight.grad = gradient_of(name, step)
        optimizer.step()
        separate.step(step)
        assert all(separate.equal(name, weight.detach()) for name, weight in weights.items()), step


def test_without_a_split_a_matrix_is_whole() -> None:
    weights, split = parameters(), parameters()
    for own, options in ((weights, RATES), (split, RATES | {"split": {QKV: 1}})):
        optimizer = Muon(own.items(), **options)
        for name, weight in own.items():
            weight.grad = gradient_of(name, 1)
        optimizer.step()
    assert all(map(torch.equal, weights.values(), split.values()))


def step_sharded() -> list[str]:
    """Return the names of the parameters whose shards differ from an unsharded Muon."""
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), parameters()
    cut = {name: nn.Parameter(distribute_tensor(own.detach(), mesh, [Shard(0)])) for name, own in whole.items()}
    ours, theirs = Muon(cut.items(), **OPTIONS), Muon(whole.items(), **OPTIONS)
    for step in range(1, 5):
        for name, own in whole.items():
            own.grad = None if (name, step) == (EXPERTS, 2) else gradient_of(name, step)
            cut[name].grad = None if own.grad is None else distribute_tensor(own.grad, mesh, [Shard(0)])
        ours.step()
        theirs.step()
    return [name for name in MODEL if not torch.equal(cut[name].full_tensor(), whole[name])]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_experts_and_blocks_equal_unsharded_ones(ranks: int, request: pytest.FixtureRequest) -> None:
    """Two ranks have 3 and 2 experts, four have 2, 2, 1 and none; blocks lie on several ranks."""
    assert request.getfixturevalue(f"pool{ranks}")(step_sharded) == [[]] * ranks


def step_on_two_axes() -> bool:
    """Return whether experts that two axes of a mesh divide, as with expert parallelism, equal unsharded ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "shard"))
    values = torch.randn((6, 8, 4), generator=torch.Generator().manual_seed(7))
    cut, whole = nn.Parameter(distribute_tensor(values, mesh, [Shard(0), Shard(0)])), nn.Parameter(values.clone())
    for parameter in (cut, whole):
        optimizer = Muon([(EXPERTS, parameter)], **RATES)
        for step in range(3):
            gradient = torch.randn((6, 8, 4), generator=torch.Generator().manual_seed(step))
            is_cut = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0), Shard(0)]) if is_cut else gradient
            optimizer.step()
    return torch.equal(cut.full_tensor(), whole)  # type: ignore[attr-defined]


def test_experts_on_two_axes(pool4: Pool) -> None:
    assert all(pool4(step_on_two_axes))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(8, 24, bias=False)
        self.experts = nn.ParameterDict({"w1": torch.randn(5, 8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).split(8, -1)
        return torch.einsum("bi,eio->bo", torch.softmax(q * k, -1) * v, self.experts["w1"])


def train_with_fsdp() -> float:
    """Return the largest difference to an unsharded run after three steps."""
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        models.append(nn.ModuleDict({"layers": nn.ModuleList([Experts(), Experts()])}))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in models[0]["layers"]:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    for model in models:
        optimizer = Muon(model.named_parameters(), lr=0.01, split={"*.wqkv.weight": 3})
        assert len(optimizer.hidden) == 4
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            for layer in model["layers"]:  # type: ignore[union-attr]
                x = x + layer(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a.full_tensor() - b).abs().max()) for a, b in pairs if isinstance(a, DTensor))


def test_a_model_sharded_by_fsdp2(pool2: Pool) -> None:
    assert all(far < 1e-3 for far in pool2(train_with_fsdp))


def refused() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError) as error:
        Muon([(EXPERTS, nn.Parameter(distribute_tensor(torch.ones(4, 8, 8), mesh, [Shard(2)])))])
    return str(error.value)


def test_divided_experts_are_refused(pool2: Pool) -> None:
    assert all("stacks of whole matrices, sharded along their first dimension only" in text for text in pool2(refused))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"*.wqkv": 3}, r"'\*.wqkv', which matches none of Muon's matrices, such as"),
        ({"wte.*": 2}, "matches none of Muon's matrices"),
        ({QKV: 5}, r"a matrix of \(24, 8\), is 5; it must divide the rows"),
        ({QKV: (8, 8)}, r"is \(8, 8\), 16 together; the sizes must add up"),
        ({QKV: 0}, "is 0 of type int; it must be a number"),
        ({QKV: "qkv"}, "is 'qkv' of type str; it must be a number"),
        ({QKV: [True, 23]}, r"is \[True, 23\] of type list; .* positive integers"),
        ({QKV: (2, (4, 4, 4))}, "Blocks are contiguous; leave out matrices whose query, key and value are interleaved"),
        ([QKV], r"split, of type list, must be a dictionary .* such as {'\*.c_attn.weight': 3}"),
        ({5: 3}, "must be a dictionary from names or patterns to blocks"),
        ({QKV: 3, "layers.0.attn.*": 3}, "both match 'layers.0.attn.c_attn.weight'; keep one"),
        ({"*.thrice": 3}, r"as in transformers' Conv1D: pass the sizes \(8, 8, 8\)"),
    ],
)
def test_impossible_splits_are_refused(split: Any, message: str) -> None:
    named = [*parameters().items(), ("layers.0.thrice", nn.Parameter(torch.zeros(8, 24)))]
    with pytest.raises(ValueError, match=message):
        Muon(named, split=split)


def test_the_blocks_of_a_square_matrix_are_rows() -> None:
    name = "layers.0.out.weight"
    optimizer = Muon([(name, nn.Parameter(torch.ones(8, 8)))], split={name: (4, 4)})
    assert [part.shape for part, _ in optimizer.parts(optimizer.hidden[0], torch.ones(8, 8))] == [(4, 8), (4, 8)]


def test_replicas_that_divide_the_matrices_have_the_same_bits() -> None:
    plain, gathers, every = parameters(), Gathers(2), [parameters() for _ in range(2)]

    def train(weights: dict[str, nn.Parameter], **more: Any) -> None:
        optimizer = Muon(weights.items(), **OPTIONS, **more)
        for step in range(1, 4):
            for name, weight in weights.items():
                weight.grad = gradient_of(name, step)
            optimizer.step()

    train(plain)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: train(every[i], share=gathers.share(i)), range(2)))
    assert gathers.calls == 3 * 2  # four matrices; each replica updates the stacks
    assert all(torch.equal(weights[name], plain[name]) for weights in every for name in MODEL)


@pytest.mark.parametrize("interval", [1, 2])
def test_quantized_updates_without_an_encoding_are_dense_muon(interval: int) -> None:
    """A replica owns whole stacks and fused matrices. A step of a half of the parameters counts for two."""
    options = {"block": 32, "whiten_every": 3, "interval": interval}

    def run(collectives: ReplicaCollectives) -> dict[str, Tensor]:
        optimizer = Muon(parameters().items(), **OPTIONS)
        context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        method = QuantizedUpdate(context, QuantizedUpdateOptions(**options))
        for step in range(1, 4):
            method.request_full_exchange()
            own = [gradient_of(name, step, collectives.replica).view(-1) for name in MODEL]
            with torch.no_grad():
                method.step(own, StepInfo(step, torch.tensor(True)))
                method.finish_previous_step(True)
        assert method.planned_bytes() > 0
        bases = next(state for state in method.states() if state.kind == "basis").tensors
        assert any(QKV in name for name in bases) and not any("experts" in name for name in bases)
        return {shard.name: shard.parameter.detach() for shard in context.shards}

    weights = parameters()
    optimizer = Muon(weights.items(), **OPTIONS)
    for step in range(1, 4):
        for name, weight in weights.items():
            weight.grad = torch.stack([gradient_of(name, step, replica) for replica in range(3)]).mean(0)
        optimizer.step()
    for found in run_replicas(3, run):
        for name, values in found.items():
            assert (values - weights[name]).norm() < 1e-2 * weights[name].norm(), name


# ---------------------------------------------------------------------------------------- states of other choices


def test_a_state_of_another_choice_is_refused() -> None:
    weights = parameters()
    saved = Muon(weights.items(), **RATES).state_dict()
    fewer = Muon(weights.items(), **RATES, matrices=["layers.*"])
    with pytest.raises(ValueError, match=r"another choice .*Muon updated 'h.0.attn.c_attn.weight', and AdamW does in"):
        fewer.load_state_dict(saved)
    names = f"'{EXPERTS}', 'layers.0.moe.experts.w13', '{QKV}' and 2 others"
    with pytest.raises(ValueError, match=f"AdamW updated 'h.0.attn.c_attn.weight', and Muon does in .*, {names}"):
        Muon(weights.items(), **RATES).load_state_dict(fewer.state_dict())
    Muon(weights.items(), **OPTIONS).load_state_dict(saved)  # the blocks are no part of the state


@pytest.mark.parametrize(
    ("kind", "steps", "message"),
    [
        (torch.optim.AdamW, 1, "8 of 8 parameters have a second moment"),
        (AdamS, 1, "0 of 8 parameters have a second moment"),
        (torch.optim.AdamW, 0, "it has no moments of 'wte.weight'"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(kind: Any, steps: int, message: str) -> None:
    """Without the advice to choose the matrices of the saved run, as there were none."""
    weights = parameters()
    other = kind(weights.items(), lr=0.1)
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = gradient_of(name, step)
        other.step()
    with pytest.raises(ValueError, match=f"state is not Muon's: {message}.*; load it into .* start Muon") as error:
        Muon(weights.items()).load_state_dict(other.state_dict())
    assert "matrices=" not in str(error.value)


def own_loop(method: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 8)), "layers": nn.ModuleList([nn.Linear(8, 8)])})
    optimizer = replicate(model, Muon(model.named_parameters(), lr=0.01, **options), method, dist.group.WORLD)
    for layer in (model["net"], model["layers"][0]):  # type: ignore[index]
        layer(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def load_another_choice(path: str, method: str) -> tuple[str, str]:
    """Return the error of another choice, and the message of the same."""
    both = ["net.0.weight", "layers.*.weight"]
    dcp.save(checkpoint_states(*own_loop(method, matrices=both)), checkpoint_id=path)
    with pytest.raises(ValueError) as error:
        load_checkpoint(path, *own_loop(method))
    return str(error.value), load_checkpoint(path, *own_loop(method, matrices=both))


@pytest.mark.parametrize("method", ["dense", "sparta", "quantized_update"])
def test_a_checkpoint_of_another_choice_is_refused(method: str, pool2: Pool, tmp_path: Path) -> None:
    for error, _ in pool2(load_another_choice, str(tmp_path / "checkpoint"), method):
        assert "another choice of matrices: Muon updated 'net.0.weight', and AdamW does in this run" in error


def disagree(key: str) -> str:
    first = dist.get_rank() == 0
    options = {"matrices": ["net.0.weight"] if first else ["layers.*.weight"]}
    if key == "split":
        options = {"split": {"layers.*.weight": 2 if first else 4}}  # type: ignore[dict-item]
    with pytest.raises(ValueError) as error:
        own_loop("dense", **options)
    return str(error.value)


@pytest.mark.parametrize("key", ["matrices", "split"])
def test_replicas_with_other_choices_are_refused(key: str, pool2: Pool) -> None:
    assert all(f"has {key}=" in text and "every replica needs the same" in text for text in pool2(disagree, key))


def whitened_names() -> set[str]:
    """Return the names with a basis, of a run whose user chooses the matrices."""
    from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions

    torch.manual_seed(5)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 8)), "layers": nn.ModuleList([nn.Linear(8, 8)])})
    optimizer = Muon(model.named_parameters(), lr=0.01, matrices=["net.0.weight"])
    wrapped = replicate(model, optimizer, QuantizedUpdateOptions(whiten_every=2), dist.group.WORLD)
    states = wrapped.methods[0].states()
    return {name.split(".weight")[0] for state in states if state.kind == "basis" for name in state.tensors}


def test_bases_follow_the_choice(pool2: Pool) -> None:
    assert pool2(whitened_names) == [{"net.0"}] * 2

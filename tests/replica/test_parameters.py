"""Frozen, transposed, scalar, copied and unevenly sharded parameters; skipped steps; ranks that differ."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool, attempts
from tests.replica.own_loop import OPTIONS, make_model, make_optimizer, train
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.elementwise import AdamS
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.replica.replicate import replicate


class Scaled(nn.Module):
    """Two layers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def optimizer_of(model: nn.Module, method: str, **more: Any) -> Any:
    kind: Any = AdamS if method == "scape" else torch.optim.AdamW
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    section = {"method": method, **OPTIONS.get(method, {})}
    return replicate(model, kind(trained, lr=0.01), section, dist.group.WORLD, total_steps=24, **more)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    model(torch.randn(4, 16, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same_on_all_ranks(values: Tensor) -> bool:
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, values)
    return all(torch.equal(values, other) for other in each)


# ------------------------------------------------------------------------------------------ shapes and memory


def train_a_scalar(method: str, kind: Any = None) -> bool:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = optimizer_of(model, method)
    if kind is not None:
        optimizer = replicate(model, kind(model.named_parameters(), lr=0.01), method, dist.group.WORLD)
    for number in range(8):
        step(model, optimizer, number)
    optimizer.flush()
    with optimizer.shared_weights():
        return bool(model.scale.isfinite()) and float(model.scale) != 1.0 and same_on_all_ranks(model.scale.detach())


def every_method_trains_a_scalar() -> list[str]:
    with_muon = ("dense", "quantized_update", "sparta")  # which has its state before `replicate`
    return [method for method in METHODS if not train_a_scalar(method)] + [
        f"{method} with Muon" for method in with_muon if not train_a_scalar(method, Muon)
    ]


def test_every_method_trains_parameters_without_dimensions(pool2: Pool) -> None:
    assert pool2(every_method_trains_a_scalar) == [[], []]


def transposed(method: str, later: bool = False) -> bool:
    torch.manual_seed(0)
    model = Scaled()
    if not later:
        model.layers[0].weight = nn.Parameter(torch.randn(16, 16).T)
    optimizer = optimizer_of(model, method)
    if later:  # as `model.to(memory_format=torch.channels_last)` does
        model.layers[0].weight.data = torch.randn(16, 16).T
    for number in range(8):
        step(model, optimizer, number)
    with optimizer.shared_weights():
        return same_on_all_ranks(model.layers[0].weight.detach())


def every_method_with_a_transposed_weight() -> list[tuple[bool, Any]]:
    refused_later = ((method, True) for method in ("diloco", "sparta", "quantized_update"))
    return attempts(transposed, *((method,) for method in METHODS), *refused_later)


def test_transposed_weights_train_or_are_refused_at_construction(pool2: Pool) -> None:
    """Or in the first step, if the model was converted in between."""
    refused = {"quantized_update"} | {name for name, entry in METHODS.items() if entry.options.per_replica_weights}
    for rank in pool2(every_method_with_a_transposed_weight):
        for method, (works, text) in zip([*METHODS, "diloco", "sparta", "quantized_update"], rank, strict=True):
            if method in refused:
                message = (
                    f"ValueError: method '{method}' needs contiguous parameters, and 'layers.0.weight' is not; choose "
                    "another method, such as 'quantized', or set its data to data.contiguous()"
                )
                assert not works and text.strip().splitlines()[-1] == message
            else:
                assert works and text, method


def test_muon_refuses_steps_on_parameters_in_bf16() -> None:
    model = Scaled()
    optimizer = Muon(list(model.named_parameters()))
    optimizer.check_dtypes()  # as `replicate` does
    model.bfloat16()
    with pytest.raises(ValueError, match=r"Muon needs parameters in FP32, and 'scale' is torch.bfloat16"):
        optimizer.step()


# -------------------------------------------------------------------------------------------------- frozen


def frozen_is_broadcast() -> tuple[bool, bool]:
    torch.manual_seed(dist.get_rank())
    model = Scaled()
    model.layers[0].weight.requires_grad_(False)
    optimizer = optimizer_of(model, "dense")
    before = model.layers[0].weight.clone()
    step(model, optimizer, 0)
    return same_on_all_ranks(before), torch.equal(before, model.layers[0].weight)


def test_frozen_parameters_are_those_of_replica_0(pool2: Pool) -> None:
    assert pool2(frozen_is_broadcast) == [(True, True)] * 2


def freeze(case: str) -> None:
    model = Scaled()
    match case:
        case "in the optimizer":
            model.layers[0].weight.requires_grad_(False)
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", dist.group.WORLD)
        case "in the optimizer of one rank":
            model.layers[0].weight.requires_grad_(dist.get_rank() == 0)
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", dist.group.WORLD)
        case "during the run":
            optimizer = optimizer_of(model, "dense")
            step(model, optimizer, 0)
            model.layers[0].weight.requires_grad_(False)
            step(model, optimizer, 1)
        case "on one rank":
            model.layers[0].weight.requires_grad_(dist.get_rank() == 1)
            optimizer_of(model, "dense")
        case "other shapes":
            model.table = nn.Parameter(torch.zeros(2 + dist.get_rank()), requires_grad=False)
            optimizer_of(model, "dense")


FROZEN = {
    "in the optimizer": r"the frozen parameter 'layers.0.weight', .*; pass \[\(name, p\) for name, p in",
    "in the optimizer of one rank": "the optimizer has the frozen parameter 'layers.0.weight'",
    "during the run": "'layers.0.weight' was frozen after the optimizer was built; build a new one without it",
    "on one rank": "parameters=.*every replica needs the same model",
    "other shapes": "frozen parameters=.*every replica needs the same model",
}


def freeze_all() -> list[tuple[bool, Any]]:
    return attempts(freeze, *((case,) for case in FROZEN))


def test_frozen_parameters_that_would_change_or_differ_are_refused(pool2: Pool) -> None:
    for rank in pool2(freeze_all):
        for (accepted, text), pattern in zip(rank, FROZEN.values(), strict=True):
            assert not accepted, pattern
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(text.strip().splitlines()[-1])


class Phases(nn.Module):
    """A complex scale, stored as torch.view_as_real, and a frozen complex one."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(16, dtype=torch.complex64)
        self.phase = nn.Parameter(torch.view_as_real(values))
        self.frozen = nn.Parameter(values, requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) * (torch.view_as_complex(self.phase) * self.frozen).abs()  # type: ignore[no-any-return]


def follow_the_advice() -> list[bool]:
    """Train with the parameters that messages advise: named ones that are not frozen, complex ones as real ones."""
    results = []
    for kind in (Muon, torch.optim.AdamW):
        torch.manual_seed(dist.get_rank())
        model = Phases()
        model.layers[1].requires_grad_(False)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = replicate(model, kind(trained, lr=0.01), "dense", dist.group.WORLD)
        before = model.phase.detach().clone()
        step(model, optimizer, 0)
        results += [same_on_all_ranks(p.detach()) for p in model.parameters()] + [not torch.equal(before, model.phase)]
    return results


def test_the_advice_for_frozen_and_complex_parameters_works(pool2: Pool) -> None:
    for results in pool2(follow_the_advice):
        assert all(results)


def test_a_refused_dtype_is_named_by_its_place_without_names() -> None:
    values = [torch.zeros(2), torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.int64)]
    parameters = [nn.Parameter(each, requires_grad=False) for each in values]
    with pytest.raises(
        ValueError, match=r"parameter 1 of param group 0, of shape \(3,\), has dtype torch.complex64; only"
    ):
        AdamS(parameters[:2])
    with pytest.raises(
        ValueError, match=r"parameter 0 .* dtype torch.int64; .* trained: leave it out of the optimizer$"
    ):
        AdamS(parameters[2:])


# ------------------------------------------------------------------------------------------------ skipped steps


def skip_the_first_step(options: dict[str, Any]) -> tuple[bool, Tensor, Tensor]:
    """Fused SGD whose first gradient is infinite on one rank."""
    weights = []
    for first in (1, 0):
        model = nn.Linear(16, 4, bias=False)
        nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True, **options)
        optimizer = replicate(model, sgd, "dense", dist.group.WORLD)
        for number in range(first, 4):
            model(torch.full((2, 16), float(number))).mean().backward()
            if number == 0 and dist.get_rank() == 1:
                model.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    return optimizer.guard.skipped == 1, weights[0], weights[1]


def skip_with_options() -> list[tuple[bool, Tensor, Tensor]]:
    return [skip_the_first_step(options) for options in ({"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {})]


def test_a_skipped_first_step_of_fused_sgd_changes_nothing(pool2: Pool) -> None:
    for results in pool2(skip_with_options):
        for skipped, without, with_skipped_step in results:
            assert skipped and with_skipped_step.isfinite().all()
            assert torch.equal(without, with_skipped_step)


def scale_gradients() -> str:
    model = nn.Linear(16, 4)
    optimizer = optimizer_of(model, "dense")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x = torch.randn(2, 16)
    if dist.get_rank() == 1:
        x[0, 0] = torch.inf
    scaler.scale(model(x).mean()).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        return str(error)
    return ""


def test_a_grad_scaler_is_refused_on_all_ranks(pool2: Pool) -> None:
    for text in pool2(scale_gradients):
        assert text.startswith("torch.amp.GradScaler is not supported")


# ----------------------------------------------------------------------------------------- agreement of ranks


def with_another_key_on_one_replica() -> str:
    """2 replicas of 2 shards, of which one rank has a further key in its param group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(make_model(), mesh=mesh["shard"])
    adamw = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 3:
        adamw.param_groups[0]["lr_scale"] = 0.5
    try:
        replicate(model, adamw, "dense", mesh["replicate"])
    except ValueError as error:
        return str(error)
    return ""


def test_a_setting_of_one_rank_ends_all_ranks(pool4: Pool) -> None:
    for text in pool4(with_another_key_on_one_replica):
        assert "lr_scale of group 0=" in text and "every replica needs the same" in text


def state_before_and_after(method: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of a trained optimizer, before and after it loads its own `state_dict`."""
    model = make_model()
    optimizer = make_optimizer(model, method)
    train(model, optimizer, range(7))
    found = []
    for _ in range(2):
        optimizer.finish_previous_step()
        states = optimizer.methods[0].states()
        found.append({f"{s.kind}.{name}": values.clone() for s in states for name, values in s.tensors.items()})
        optimizer.load_state_dict(optimizer.state_dict())
    return found[0], found[1]


def states_of_methods() -> list[str]:
    different = []
    for method in METHODS:
        before, after = state_before_and_after(method)
        if before.keys() != after.keys() or not all(torch.equal(before[key], after[key]) for key in before):
            different.append(method)
    return different


def test_loading_the_own_state_changes_nothing(pool2: Pool) -> None:
    assert pool2(states_of_methods) == [[], []]


# ------------------------------------------------------------------------------------- shards of one replica


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.norm(x))))


def norm_beside_tensor_parallelism() -> tuple[float, float]:
    """Return the gradient norm with a LayerNorm of plain tensors on both tensor-parallel ranks, and the right norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, whole = Normed(), Normed()
    whole.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    optimizer = replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), "dense", max_norm=1.0)
    x = torch.randn(8, 16)
    for one in (model, whole):
        one(x).square().sum().backward()
    optimizer.step()
    return optimizer.grad_norm.item(), float(nn.utils.get_total_norm([p.grad for p in whole.parameters()]))


def test_copies_of_a_parameter_are_counted_once_in_the_norm(pool2: Pool) -> None:
    for found, wanted in pool2(norm_beside_tensor_parallelism):
        assert found == pytest.approx(wanted, rel=1e-5)


def step_with_sharded_blocks_only(reduces: bool, closure: bool) -> list[float]:
    """Take a step with a plain norm on both shards of a replica, and return its weights. A closure has no overlap."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = Normed(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for block in (model.a, model.b):
        fully_shard(block, mesh=mesh["shard"])
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = replicate(model, sgd, "dense", mesh["replicate"], overlap=not closure)
    optimizer.prepare_last_backward()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))

    def backward() -> None:
        model(x).square().sum().backward()
        for parameter in model.norm.parameters() if reduces else ():
            dist.all_reduce(parameter.grad, group=mesh["shard"].get_group())

    if not closure:
        backward()
    optimizer.step(backward if closure else None)
    return model.norm.weight.tolist()  # type: ignore[no-any-return]


def test_gradients_that_fsdp_does_not_reduce_are_refused(pool2: Pool) -> None:
    """The copies of a parameter outside the sharded modules diverged within a replica."""
    refused = r"\d parameters, first 'norm.\w+', are not sharded, .* call fully_shard on the model too"
    ranks = pool2(attempts, step_with_sharded_blocks_only, (False, False), (False, True), (True, False))
    for *wrong, (reduced, weights) in ranks:
        for good, text in wrong:
            assert not good and re.search(refused, text.splitlines()[-1]), text
        assert reduced and weights == ranks[0][2][1]


def overlap_with_uneven_shards() -> tuple[list[int], bool]:
    """Of 1,025 rows one shard has 513 and the other 512, one chunk less. Compare with a run without overlap."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weights, chunks = [], 0
    for overlap in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Embedding(1025, 128)), mesh=mesh["shard"])
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = replicate(model, adamw, "dense", mesh["replicate"], overlap=overlap)
        chunks = len(optimizer.methods[0].chunks)
        for number in range(3):
            generator = torch.Generator().manual_seed(4 * number + dist.get_rank())
            optimizer.prepare_last_backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(torch.randint(1025, (64,), generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    numbers: list[Any] = [None] * 4
    dist.all_gather_object(numbers, chunks)
    return numbers, all(map(torch.equal, *weights))


def test_overlap_with_uneven_shards_does_not_change_a_bit(pool4: Pool) -> None:
    for chunks, equal in pool4(overlap_with_uneven_shards):
        assert len(set(chunks)) == 2 and equal

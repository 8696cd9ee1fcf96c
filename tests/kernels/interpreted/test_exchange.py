"""Exchanges without a buffer in Triton's interpreter, bitwise against PyTorch; started like test_interpreted.py."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from typing import Any

import torch
from torch import Tensor, nn

from tests.kernels.codec.checks import same
from tests.marks import slow
from topology.in_process import SimulatedReplicas
from topology.process_groups import ProcessGroupCollectives
from torchtitan_scape import AdamS, Muon
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.co2.method import Co2
from torchtitan_scape.methods.co2.options import Co2Options
from torchtitan_scape.methods.diloco.options import DilocoOptions
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.local_options import LocalOptions
from torchtitan_scape.methods.local_updates import LocalUpdates
from torchtitan_scape.methods.onebit_adam.method import OnebitAdam
from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized_update.method import QuantizedUpdate
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.radius.method import Radius
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.methods.sparta.method import Sparta
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.methods.streaming_diloco.options import StreamingDilocoOptions

# Several tiles, a short last block, less than a block, nothing, one entry.
SHAPES = [(20, 130), (129,), (4, 5), (0, 4), (1,)]


def parameters(dtype: torch.dtype, seed: int) -> list[nn.Parameter]:
    """Return parameters of `SHAPES`; the first is not aligned to 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    shifted = torch.cat((drawn[0].new_zeros(1), drawn[0].flatten()))[1:].view(SHAPES[0])
    return [nn.Parameter(tensor) for tensor in (shifted, *drawn[1:], drawn[0].clone())]


def all_tensors(methods: list[Any]) -> list[Tensor]:
    tensors = [shard.parameter.detach() for method in methods for shard in method.context.shards]
    return tensors + [t for method in methods for state in method.states() for t in state.tensors.values()]


def sparta(backend: str, replicas: int, dtype: torch.dtype, steps: int = 3, **options: Any) -> list[Tensor]:
    """Return parameters and states after a few steps, of which the second one is skipped."""
    simulated, methods = SimulatedReplicas(replicas), []
    for endpoint in simulated.endpoints:
        endpoint.chunk_entries = 4096
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters(dtype, 0))]
        optimizer = Muon(named, lr=1e-2)
        shards = collect_shards(optimizer.param_groups)
        context = MethodContext(shards, endpoint, optimizer, total_steps=20, kernels=backend)
        methods.append(Sparta(context, SpartaOptions(**options)))

    def work(i: int) -> None:
        for number in range(1, steps + 1):
            generator = torch.Generator().manual_seed(10 * number + i)
            for shard in methods[i].context.shards:
                moved = shard.parameter.detach()
                moved += torch.randn(moved.shape, generator=generator).to(dtype)
            methods[i].exchange(StepInfo(number, torch.tensor(number != 2)))

    with torch.no_grad():
        simulated.run(work)
    return all_tensors(methods)


@pytest.mark.parametrize(
    ("replicas", "dtype", "options"),
    [
        (2, torch.float32, {"code": "1bit_unbiased", "warmup_steps": 2}),
        slow(3, torch.float32, {"code": "1bit", "warmup_steps": 2}),
        slow(5, torch.float32, {"code": "2bit", "warmup_steps": 0, "orthogonalize": True}),
        slow(2, torch.bfloat16, {"code": "e2m1", "warmup_steps": 0, "interval": 1, "steps": 1}),
    ],
)
def test_sparta_equals_pytorch(replicas: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    one, other = (sparta(backend, replicas, dtype, **options) for backend in ("torch", "triton"))
    for a, b in zip(one, other, strict=True):
        if dtype == torch.float32:
            assert same(a.contiguous(), b.contiguous())
        else:  # the interpreter rounds to BF16 toward zero
            torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-6, atol=2.0**-6)


def quantized(backend: str, replicas: int, full: int = 0, **options: Any) -> list[Tensor]:
    """Return the synchronized gradients and the errors of four steps, of which the second one is skipped.

    full: Step of a full exchange.
    """
    simulated, methods, found = SimulatedReplicas(replicas), [], []
    for endpoint in simulated.endpoints:
        endpoint.chunk_entries = 2048
        optimizer = torch.optim.SGD([(f"p{i}", p) for i, p in enumerate(parameters(torch.float32, 0))])
        shards = collect_shards(optimizer.param_groups)
        scale = float(replicas)
        context = MethodContext(shards, endpoint, optimizer, gradient_scale=scale, kernels=backend)
        methods.append(Quantized(context, QuantizedOptions(**options)))

    def work(i: int) -> list[Tensor]:
        results = []
        for number in range(1, 5):
            if number == full:
                methods[i].request_full_exchange()
            gradients = [p.detach().flatten() for p in parameters(torch.float32, 10 * number + i)]
            gradients[-1] = torch.cat((gradients[-1][:1], gradients[-1]))[1:]  # not aligned
            results += methods[i].synchronize(gradients, StepInfo(number, torch.tensor(number != 2)))
        return results

    with torch.no_grad():
        found = [tensor for each in simulated.run(work) for tensor in each]
    return found + [t for method in methods for state in method.states() for t in state.tensors.values()]


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {"code": "e2m1"}),
        (2, {"code": "2bit"}),
        slow(3, {"code": "2bit"}),
        slow(3, {"code": "e2m1"}),
        slow(2, {"code": "1bit", "block": 32}),
        slow(3, {"code": "2bit", "full": 3}),
        slow(2, {"code": "2bit", "error_feedback": False}),
        slow(2, {"code": "int8", "block": 32, "error_feedback": False}),
    ],
)
def test_quantized_equals_pytorch(replicas: int, options: dict[str, Any]) -> None:
    one, other = (quantized(backend, replicas, **options) for backend in ("torch", "triton"))
    assert one and all(same(a.contiguous(), b.contiguous()) for a, b in zip(one, other, strict=True))


def quantized_update(backend: str, replicas: int, optimizer: str, **options: Any) -> list[Tensor]:
    """Return the weights and all states of four steps, of which the second one is skipped."""
    simulated, own = SimulatedReplicas(replicas), parameters(torch.float32, 0)
    named = [(f"layers.{i}.weight", p) for i, p in enumerate(own)]
    inner = Muon(named, lr=1e-2) if optimizer == "Muon" else AdamS(named, lr=1e-2, kernels="torch")
    shards, methods = collect_shards(inner.param_groups), []
    for endpoint in simulated.endpoints:
        endpoint.chunk_entries = 2048
        context = MethodContext(shards, endpoint, inner, gradient_scale=1.5, max_norm=1.0, kernels=backend)
        methods.append(QuantizedUpdate(context, QuantizedUpdateOptions(**options)))

    def work(i: int) -> None:
        for number in range(1, 5):
            gradients = [p.detach().flatten() for p in parameters(torch.float32, 10 * number + i)]
            gradients[-1] = torch.cat((gradients[-1][:1], gradients[-1]))[1:]  # not aligned
            methods[i].finish_previous_step(number - 1 not in (0, 2))
            methods[i].step(gradients, StepInfo(number, torch.tensor(number != 2)))

    with torch.no_grad():
        simulated.run(work)
    return all_tensors(methods) + [t for state in inner.state.values() for t in state.values()]


@pytest.mark.parametrize(
    ("replicas", "optimizer", "options"),
    [
        (2, "AdamS", {"update_code": "1bit_unbiased", "interval": 2}),
        slow(2, "AdamS", {}),
        slow(3, "AdamS", {"update_code": "1bit_unbiased"}),
        slow(2, "Muon", {"update_code": "1bit_unbiased", "interval": 2}),
        slow(2, "AdamS", {"code": "int8", "update_code": "e2m1", "block": 32}),
    ],
)
def test_quantized_update_equals_pytorch(replicas: int, optimizer: str, options: dict[str, Any]) -> None:
    """Owners have short blocks, columns have padding, and a step is skipped."""
    one, other = (quantized_update(backend, replicas, optimizer, **options) for backend in ("torch", "triton"))
    assert one and all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))


def radius(backend: str, replicas: int, chunk_entries: int, **options: Any) -> list[Tensor]:
    """Return parameters, residuals and masks after five steps, of which the fourth one is skipped."""
    simulated, own = SimulatedReplicas(replicas) if replicas > 1 else None, parameters(torch.float32, 0)
    optimizer = AdamS([(f"p{i}", p) for i, p in enumerate(own)], lr=1e-2)
    shards = collect_shards(optimizer.param_groups)
    methods = []
    for endpoint in simulated.endpoints if simulated else [ProcessGroupCollectives(None)]:
        endpoint.chunk_entries = chunk_entries
        context = MethodContext(shards, endpoint, optimizer, kernels=backend, max_norm=1.0)
        methods.append(Radius(context, RadiusOptions(start=0, interval=2, density=0.2, **options)))

    def work(i: int) -> None:
        for number in range(1, 6):
            gradients = [p.detach().flatten() for p in parameters(torch.float32, 10 * number + i)]
            methods[i].step(gradients, StepInfo(number, torch.tensor(number != 4)))

    with torch.no_grad():
        simulated.run(work) if simulated else work(0)
    return all_tensors(methods)


def local(backend: str, cls: type[LocalUpdates], options: LocalOptions) -> list[Tensor]:
    """Return parameters and states after four steps of two replicas, of which the second one is skipped."""
    simulated, methods = SimulatedReplicas(2), []
    for endpoint in simulated.endpoints if simulated else [ProcessGroupCollectives(None)]:
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters(torch.float32, 0))]
        optimizer = AdamS(named, lr=1e-2)
        methods.append(
            cls(MethodContext(collect_shards(optimizer.param_groups), endpoint, optimizer, kernels=backend), options)
        )

    def work(i: int) -> None:
        for number in range(1, 5):
            generator = torch.Generator().manual_seed(10 * number + i)
            for shard in methods[i].context.shards:
                moved = shard.parameter.detach()
                moved += torch.randn(moved.shape, generator=generator)
            methods[i].exchange(StepInfo(number, torch.tensor(number != 2)))

    with torch.no_grad():
        simulated.run(work) if simulated else work(0)
    return all_tensors(methods)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (LocalUpdates, DilocoOptions(inner_steps=1)),
        slow(LocalUpdates, StreamingDilocoOptions(inner_steps=1, fragments=1, delay=0, mix=0.5, code="float32")),
        (Co2, Co2Options(inner_steps=1, momentum_clip=0.1)),  # its outer step has no kernel
    ],
)
def test_local_updates_equal_pytorch(cls: type[LocalUpdates], options: LocalOptions) -> None:
    """To FP32 rounding: the interpreter rounds a product before its sum."""
    one, other = (local(backend, cls, options) for backend in ("torch", "triton"))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def adam(backend: str) -> list[Tensor]:
    """Return parameters, moments and errors after three steps; the last two send the momentum."""
    simulated, own = SimulatedReplicas(2), parameters(torch.float32, 0)
    optimizer = torch.optim.AdamW([(f"p{i}", p) for i, p in enumerate(own)], lr=1e-2)
    shards = collect_shards(optimizer.param_groups)
    methods = []
    for endpoint in simulated.endpoints if simulated else [ProcessGroupCollectives(None)]:
        context = MethodContext(shards, endpoint, optimizer, kernels=backend, total_steps=3)
        methods.append(OnebitAdam(context, OnebitAdamOptions(warmup_steps=1, code="e2m1")))

    def work(i: int) -> None:
        for number in range(1, 4):
            gradients = [p.detach().flatten() for p in parameters(torch.float32, 10 * number + i)]
            methods[i].step(gradients, StepInfo(number, torch.tensor(True)))

    with torch.no_grad():
        simulated.run(work) if simulated else work(0)
    return all_tensors(methods)


def test_onebit_adam_equals_pytorch() -> None:
    """Its exchange is that of quantized, and its messages contain the momentum."""
    one, other = (adam(backend) for backend in ("torch", "triton"))
    assert all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("replicas", "chunk_entries", "options"),
    [(2, 1 << 20, {}), (1, 1 << 20, {}), slow(2, 256, {"selection": "block"})],
)
def test_radius_equals_pytorch(replicas: int, chunk_entries: int, options: dict[str, Any]) -> None:
    one, other = (radius(backend, replicas, chunk_entries, **options) for backend in ("torch", "triton"))
    assert all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))

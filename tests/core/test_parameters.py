"""Local views of parameters and gradients."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_scape.core import parameters
from torchtitan_scape.core.bf16_weights import ScaledTensor, hold_in_bfloat16
from torchtitan_scape.core.parameters import StoredTensors, collect_shards, contiguous_gradient, store_gradient, stored


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 4))


def in_bfloat16() -> nn.Parameter:
    module = nn.ParameterList([plain()])
    hold_in_bfloat16(module, scaled=True)
    return module[0]


def distributed() -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (1,)), [Shard(0)]))


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra `float8`, is not installed")
def test_weights_for_a_gather_in_fp8_have_an_address() -> None:
    """torchao's wrapper has none: kernels would have written to address 0, and no checkpoint was saved."""
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    values = torch.ones(3, 4)
    weight = nn.Parameter(WeightWithDynamicFloat8CastTensor(values, LinearMMConfig(), torch.float8_e4m3fn))
    assert stored(weight).data_ptr() == values.data_ptr() and type(stored(weight)) is Tensor
    assert not stored(weight).requires_grad
    with torch.no_grad():
        stored(weight).add_(1.0)
    assert torch.equal(values, torch.full((3, 4), 2.0))


def replace_storage(parameter: nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
    """Give the parameter a new storage, as a load with `assign` or a conversion does."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = torch.full((3, 4), 2.0, dtype=dtype)
    elif isinstance(parameter, ScaledTensor):
        parameter.weight = torch.full((3, 4), 2.0, dtype=torch.bfloat16)
    else:
        parameter.data = torch.full((3, 4), 2.0, dtype=dtype)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [plain, in_bfloat16, distributed])
@torch.no_grad()
def test_stored_tensors_are_kept_until_a_storage_is_replaced(
    make: Callable[[], nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    others, parameter = [plain(), plain()], make()
    tensors = StoredTensors(collect_shards([{"params": [others[0], parameter, others[1]]}]))
    kept = tensors()
    with monkeypatch.context() as patched:
        patched.setattr(parameters, "stored", None)
        assert tensors() is kept
        parameter.copy_(torch.full((3, 4), 4.0) if not isinstance(parameter, DTensor) else parameter * 4.0)
        assert tensors()[1].float().eq(4.0).all()  # loaded values are seen
    for dtype in (torch.float32, torch.bfloat16):
        replace_storage(parameter, dtype)
        found = tensors()
        assert found[1].float().eq(2.0).all() and found[1].dtype == stored(parameter).dtype
        found[1].fill_(5.0)
        assert stored(parameter).float().eq(5.0).all()


def test_a_contiguous_gradient_is_not_copied() -> None:
    (shard,) = collect_shards([{"params": [plain()]}])
    assert contiguous_gradient(shard).eq(0.0).all() and contiguous_gradient(shard).shape == (3, 4)  # no gradient
    for gradient in (torch.rand(3, 4), torch.rand(4, 3).t(), torch.rand(3, 4).requires_grad_()):
        shard.parameter.grad = gradient
        found = contiguous_gradient(shard)
        assert not found.requires_grad and torch.equal(found, gradient.detach())
        assert found.is_contiguous() and (found.data_ptr() == gradient.data_ptr()) == gradient.is_contiguous()


def test_a_stored_gradient_is_copied_unless_it_is_a_view() -> None:
    (shard,) = collect_shards([{"params": [plain()]}])
    for gradient in (torch.rand(3, 4), torch.rand(4, 3).t()):
        shard.parameter.grad = gradient
        found: Tensor = contiguous_gradient(shard)
        found += 1.0
        store_gradient(shard, found)
        assert shard.parameter.grad is gradient and torch.equal(gradient, found)


def test_a_created_gradient_has_the_order_of_the_parameter_in_memory() -> None:
    """Fused optimizers read both in this order. If one replica had no gradient, replicas became different."""
    transposed = torch.rand(4, 3).t()
    (shard,) = collect_shards([{"params": [torch.nn.Parameter(transposed.clone())]}])
    values = torch.rand(3, 4)
    store_gradient(shard, values.view(-1))
    torch.optim.SGD([shard.parameter], lr=1.0, fused=True).step()
    assert torch.equal(shard.parameter.detach(), transposed - values)

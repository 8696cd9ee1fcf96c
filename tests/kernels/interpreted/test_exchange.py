"""Exchanges without a buffer in Triton's interpreter, bitwise against PyTorch; started like test_interpreted.py."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels.codec.checks import same
from tests.kernels.exchange_checks import adam, local, quantized, quantized_update, radius, sparta
from tests.marks import slow
from tests.methods import test_replaced_storage
from torchtitan_scape.kernels.backends import block_code, exchange_passes
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice
from torchtitan_scape.methods.local_options import DilocoOptions, LocalOptions, StreamingDilocoOptions
from torchtitan_scape.methods.local_updates import LocalUpdates
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.stages import Handle


@pytest.mark.parametrize(
    ("replicas", "dtype", "options"),
    [
        (2, torch.float32, {"code": "1bit_unbiased", "warmup_steps": 2, "loaded": 2}),
        slow(2, torch.float32, {"code": "1bit_unbiased", "warmup_steps": 2}),
        slow(3, torch.float32, {"code": "1bit", "warmup_steps": 2}),
        slow(5, torch.float32, {"code": "2bit", "warmup_steps": 0}),
        slow(2, torch.bfloat16, {"code": "e2m1", "warmup_steps": 0, "interval": 1, "steps": 1}),
    ],
)
def test_sparta_equals_pytorch(replicas: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    one, other = (sparta("cpu", backend, replicas, dtype, **options) for backend in ("torch", "triton"))
    for a, b in zip(one, other, strict=True):
        if dtype == torch.float32:
            assert same(a.contiguous(), b.contiguous())
        else:  # the interpreter rounds to BF16 toward zero
            torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-6, atol=2.0**-6)


def test_a_nan_stays_one_if_it_is_rounded_to_bf16() -> None:
    """All bits of a NaN are set if an NVIDIA GPU has computed it."""
    nan = torch.full((128,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    residual, cpu = torch.zeros(128, dtype=torch.bfloat16), torch.device("cpu")
    tensors = AddressTable(LISTS, 1, cpu)
    tensors.set(FIRST, [nan])
    tensors.set(SECOND, [residual])
    passes, code = exchange_passes("triton", [torch.float32]), block_code("triton", "int8", 128)
    passes.BlockExchange([BlockSlice(0, 0, 128, 128, 0)], code, 128, 1, -1, True, cpu).accumulate(
        tensors, torch.tensor(True), 1.0
    )
    assert residual.isnan().all()


def test_a_new_storage_of_the_parameters_is_exchanged() -> None:
    test_replaced_storage.check_sparta("triton")


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {"code": "e2m1"}),
        (2, {"code": "2bit", "loaded": 2, "steps": 4}),
        slow(2, {"code": "2bit"}),
        slow(3, {"code": "2bit"}),
        (2, {"code": "e2m1", "unchecked": True}),
        slow(3, {"code": "2bit", "unchecked": True}),
        slow(3, {"code": "2bit", "unchecked": True, "loaded": 2, "steps": 4}),
        slow(3, {"code": "e2m1"}),
        slow(2, {"code": "1bit", "block": 32}),
        slow(3, {"code": "2bit", "full": 3, "steps": 4}),
        slow(2, {"code": "2bit", "error_feedback": False}),
        slow(2, {"code": "int8", "block": 32, "error_feedback": False}),
    ],
)
def test_quantized_equals_pytorch(replicas: int, options: dict[str, Any]) -> None:
    one, other = (quantized("cpu", backend, replicas, **options) for backend in ("torch", "triton"))
    assert one and all(same(a.contiguous(), b.contiguous()) for a, b in zip(one, other, strict=True))


def sizes_of_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the entries of every all-reduce through a buffer."""
    sizes: list[int] = []
    exchange = ReplicaCollectives.all_reduce

    def all_reduce(self: ReplicaCollectives, tensor: Tensor, *args: Any, **options: Any) -> Handle:
        sizes.append(tensor.numel())
        return exchange(self, tensor, *args, **options)

    monkeypatch.setattr(ReplicaCollectives, "all_reduce", all_reduce)
    return sizes


@pytest.mark.parametrize(
    "run",
    [partial(quantized, replicas=2, code="2bit", block=32, full=3, steps=4), adam],
)
def test_steps_in_fp32_have_smaller_chunks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their division changes no bits, with pending errors of owners as well. Other steps have no buffer."""
    sizes, largest, found = sizes_of_buffers(monkeypatch), [], []
    for limits in ((512, 2048), (2048, 2048)):
        found.append(run("cpu", "triton", limits=limits))
        largest.append(max(sizes))
        sizes.clear()
    assert largest == [512, 2048]
    assert all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("replicas", "optimizer", "options"),
    [
        (2, "AdamS", {"update_code": "1bit_unbiased", "interval": 2}),
        slow(2, "AdamS", {"update_code": "2bit", "full": 3}),
        slow(3, "AdamS", {"update_code": "1bit_unbiased"}),
        slow(2, "Muon", {"update_code": "1bit_unbiased", "interval": 2}),
        slow(2, "AdamS", {"code": "int8", "update_code": "e2m1", "block": 32}),
    ],
)
def test_quantized_update_equals_pytorch(replicas: int, optimizer: str, options: dict[str, Any]) -> None:
    """Owners have short blocks, columns have padding, and a step is skipped."""
    one, other = (quantized_update("cpu", backend, replicas, optimizer, **options) for backend in ("torch", "triton"))
    assert one and all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamS", {"update_code": "1bit_unbiased", "full": 3}),
        slow("Muon", {"update_code": "2bit", "interval": 2, "code": "int4"}),
    ],
)
def test_quantized_update_that_starts_early_has_the_same_bits(optimizer: str, options: dict[str, Any]) -> None:
    """The residuals are computed again from the messages that were sent."""
    runs = (("torch", False), ("torch", True), ("triton", True))
    one, *others = (quantized_update("cpu", each, 2, optimizer, early=early, **options) for each, early in runs)
    for other in others:
        assert one and all(
            same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True)
        )


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (LocalUpdates, DilocoOptions(inner_steps=1)),
        slow(LocalUpdates, StreamingDilocoOptions(inner_steps=1, fragments=1, delay=0, mix=0.5, code="float32")),
    ],
)
def test_local_updates_equal_pytorch(cls: type[LocalUpdates], options: LocalOptions) -> None:
    """To FP32 rounding: the interpreter rounds a product before its sum."""
    one, other = (local("cpu", backend, cls, options) for backend in ("torch", "triton"))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_onebit_adam_equals_pytorch() -> None:
    """Its exchange is that of quantized, and its messages contain the momentum."""
    one, other = (adam("cpu", backend) for backend in ("torch", "triton"))
    assert all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("replicas", "chunk_entries"),
    [(2, 1 << 20), (1, 1 << 20), slow(2, 256)],
)
def test_radius_equals_pytorch(replicas: int, chunk_entries: int) -> None:
    one, other = (radius("cpu", backend, replicas, chunk_entries) for backend in ("torch", "triton"))
    assert all(same(a.float().contiguous(), b.float().contiguous()) for a, b in zip(one, other, strict=True))

"""Tests on a GPU: `scripts/gpu_check.sh correctness`, or SCAPE_GPU_TESTS=1 and `python -m pytest tests/gpu`.

The rest of the suite hides GPUs, so that it is the same everywhere. `SCAPE_GPU_TESTS=smoke TRITON_INTERPRET=1` runs one
small case of each test on a CPU where possible, to find mistakes in this file without a GPU.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import StagingOptions

if os.environ.get("SCAPE_GPU_TESTS") not in (("1", "smoke") if torch.cuda.is_available() else ("smoke",)):
    pytest.skip("needs a GPU, and SCAPE_GPU_TESTS=1 in the environment", allow_module_level=True)

from tests.kernels.checks import (
    Case,
    check_rotate,
    check_skipped,
    check_step,
)
from tests.kernels.codec.checks import check_follows, check_sums_and_hadamard_follow, rows_of
from tests.kernels.dense_checks import RULES, check_muon, check_norms, check_update
from tests.kernels.exchange_checks import adam, quantized, quantized_update, radius, sparta
from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import make_scape
from torchtitan_scape import AdamS, Scape
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.kernels.backends import block_code, exchange_passes
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.kernels.scape.triton_passes import PACK_TILE, SELECT_TILE, TILE, UPDATE_TILE
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas

SMOKE, DEVICE = os.environ["SCAPE_GPU_TESTS"] == "smoke", "cuda" if torch.cuda.is_available() else "cpu"
BASE = Case((300_000, 5, 70_001, 1024), (33, 4096), 1024, replicas=3, device=DEVICE, columns=(2400, 5, 1, 8))
SHAPES = [(700, 513), (33, 1024), (1, 1), (2048, 96), (1000,), (7,)]
STEPS, BLOCKS = (3, 16) if SMOKE else (10, 333)
if SMOKE:
    BASE = replace(BASE, sparse=(2048, 5, 701, 1024), whole=(33, 96), columns=(16, 5, 1, 8))
    SHAPES = [(7, 33), (2, 512), (1, 1), (16, 24), (10,), (7,)]
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can show it")


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("in_use", [1.0, 0.5, None], ids=["dense", "warm-up", "target"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 1)], ids=["aligned", "gradients off", "parameters off"])
def test_a_step_equals_the_pytorch_reference(
    density: float, in_use: float | None, dtype: torch.dtype, offsets: tuple[int, int]
) -> None:
    used = density if in_use is None else in_use
    case = replace(BASE, density=density, in_use=used, previous=density, next=density)
    case = replace(case, gradient_dtype=dtype, parameter_dtype=dtype, offset=offsets[0], parameter_offset=offsets[1])
    for replica in (None, 1):
        check_step(replace(case, replica=replica))


@pytest.mark.parametrize("block_size", [8, 24, 64, 128, 256, 384, 512, 4096, 32768])
def test_other_block_sizes_equal_the_pytorch_reference(block_size: int) -> None:
    check_step(replace(BASE, block_size=block_size))
    check_step(replace(BASE, block_size=block_size, columns=None))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("block_size", [128, 1024])
def test_quantization_errors_are_added_as_in_the_reference(block_size: int, offset: int) -> None:
    """In the packing pass, whose threads then read the gradients of other threads."""
    for density in (0.05, 0.3):
        case = replace(BASE, block_size=block_size, keeps_code_error=True, offset=offset, parameter_offset=offset)
        check_step(replace(case, density=density, in_use=density, previous=density, next=density))


def test_ties_are_selected_as_in_the_reference() -> None:
    """With beta1 = 0, mt is the gradient; few distinct values make ties common."""
    values = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5)
    check_step(replace(BASE, values=values, beta1=0.0, in_use=1.0, density=1.0, next=0.1))


@pytest.mark.parametrize("density", [0.3, 0.1, 0.01])
def test_received_masks_are_decoded(density: float) -> None:
    check_rotate(replace(BASE, next=density))


def test_a_skipped_step_writes_nothing() -> None:
    check_skipped(BASE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_dense_updates_and_the_finite_check_equal_the_reference(dtype: torch.dtype, offset: int) -> None:
    for rule in RULES:
        check_update(rule, [100_000, 0, 5, 8192], offset, dtype, 0, DEVICE, 0.3)
    check_muon([100_000, 0, 5, 8192], offset, 0, DEVICE)
    check_norms([100_000, 5, 8192], {0: (99_999, float("nan")), 2: (0, float("inf"))}, dtype, offset, DEVICE)


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 128, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_block_codes_equal_the_reference(name: str, block: int, scale: torch.dtype) -> None:
    """Bitwise, compared with the reference on the GPU and on the CPU."""
    check_follows(name, block, scale, 3, BLOCKS, DEVICE)
    x = rows_of(2, 26, block, "cpu")
    twin, kernel = (block_code(backend, name, block, scale) for backend in ("torch", "triton"))
    assert torch.equal(twin.encode(x), kernel.encode(x.to(DEVICE)).cpu())


def test_sums_and_hadamard_equal_the_reference() -> None:
    for name, block in (("int8", 256), ("int4", 128)):
        check_sums_and_hadamard_follow(name, block, 3, BLOCKS, DEVICE)


def draw(step: int, replica: int, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(100 * step + replica)
    for p in parameters:
        gradient = torch.randn(p.shape, generator=generator, device=DEVICE)
        p.grad = gradient if p.grad is None else p.grad.copy_(gradient)


def weights(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    """Return the same weights at every call, independent of the thread and of other random draws."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, device=DEVICE)) for shape in shapes]


def start(collectives: ReplicaCollectives | None = None, **options: Any) -> tuple[list[nn.Parameter], Scape]:
    parameters = weights()
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return parameters, make_scape(named, replicas=collectives, **{"lr": 1e-2, **options})


def unpacked(optimizer: Scape) -> Tensor:
    bits = optimizer.method.masks.in_use.bits
    return reference.unpack_bits(bits, 8 * bits.numel())


@pytest.mark.parametrize(
    "options",
    [
        dict(density=0.1),
        dict(density=0.05, density_warmup_steps=4, update="sharded"),
        dict(density=0.1, update="sharded", code="int8"),
    ],
)
def test_replicas_are_equal_and_follow_the_reference(options: dict[str, Any]) -> None:
    """Rounding may exchange two nearly equal entries in a selection, which changes single entries by a full step."""

    def work(collectives: ThreadCollectives, kernels: str) -> tuple[list[Tensor], Tensor]:
        parameters, optimizer = start(collectives, kernels=kernels, **options)
        for step in range(STEPS):
            draw(step, collectives.replica, parameters)
            optimizer.step()
        return [p.detach() for p in parameters], unpacked(optimizer)

    kernel = run_replicas(2, lambda c: work(c, "triton"))
    twin = run_replicas(2, lambda c: work(c, "torch"))
    assert torch.equal(kernel[0][1], kernel[1][1])
    assert float((kernel[0][1] != twin[0][1]).float().mean()) <= 1e-3
    for ours, other, theirs in zip(kernel[0][0], kernel[1][0], twin[0][0], strict=True):
        assert torch.equal(ours, other)
        assert float((ours - theirs).norm()) <= 1e-2 * float(ours.norm())


EXCHANGES: dict[str, Callable[..., list[Tensor]]] = {
    "sparta": partial(sparta, replicas=3, dtype=torch.float32, code="1bit_unbiased", warmup_steps=2),
    # The exchanges of a run of 51.9 M parameters that ended with a CUDA error (docs/benchmarks/gpu.md).
    "sparta, many steps": partial(
        sparta, replicas=4, dtype=torch.float32, code="1bit", interval=3, warmup_steps=33, steps=3 if SMOKE else 80
    ),
    "sparta, owner errors": partial(sparta, replicas=5, dtype=torch.float32, code="2bit", warmup_steps=0),
    "quantized": partial(quantized, replicas=3, code="int4"),
    "quantized, 2 bits": partial(quantized, replicas=3, code="2bit", full=3, steps=4),
    "quantized, 2 bits, loaded": partial(quantized, replicas=3, code="2bit", loaded=2, steps=4),
    "quantized, overlapped": partial(quantized, replicas=3, code="2bit", unchecked=True),
    "quantized_update": partial(quantized_update, replicas=3, optimizer="AdamS", update_code="1bit_unbiased"),
    "quantized_update, Muon": partial(quantized_update, replicas=2, optimizer="Muon", interval=2),
    "radius": partial(radius, replicas=2, chunk_entries=1 << 20),
    "onebit_adam": adam,
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_by_kernels_equal_those_of_pytorch(name: str) -> None:
    """Weights and states of simulated replicas, bitwise; of 1-bit Adam its first moments and errors."""
    kernel, twin = (EXCHANGES[name](DEVICE, backend) for backend in ("triton", "torch"))
    for i, (ours, theirs) in enumerate(zip(kernel, twin, strict=True)):
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num()), i


def test_a_nan_of_the_device_stays_one_in_bf16() -> None:
    zeros, residual = torch.zeros(128, device=DEVICE), torch.zeros(128, dtype=torch.bfloat16, device=DEVICE)
    tensors = AddressTable(LISTS, 1, zeros.device)
    tensors.set(FIRST, [nan := zeros / zeros])
    tensors.set(SECOND, [residual])
    passes, code = exchange_passes("triton", [torch.float32]), block_code("triton", "int8", 128)
    exchange = passes.BlockExchange([BlockSlice(0, 0, 128, 128, 0)], code, 128, 1, -1, True, zeros.device)
    exchange.accumulate(tensors, torch.ones((), dtype=torch.bool, device=DEVICE), 1.0)
    assert nan.isnan().all() and residual.isnan().all()


@needs_gpu
def test_the_copy_of_an_asynchronous_save_waits_for_kernels() -> None:
    checkpointer = pytest.importorskip("torchtitan_scape.trainer.checkpointer", exc_type=ImportError)
    stager, values = checkpointer._Stager(StagingOptions()), torch.zeros(1 << 20, device=DEVICE)
    for number in (1.0, 2.0):
        torch.cuda._sleep(1 << 28)  # cycles
        values.fill_(number)
        assert stager.stage({"values": values}).result()["values"].eq(number).all()
    stager.close()


@pytest.mark.parametrize("selection", ["block", "tensor"])
def test_simulated_replicas_equal_real_replicas_on_a_gpu(selection: str) -> None:
    """Bitwise, and no step waits for the device."""
    options: dict[str, Any] = dict(density=0.1, density_warmup_steps=4, selection=selection)

    def work(collectives: ThreadCollectives) -> tuple[list[Tensor], Tensor]:
        parameters, optimizer = start(collectives, **options)
        for step in range(STEPS):
            draw(step, collectives.replica, parameters)
            optimizer.step()
        return [p.detach() for p in parameters], torch.cat(optimizer.method.passes.kept())

    ranks, simulated = run_replicas(2, work), SimulatedReplicas(2)
    for endpoint in simulated.endpoints:
        endpoint.chunk_entries, endpoint.min_columns = 64, 7
    shared, _ = start(None, **options)
    named = [(f"p{i}", p) for i, p in enumerate(shared)]
    each = simulated.run(lambda i: make_scape(named, lr=1e-2, replicas=simulated.endpoints[i], **options))
    for step in range(STEPS):
        gradients = []
        for replica in range(2):
            draw(step, replica, shared)
            gradients.append([p.grad.clone() for p in shared])

        def one(i: int, gradients: list[list[Tensor]] = gradients) -> None:
            for parameter, gradient in zip(shared, gradients[i], strict=True):
                parameter.grad = gradient
            each[i].step()

        with no_synchronization():
            simulated.run(one)
    for ours, theirs in zip(shared, ranks[0][0], strict=True):
        assert torch.equal(ours.detach(), theirs)
    for optimizer, (_, state) in zip(each, ranks, strict=True):
        assert torch.equal(torch.cat(optimizer.method.passes.kept()), state)


@contextmanager
def no_synchronization() -> Iterator[None]:
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("options", [{}, {"update": "sharded"}, {"selection": "tensor", "kernels": "auto"}])
def test_no_step_waits_for_the_device(options: dict[str, Any], kernels: str) -> None:
    """From the first step on, during the density warm-up and at the target density."""
    parameters, optimizer = start(**{"density": 0.1, "density_warmup_steps": 3, "kernels": kernels, **options})
    for step in range(min(7, STEPS)):
        draw(step, 0, parameters)
        with no_synchronization():
            optimizer.step()


@pytest.mark.parametrize("update, bf16_weights", [("replicated", False), ("sharded", False), ("sharded", True)])
def test_offload_changes_nothing_and_does_not_wait(update: str, bf16_weights: bool) -> None:
    """Bitwise, with many groups of tensors in two buffers; only the first step waits, to read the master."""
    results = []
    for offload in ([], ["state"]):
        model = nn.ParameterList(weights(SHAPES * 8))
        if bf16_weights:
            hold_in_bfloat16(model, scaled=True)
        more: dict[str, Any] = {"density_warmup_steps": 4, "update": update, "offload": offload}
        optimizer = make_scape(model.named_parameters(), lr=1e-2, density=0.05, **more)
        for step in range(STEPS):
            draw(step, 0, list(model))
            with no_synchronization() if step else nullcontext():
                optimizer.step()
        assert (optimizer.method.passes.storage.window is not None) == bool(offload)
        optimizer.finish_previous_step()
        tensors = [values for state in optimizer.method.states() for values in state.tensors.values()]
        results.append([p.detach() * 1.0 for p in model] + [values.cpu().clone() for values in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dense_adams_does_not_wait() -> None:
    parameters = weights()
    optimizer = AdamS(parameters, lr=1e-2)
    for step in range(3):
        draw(step, 0, parameters)
        with no_synchronization():
            optimizer.step()


@needs_gpu
@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("warmup", [0, 4])
def test_memory_in_addition_to_dense_adams(density: float, warmup: int) -> None:
    """Masks, payload buffers and lists of the target density, visit rates and tables, but nothing of the model's size.

    Requested bytes are counted, since the allocator may round each request up by a megabyte.
    """
    shapes, peaks = [(4096, 2048)] * 8 + [(2048,)] * 8, []
    for name in ("adams", "scape"):
        gc.collect()  # free the memory of other tests now, otherwise it would be subtracted
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_stats()["requested_bytes.all.current"]
        parameters = weights(shapes)
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        options: dict[str, Any] = {} if name == "adams" else dict(density=density, density_warmup_steps=warmup)
        optimizer = (AdamS if name == "adams" else make_scape)(named, lr=1e-3, **options)
        for step in range(8):
            draw(step, 0, parameters)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - base)
        del parameters, named, optimizer
    entries = sum(math.prod(s) for s in shapes)
    axes = sum(sum(s) for s in shapes if len(s) > 1)
    layout = BlockLayout(tuple(math.prod(s) for s in shapes if len(s) > 1), 1024, 1)
    payload = sum(layout.nnz(i, density, "block") for i in range(len(layout.sizes))) + 8 * 2048
    # A single replica selects a full mask, one of N replicas 1/N of it. Tile lists have 12 bytes per tile: one list for
    # the selection, three for each of packing and update at the target density, and six for all other passes.
    lists = 12 * entries * (1 / SELECT_TILE + 6 / TILE + 3 / PACK_TILE + 3 / UPDATE_TILE)
    visits = (16 + 17) * axes  # the current ones, and the new ones while they are computed
    tables = 1 << 20  # by tensor, sums by tile, tiles of the payload and of the masks
    assert peaks[1] - peaks[0] <= 3 * layout.mask_bytes() + 12 * payload + visits + lists + tables

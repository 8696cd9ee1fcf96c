"""Triton kernels: interpreter and compilation, in separate processes, and the arguments of launches.

Triton reads TRITON_INTERPRET on import, so the interpreter needs a separate process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.torch_version import TorchVersion as Version

from scripts.benchmarks import compile_kernels
from scripts.benchmarks.assembly import SPILL_LIMITS, regressions
from scripts.scape_passes import pack_all, squares_all, update_all
from tests import server
from tests.marks import slow
from torchtitan_scape import AdamS, Scape
from torchtitan_scape.kernels.backends import choose_backend, scape_passes
from torchtitan_scape.kernels.codec import triton_passes as codec_kernels
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.dense import triton_passes as dense_kernels
from torchtitan_scape.kernels.exchange import triton_kernels as exchange_kernels
from torchtitan_scape.kernels.exchange import triton_masked
from torchtitan_scape.kernels.scape import triton_kernels, triton_masks
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, density_at
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadLayout, PayloadPlan
from torchtitan_scape.kernels.scape.triton_passes import TritonReplicated
from torchtitan_scape.kernels.tagc import triton_passes as tagc_kernels
from torchtitan_scape.kernels.topk import triton_cosine
from torchtitan_scape.kernels.topk import triton_passes as topk_kernels

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(
    Version(triton.__version__) < (3, 7) and Version(np.__version__) >= (2, 4),
    reason="Triton 3.6 cannot interpret a loop over a number with NumPy 2.4 or later",
)
@pytest.mark.parametrize("all_examples", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(all_examples: str) -> None:
    """Compare every kernel with PyTorch in the interpreter; the output of a failure is part of the message."""
    tests = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/kernels/interpreted"]
    tests += [] if all_examples == "1" else ["-m", "not slow"]
    assert "skipped" not in run("-m", "pytest", *tests, TRITON_INTERPRET="1", SCAPE_ALL_EXAMPLES=all_examples)


@pytest.mark.parametrize("configurations", ["--once", slow("--quick")])
def test_every_kernel_compiles_for_both_vendors(configurations: str, tmp_path: Path) -> None:
    """Ahead of time, without a GPU, in some configurations of the script, which fails on loops and on spills.

    At the default block size no kernel spills registers on NVIDIA, except that Triton 3.6, of torch 2.10 and 2.11,
    spills four of 255 registers of the DCT kernel. Passes over whole tiles of parameters have accesses of 128 bits.
    """
    done = server.run("scripts.benchmarks.compile_kernels", configurations, "--output", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "compiled.json").read_text())[triton.__version__]
    device_code = [
        codec_kernels,
        dense_kernels,
        exchange_kernels,
        tagc_kernels,
        topk_kernels,
        triton_cosine,
        triton_kernels,
        triton_masked,
        triton_masks,
    ]
    written = {name for module in device_code for name in vars(module) if name.endswith("_kernel")}
    for target in ("cuda:90", "hip:gfx90a"):
        assert {row["kernel"] for row in rows if row["target"] == target} == written
    assert all(row["registers"] > 0 and "spilled_bytes" in row for row in rows)
    for row in rows:
        if row["target"] == "cuda:90" and row["constants"].get("BLOCK", 1024) == 1024:
            old = Version(triton.__version__) < (3, 7) and row["kernel"] == "components_kernel"
            assert row["spilled_bytes"] <= (16 if old else 0), row
        passes = ("update_kernel", "write_kernel", "pack_kernel")
        if row["kernel"] in passes and row["constants"].get("ALIGNED_TILE"):  # not the packing of TAGC
            assert row["load_bits"] == row["store_bits"] == 128, row


@triton.jit
def or_kernel(x):
    tl.atomic_or(x + tl.arange(0, 64), 1, sem="relaxed")


def test_loops_of_atomics_spills_and_narrower_accesses_are_regressions() -> None:
    target = compile_kernels.TARGETS["hip:gfx90a"]
    compiled = compile_kernels.compile_one(compile_kernels.KernelLaunch(or_kernel, {"x": "*i32"}, {}, {}, 1), target)
    row: dict[str, Any] = {"package": "scape", "kernel": "or_kernel", "constants": {}, "target": "hip:gfx90a"}
    (fault,) = regressions(row | compiled)
    assert fault == "atomic operation as a compare-and-swap loop (global_atomic_cmpswap)"
    assert regressions(row | {"atomics": ["global_atomic_add"], "spilled_bytes": 0}) == []
    assert regressions(row | {"atomics": ["atom.global.cas.b32"], "spilled_bytes": 4}) == [
        "atomic operation as a compare-and-swap loop (atom.global.cas.b32)",
        "4 bytes of registers spilled, limit 0",
    ]
    (name, block, target_name), limit = next(iter(SPILL_LIMITS.items()))
    package, kernel = name.split(".")
    listed = {"package": package, "kernel": kernel, "constants": {"BLOCK": block}, "target": target_name, "atomics": []}
    assert not regressions(listed | {"spilled_bytes": limit}) and regressions(listed | {"spilled_bytes": limit + 1})
    good = listed | {"spilled_bytes": 0, "load_bits": 128, "store_bits": 64, "registers": 100}
    assert not regressions(good | {"registers": 125}, [good, good | {"store_bits": 128}])
    assert regressions(good | {"load_bits": 64, "registers": 126}, [good]) == [
        "the widest load has 64 bits, 128 before",
        "126 registers, 100 before",
    ]


def test_a_backend_can_be_forced_or_is_refused() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu) == choose_backend("torch", cpu) == "torch"
    gpu = torch.device("cuda")
    assert choose_backend("auto", gpu) == choose_backend("triton", gpu, [torch.bfloat16, torch.float32]) == "triton"
    assert choose_backend("auto", gpu, [torch.float32, torch.float64]) == "torch"
    with pytest.raises(ValueError, match=r"parameters of torch\.float64; the kernels take torch\.float32"):
        choose_backend("triton", gpu, [torch.float64])
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    for kind in (Scape, AdamS):
        with pytest.raises(
            ValueError, match=r"kernels is 'triton', and the parameters are on 'cpu'.*choose 'auto' or 'torch'"
        ):
            kind([("p", parameter)], lr=1e-3, kernels="triton")
        with pytest.raises(ValueError, match="kernels is 'cuda'; it must be one of 'auto', 'triton', 'torch'"):
            kind([("p", parameter)], lr=1e-3, kernels="cuda")


def shifted(entries: int, offset: int) -> Tensor:
    return torch.zeros(entries + offset)[offset:]


@pytest.mark.parametrize("in_use", [1.0, 0.1], ids=["dense", "target"])
@pytest.mark.parametrize("offset", [0, 1])
def test_only_aligned_tensors_use_wide_loads(in_use: float, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's gradients are views into one buffer at any offset. The update reads them if the mask is dense."""
    calls: list[tuple[str, bool]] = []

    def note(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        calls.append((kernel.fn.__name__, constants.get("ALIGNED_TILE", False)))

    monkeypatch.setattr(launching, "launch", note)
    layout = BlockLayout((8192,), 1024, 1)
    passes = scape_passes("triton", layout, (), PayloadPlan("block", 0.1, 0), torch.device("cpu"))
    masks = [Mask(torch.zeros(layout.mask_bytes(), dtype=torch.uint8), in_use) for _ in range(2)]
    rates, steps = [Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)], torch.ones((), dtype=torch.float64)
    gradients = [shifted(8192, offset)]
    passes.bind(
        PassInputs([torch.zeros(8192)], gradients, rates, *masks, 1.0, torch.tensor(True), steps, torch.ones(()))
    )
    pack_all(passes)
    update_all(passes)
    aligned = offset == 0
    if in_use < 1.0:
        assert calls == [("list_kernel", False), ("pack_kernel", aligned), ("update_kernel", True)]
    else:
        assert calls == [("pack_kernel", aligned), ("update_kernel", aligned)]


def test_large_payloads_are_covered_once() -> None:
    """With positions above 2^24, which FP32 cannot represent, and tensors without a remainder."""
    layout, plan = BlockLayout((0, 36_000_003, 4096, 1029), 1024, 1), PayloadPlan("block", 0.6, 0)
    passes = scape_passes("triton", layout, (7, 0, 3), plan, torch.device("cpu"))
    assert isinstance(passes, TritonReplicated)
    passes.counts = passes.payload_counts(0.6)
    passes.payload_layout = PayloadLayout.buffered(passes.counts, passes.sparsified, passes.plan)
    tiles, first, partial = passes.tile_payload()
    assert first[-1] == len(tiles) == len(partial) and len(first) == len(passes.counts) + 1
    position, entries = 0, [0] * len(passes.counts)
    for number, (tensor, start, length) in enumerate(tiles.tolist()):
        assert start == position and first[tensor] <= number < first[tensor + 1]
        entries[tensor] += length
        position = start + length
    assert entries == passes.counts and position == sum(passes.counts) > 2**24


def test_a_step_compiles_the_variants_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions are the first steps, and the first one at the target density.

    A warm-up density adds few variants, which depend on the width of its codes and on the split of the lists of tiles.
    """
    variants: list[set[Any]] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any) -> None:
        if 0 in grid:
            return
        special: list[Any] = []
        for parameter, value in zip(kernel.params, arguments, strict=False):
            if isinstance(value, Tensor):
                special.append((value.dtype, value.data_ptr() % 16 == 0))
            elif isinstance(value, int):
                known = None if parameter.do_not_specialize else (value == 1, value % 16 == 0)
                special.append((value < 2**31, known))
        variants[-1].add((kernel.fn.__name__, warps, *map(str, constants.items()), *special))

    monkeypatch.setattr(launching, "launch", note)
    layout, steps, density = BlockLayout((40_000, 8_192), 1024, 2), 12, 0.05
    passes = scape_passes(
        "triton", layout, (100,), PayloadPlan("block", density, 0, chunk_multiple=8), torch.device("cpu")
    )
    masks = [Mask(torch.zeros(layout.mask_bytes(), dtype=torch.uint8)) for _ in range(2)]
    rates, count = [Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)] * 3, torch.ones((), dtype=torch.float64)
    parameters = [torch.zeros(n) for n in (40_000, 8_192, 100)]
    for step in range(1, steps + 1):
        variants.append(set())
        following = density_at(step + 1, density, 8)
        gradients = [torch.zeros_like(p) for p in parameters]
        passes.bind(
            PassInputs(parameters, gradients, rates, *masks, following, torch.tensor(True), count, torch.ones(()))
        )
        selected = pack_all(passes)
        assert selected is not None and selected.numel() == layout.wire_bytes(following, "block")
        pieces = passes.pieces()
        if not isinstance(pieces, list) and not passes.compact:
            pieces.fill(torch.zeros(1000), 8 * step)
        squares_all(passes)
        update_all(passes)
        passes.release()
        passes.rotate(torch.zeros(2 * selected.numel(), dtype=torch.uint8), following, masks[0].bits, masks[1].bits)
        masks[1].density, masks[0].density = masks[0].density, following
    new = [found.difference(*variants[:i]) for i, found in enumerate(variants)]
    # The mask of the third step is the first one sent as offsets; the eighth has the target density.
    assert {variant[0] for found in new[3:7] for variant in found} <= {"decode_offsets_kernel", "move_kernel"}
    # The ninth step is the first that begins with moments in the payload's order.
    assert {variant[0] for variant in new[8]} == {"pack_kernel"}
    assert not any(new[9:]) and len(set().union(*variants)) <= 25

"""Compile every Triton kernel, in each configuration that the passes launch, for GPUs that need not be present.

    python -m scripts.benchmarks.compile_kernels                      # writes results/compile_kernels
    python -m scripts.benchmarks.compile_kernels --target cuda:90 --quick

The configurations are those of steps on small tensors, whose launches are recorded instead of run. Registers and spills
are the compiler's; atomics and the widest access of global memory are read from the assembly. The exit code is 1 if a
kernel does not compile or has one of `assembly.regressions`, such as accesses that are narrower than the stored ones.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.benchmarks.assembly import amd_report, identity, nvidia_report, regressions
from scripts.common import RESULTS, markdown, read, run_command, write
from scripts.scape_passes import pack_all, squares_all, update_all
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.kernels.backends import (
    TRITON_DTYPES,
    block_code,
    cosine_passes,
    exchange_passes,
    masked_payload,
    scape_passes,
    tagc_passes,
    topk_passes,
)
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.dense.triton_passes import Norms, Scaling, TritonMuon, TritonUpdate
from torchtitan_scape.kernels.exchange import layout
from torchtitan_scape.kernels.exchange.layout import LISTS, BlockSlice
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, Ownership
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadPlan, ShardedUpdate
from torchtitan_scape.kernels.scape.triton_masks import InPlaceEntries
from torchtitan_scape.kernels.topk.layout import BlockGrid, MessageLayout
from torchtitan_scape.methods.topk.method import TopkMessages

PACKAGES = ("codec", "dense", "exchange", "scape", "tagc", "topk")
TARGETS = {"cuda:90": GPUTarget("cuda", 90, 32), "hip:gfx90a": GPUTarget("hip", "gfx90a", 64)}
RATES = Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)
_INTEGERS = {torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8", torch.bool: "i1"}
_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", **_INTEGERS}
# Options of `_scape_step`. The default step is taken as well.
REPLICATED_STEPS: list[dict[str, Any]] = [
    dict(density=0.01),  # offsets in the payload
    dict(density=0.3),  # a bitmap
    dict(in_use=1.0),  # the first step
    dict(in_use=0.5),  # warm-up
    dict(dtype=torch.bfloat16),
    dict(dtype=torch.float16),
    dict(keeps_code_error=True),
    dict(clip=False),
    dict(columns=None),
    dict(writes=False),
    dict(block=8, density=0.3),
    dict(block=40),
    dict(block=8192),
    dict(block=32768),
    dict(block=32768, density=0.01),
]
QUICK_STEPS: list[dict[str, Any]] = [dict(density=0.01, in_use=0.5), dict(keeps_code_error=True)]
SHARDED_STEPS: list[dict[str, Any]] = [
    dict(keeps_code_error=True),
    dict(density=0.01),
    dict(in_use=1.0),
    dict(in_use=0.5),
    dict(dtype=torch.bfloat16),
    dict(scaled=True, dtype=torch.bfloat16),
    dict(scaled=True, dtype=torch.bfloat16, in_use=0.5),
    dict(columns=None),
    dict(block=32768, density=0.01),
]


class KernelLaunch(NamedTuple):
    """A launch of a Triton kernel.

    Attributes:
        signature: types of the arguments, "constexpr" for constants.
        attributes: assumptions of the compiler about arguments, such as their alignment.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[Any, Any]
    warps: int


def launches(quick: bool) -> list[KernelLaunch]:
    """Return each distinct launch."""
    found: dict[str, KernelLaunch] = {}

    def note(kernel: Any, grid: Any, *arguments: Any, warps: int, moved: float = 0, **constants: Any) -> None:
        signature: dict[str, str] = {}
        attributes: dict[Any, Any] = {}
        for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=False)):
            if hasattr(value, "data_ptr"):
                signature[parameter.name] = f"*{_TYPES[value.dtype]}"
                attributes[(i,)] = [["tt.divisibility", 16]]  # of the caching allocator
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if not parameter.do_not_specialize and isinstance(value, int) and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        key = str((kernel.fn.__name__, signature, constants, attributes, warps))
        found.setdefault(key, KernelLaunch(kernel, signature, constants, attributes, warps))

    with replaced(launching, "launch", note):
        _take_steps(quick)
    return list(found.values())


def one_of_each_kernel(found: list[KernelLaunch]) -> list[KernelLaunch]:
    """Return one launch per kernel: the one with the most constants that are neither false nor "none"."""
    by_kernel = defaultdict(list)
    for launch in found:
        by_kernel[launch.kernel].append(launch)
    return [
        max(group, key=lambda launch: sum(bool(value) and value != "none" for value in launch.constants.values()))
        for group in by_kernel.values()
    ]


def _take_steps(quick: bool) -> None:
    for options in [{}, *(QUICK_STEPS if quick else REPLICATED_STEPS)]:
        _scape_step(**options)
    for options in [{}, *SHARDED_STEPS[: 1 if quick else None]]:
        _scape_step(sharded=True, **options)
    for dtype in TRITON_DTYPES[: 1 if quick else None]:
        _dense_step(dtype)
    for name in ("int4", "2bit") if quick else FORMATS:  # a code of levels, and one of two means
        _codec_step(name, 128, torch.bfloat16)
        for block in () if quick else (32, 1024):
            _codec_step(name, block, torch.float32)
    exchanged = [("2bit", 128, torch.float32)]
    if not quick:
        exchanged += [
            (name, 128, dtype) for name in ("1bit", "1bit_unbiased", "e2m1", "int8") for dtype in TRITON_DTYPES[:2]
        ]
        exchanged += [("e2m1", 32, torch.float32), ("int4", 1024, torch.float32)]
    for name, block, dtype in exchanged:
        _exchange_step(name, block, dtype)
    _masked_step()
    _tagc_step()
    for form in ("float32", "2bit") if quick else ("float32", "2bit", "1bit"):
        for entries in (4096, 5000):
            _topk_step(BlockGrid(1, entries, 1, 1024), 10, form)
        _topk_step(BlockGrid(128, 128, 64, 64), 64, form)
    _cosine_step()


def _topk_step(grid: BlockGrid, k: int, code: str) -> None:
    layout, flag = MessageLayout([grid], [k], code), torch.tensor(True)
    messages, passes, x = TopkMessages(layout), topk_passes("triton", layout), [torch.zeros(grid.rows, grid.columns)]
    message, values = messages.allocate(flag.device)
    passes.select(x, x, 0.95, 2.0, flag, message, values)
    if code != "float32":
        passes.keep_(x, message, values, flag)
    for over_senders in (False, True):
        passes.mean_(x, message.repeat(2, 1), over_senders)


def _cosine_step() -> None:
    layout, flag = MessageLayout([BlockGrid(128, 128, 64, 64)], [32]), torch.tensor(True)
    passes, x = cosine_passes("triton", layout, flag.device), [torch.zeros(128, 128)]
    passes.select(x, x, 0.999, 2.0, flag, *TopkMessages(layout).allocate(flag.device))
    passes.inverse_(x)


def _scape_step(
    block: int = 1024,
    density: float = 0.1,
    in_use: float | None = None,
    dtype: torch.dtype = torch.float32,
    clip: bool = True,
    columns: tuple[int, ...] | None = (16, 8),
    keeps_code_error: bool = False,
    sharded: bool = False,
    scaled: bool = False,
    writes: bool = True,
) -> None:
    """Launch the kernels of a step of SCAPE.

    Args:
        in_use: density of the mask of this step; by default `density`, that of the next one.
        scaled: BF16 weights of the sharded update.
    """
    cpu, whole = torch.device("cpu"), (1024,)
    layout = BlockLayout((16 * block, 16 * block + 8), block, 2)
    owner = ShardedUpdate(Ownership.of(layout, whole), 0, cpu, scaled) if sharded else None
    plan = PayloadPlan("block", density, 0, keeps_code_error=keeps_code_error)
    passes = scape_passes("triton", layout, whole, plan, cpu, owner=owner, writes=writes, columns=columns)
    parameters, gradients = ([torch.zeros(n, dtype=dtype) for n in (*layout.sizes, *whole)] for _ in range(2))
    used, previous = (
        Mask(torch.zeros(passes.layout.mask_bytes(), dtype=torch.uint8), d) for d in (in_use or density, density)
    )
    rates, steps = [RATES] * len(passes.sizes), torch.ones((), dtype=torch.float64)
    step = PassInputs(
        parameters, gradients, rates, used, previous, density, torch.tensor(True), steps, torch.ones(()), clip
    )
    passes.bind(step)
    pack_all(passes)
    squares_all(passes)
    update_all(passes)
    passes.write()
    if sharded:
        return  # the other kernels are those of the replicated update
    if not passes.compact and not used.dense:
        chunk, pieces = torch.zeros(64), passes.pieces()
        assert isinstance(pieces, InPlaceEntries)
        pieces.fill(chunk, 0)
        pieces.store(chunk, 0)
    received = torch.zeros(2 * layout.wire_bytes(density, "block"), dtype=torch.uint8)
    passes.rotate(received, density, used.bits, previous.bits)
    passes.bind(step)
    pack_all(passes)  # at the target density with the moments in the payload's order
    passes.finish()
    passes.rotate(None, 1.0, used.bits, previous.bits)


def _dense_step(dtype: torch.dtype) -> None:
    parameters, gradients = ([torch.zeros(n, dtype=dtype) for n in (8192, 100)] for _ in range(2))
    moments, steps = [torch.zeros(8192), torch.zeros(100)], torch.ones(2, dtype=torch.float64)
    applied, factor = torch.tensor(True), torch.ones(())
    Norms()(gradients)
    Scaling()(gradients, factor)
    for rule, states in (("adams", [moments]), ("adamw", [parameters, gradients]), ("frozen", [moments, moments])):
        given = [gradient.float() for gradient in gradients] if rule == "frozen" else gradients
        TritonUpdate(rule).step(parameters, given, states, [RATES] * 2, steps, applied, factor)
    if dtype == torch.float32:
        directions = TritonMuon().average(gradients, moments, [0.9, 0.5], applied, factor, [True, True])
        TritonMuon().move(parameters, directions, [(0.9, -0.1)] * 2, applied)


def _codec_step(name: str, block: int, scale: torch.dtype) -> None:
    code, x = block_code("triton", name, block, scale), torch.zeros(2, 4 * block)
    messages = code.encode(x, torch.empty_like(x))
    if name == "int4":
        code.hadamard_(x)
    code.decode(messages, x)
    code.decode_and_sum(messages, x[0])
    for adds_error in (False, True):
        code.encode_mean(messages, 4 * block, 2.0, x[0], adds_error)
    code.encode_mean(messages, 4 * block, 2.0)


def _exchange_step(name: str, block: int, dtype: torch.dtype) -> None:
    """Launch the passes of SPARTA, on parameters of `dtype`, of gradients with error feedback, and of updates."""
    passes, applied, code = exchange_passes("triton", [dtype]), torch.tensor(True), block_code("triton", name, block)
    sizes, starts = (6 * block, block + 8, 5), (0, 6, 8)
    anchors, errors = [torch.zeros(n) for n in sizes], [torch.zeros(n) for n in sizes]
    thetas = [torch.zeros(n, dtype=dtype) for n in sizes]
    slices = [BlockSlice(i, 0, n, block, start) for i, (n, start) in enumerate(zip(sizes, starts, strict=True))]

    def exchange(replica: int, repeats: bool, **lists: list[Tensor]) -> tuple[Any, AddressTable]:
        tensors = AddressTable(LISTS, len(sizes), anchors[0].device)
        for kind, each in lists.items():
            tensors.set(getattr(layout, kind), each)
        return passes.BlockExchange(slices, code, 12 * block, 2, replica, repeats, anchors[0].device), tensors

    displaced: list[dict[str, list[Tensor]]] = [{}, {"OWNER_ERROR": errors}]
    for lists in displaced:
        chunk, tensors = exchange(0, True, FIRST=anchors, SECOND=thetas, **lists)
        chunk.apply(tensors, chunk.encode(tensors, subtracts=True), applied, subtracts=True)
    repeats = FORMATS[name].largest is None  # only these codes keep an owner's error of gradients
    kept: list[dict[str, list[Tensor]]] = [{"SECOND": errors}, {}]
    for lists in (*kept, *([{"SECOND": errors, "OWNER_ERROR": errors}] if repeats else [])):
        chunk, tensors = exchange(0, repeats, FIRST=anchors, **lists)
        for known in (None, applied) if lists else (None,):
            chunk.apply(tensors, chunk.encode(tensors, subtracts=False, applied=known), applied, subtracts=False)
    rounded = [each.bfloat16() for each in errors]  # residuals of quantized_update
    residual, of_gradients = exchange(-1, True, FIRST=anchors, SECOND=rounded)
    residual.keep_error(of_gradients, residual.encode(of_gradients, subtracts=False).messages, applied, 1.5)
    residual.encode(of_gradients, subtracts=False, applied=applied)
    residual.accumulate(of_gradients, applied, 2.0)
    for weights in (anchors, rounded):
        chunk, tensors = exchange(-1, True, FIRST=weights, SECOND=errors)
        chunk.subtract(tensors, applied)
        chunk.add(tensors, chunk.encode(tensors, subtracts=True, applied=applied).messages)
    chunk, tensors = exchange(-1, True, FIRST=anchors, SECOND=errors)
    chunk.store_mean(tensors, chunk.encode(tensors, subtracts=False).messages, 2)


def _masked_step() -> None:
    masked, sizes = masked_payload("triton"), (4096, 100)
    masks = [torch.full((-(-n // 8),), 255, dtype=torch.uint8) for n in sizes]
    tensors, residuals = [torch.zeros(n) for n in sizes], [torch.zeros(n) for n in sizes]
    payload = masked.MaskedPayload(masked.MaskedTensors(masks, residuals, sizes), tensors, torch.tensor(True), 2.0, 4.0)
    payload.fill(chunk := torch.zeros(sum(sizes)), 0)
    payload.store(chunk, 0)


def _tagc_step() -> None:
    passes, x = tagc_passes("triton"), torch.zeros(4096)
    bits, packed = passes.select(x, 102), torch.zeros(2, 4, 204)
    passes.pack(x, bits, bits, 204, packed[0])
    passes.expand(packed, bits, x)


def compiled(launch: KernelLaunch, target: GPUTarget) -> Any:
    """Return Triton's compiled kernel of a launch. Raises the compiler's errors."""
    kernel = launch.kernel
    constants = {(kernel.arg_names.index(name),): value for name, value in launch.constants.items()}
    ordered = {name: launch.signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, ordered, constants, launch.attributes)
    return triton.compile(source, target=target, options={"num_warps": launch.warps, "enable_fp_fusion": False})


def compile_one(launch: KernelLaunch, target: GPUTarget) -> dict[str, Any]:
    """Return registers, spills, atomics, access widths and shared memory of a kernel. Raises the compiler's errors."""
    result = compiled(launch, target)
    nvidia = target.backend == "cuda"
    report = nvidia_report(result.asm["ptx"], target.arch) if nvidia else amd_report(result.asm["amdgcn"])
    return {**report, "shared_bytes": result.metadata.shared}


def table(rows: list[dict[str, Any]]) -> str:
    groups = defaultdict(list)
    for row in rows:
        groups[row["package"], row["kernel"], row["constants"].get("BLOCK", 0), row["target"]].append(row)
    lines = []
    for (package, kernel, block, target), members in sorted(groups.items()):
        line = {"package": package, "kernel": kernel, "block size": block or "", "target": target}
        line["configurations"] = len(members)
        for title, key in (("registers",) * 2, ("spilled, bytes", "spilled_bytes"), ("shared, bytes", "shared_bytes")):
            line[title] = max(member.get(key, 0) for member in members)
        barriers = [member["barriers"] for member in members if "barriers" in member]
        line["barriers"] = str(max(barriers)) if barriers else ""
        wide = [member for member in members if member["constants"].get("ALIGNED_TILE", True)] or members
        for kind in ("load", "store"):
            bits = {member[f"{kind}_bits"] for member in wide if f"{kind}_bits" in member}
            line[f"{kind}, bits"] = " to ".join(map(str, sorted({min(bits), max(bits)}))) if any(bits) else ""
        line["atomics"] = ", ".join(sorted({f"`{name}`" for member in members for name in member.get("atomics", ())}))
        lines.append(line)
    return markdown(lines)


def page(stored: dict[str, list[dict[str, Any]]]) -> str:
    tables = "\n".join(f"\n## Triton {version}\n\n{table(rows)}\n" for version, rows in stored.items())
    return f"""# Compiled kernels

`python -m scripts.benchmarks.compile_kernels`. A line is the worst of its configurations.
Barriers are those in the code for NVIDIA, of whole programs; with one warp they cost nothing.
Spilled bytes are those a thread keeps in memory because it has no register for them. Bits are those of the widest load
and store of global memory, from the configuration with the narrowest to that with the widest; kernels with aligned
tiles are shown for launches on aligned tiles.
{tables}"""


def run(args: argparse.Namespace) -> int:
    rows, failed = [], 0
    before = defaultdict(list)
    for one in (read(RESULTS / "compile_kernels" / "compiled.json") or {}).get(triton.__version__, ()):
        before[identity(one)].append(one)
    found = launches(args.quick or args.once)
    for launch in one_of_each_kernel(found) if args.once else found:
        function = launch.kernel.fn
        package = function.__module__.split(".")[-2]
        for target in args.target if args.package in ("", package) else ():
            row: dict[str, Any] = {"package": package, "kernel": function.__name__, "target": target}
            row["warps"] = launch.warps
            row["constants"] = {name: getattr(value, "name", value) for name, value in launch.constants.items()}
            try:
                row |= compile_one(launch, TARGETS[target])
                faults = regressions(row, before[identity(row)])
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
                faults = [row["error"]]
            for fault in faults:
                print(f"{row['kernel']} for {target} {row['constants']}: {fault}", file=sys.stderr)
            failed += len(faults)
            rows.append(row)
    stored = read(args.output / "compiled.json") or {}
    if args.package:
        rows += [row for row in stored.get(triton.__version__, ()) if row["package"] != args.package]
    stored[triton.__version__] = sorted(rows, key=lambda row: row["package"])
    write(args.output / "compiled.json", stored_text(stored))
    write(args.output / "table.md", page(stored))
    print(table(rows))
    return 1 if failed else 0


def stored_text(stored: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows by version of Triton as JSON with a row per line."""
    parts = (f'"{version}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for version, rows in stored.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    options = {
        "--target": dict(nargs="+", choices=TARGETS, default=list(TARGETS)),
        "--quick": dict(action="store_true", help="as few configurations as launch every kernel"),
        "--once": dict(action="store_true", help="one configuration of every kernel, with most of its features"),
        "--package": dict(
            default="", choices=("", *PACKAGES), help="only the kernels of kernels/PACKAGE; other stored rows stay"
        ),
        "--output": dict(type=Path, default=RESULTS / "compile_kernels"),
    }
    sys.exit(run_command(__doc__, run, options))

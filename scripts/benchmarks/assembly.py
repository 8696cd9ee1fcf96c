"""Registers, spills, atomics and vector widths of a compiled kernel, read from its assembly."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

# Bytes of registers that a thread may keep in memory, by package and kernel, block size (0 for none) and target, with
# any supported version of Triton. All other kernels must not spill.
SPILL_LIMITS: dict[tuple[str, int, str], int] = {
    ("scape.pack_kernel", 32768, "cuda:90"): 10804,
    ("scape.pack_kernel", 32768, "hip:gfx90a"): 572,
    ("scape.pack_kernel", 8192, "cuda:90"): 40,
    ("scape.pack_kernel", 8, "cuda:90"): 448,
    # Tensors that are not sparsified, in tiles that are not aligned.
    ("scape.update_kernel", 32768, "cuda:90"): 18612,
    ("scape.update_kernel", 32768, "hip:gfx90a"): 772,
    ("scape.update_kernel", 8192, "cuda:90"): 192,
    ("scape.gradient_kernel", 32768, "cuda:90"): 4216,
    ("scape.gradient_kernel", 32768, "hip:gfx90a"): 20,
    ("scape.owned_update_kernel", 32768, "cuda:90"): 7816,
    ("scape.owned_update_kernel", 32768, "hip:gfx90a"): 396,
    ("scape.write_kernel", 32768, "cuda:90"): 1016,
    ("topk.components_kernel", 0, "cuda:90"): 16,
    # Tiles that are not complete.
    ("exchange.encode_kernel", 128, "cuda:90"): 32,
    ("exchange.encode_kernel", 1024, "cuda:90"): 16,
    ("exchange.move_kernel", 128, "cuda:90"): 16,
}
# Barriers in the code for blocks of 128 and 1024 entries in aligned storage, with a payload buffer. More of them are
# conversions between layouts through shared memory, in a loop or for every tile.
BARRIER_LIMITS = {
    "codec.decode_kernel": 0,
    "codec.decode_and_sum_kernel": 0,
    "exchange.decode_kernel": 0,
    "exchange.apply_kernel": 20,  # 0 with FP32 parameters
    "scape.pack_kernel": 3,  # 2 with offsets
    "scape.update_kernel": 1,
    "scape.gradient_kernel": 2,
    "scape.owned_update_kernel": 1,
    "scape.write_kernel": 2,
    "scape.decode_offsets_kernel": 0,
}
# Registers of a thread on "cuda:90" in the same configurations, and of kernels without blocks: of the hot path only.
REGISTER_LIMITS: dict[str, dict[str, Any]] = {
    "scape.pack_kernel": {"SELECT": "none", "limit": 56},
    "scape.decode_offsets_kernel": {"limit": 64},
    "scape.entering_kernel": {"ALIGNED": True, "limit": 64},
}
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.\w+|::\w+)*?(?:\.v(\d))?\.[a-z](\d+)\b")
_PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]*")
_AMD_ACCESS = re.compile(r"\b(?:global|flat|buffer)_(load|store)_(dwordx\d|dword|\w*short|\w*byte)\w*")
_AMD_ATOMIC = re.compile(r"\b(?:global|flat|buffer)_atomic_\w+")
_AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8}


def nvidia_report(ptx: str, arch: int) -> dict[str, Any]:
    """Return the figures of a kernel in PTX; registers and spills are those of ptxas."""
    assembler = get_ptxas(arch).path
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        target = f"--gpu-name=sm_{arch}{suffix}"
        command = [assembler, "-v", "--fmad=false", target, file, "-o", Path(folder, "kernel.cubin")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
    registers = re.search(r"Used (\d+) registers", text)
    assert registers and spilled, text
    widths: dict[str, int] = {"ld": 0, "st": 0}
    for kind, count, bits in _PTX_ACCESS.findall(ptx):
        widths[kind] = max(widths[kind], int(count or 1) * int(bits))
    return {
        "registers": int(registers[1]),
        "spilled_bytes": sum(spilled),
        "load_bits": widths["ld"],
        "store_bits": widths["st"],
        "atomics": sorted(set(_PTX_ATOMIC.findall(ptx))),
        "barriers": ptx.count("bar.sync"),
    }


def amd_report(text: str) -> dict[str, Any]:
    """Return the figures of a kernel in the assembly of AMD's compiler."""
    figures = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    widths = {"load": 0, "store": 0}
    for kind, size in _AMD_ACCESS.findall(text):
        widths[kind] = max(widths[kind], next(bits for name, bits in _AMD_BITS.items() if size.endswith(name)))
    # Scalar registers spill into lanes of vector registers, not into memory.
    return {
        "registers": figures["vgpr_count"],
        "spilled_bytes": figures["private_segment_fixed_size"],
        "spilled_registers": figures["vgpr_spill_count"] + figures["sgpr_spill_count"],
        "load_bits": widths["load"],
        "store_bits": widths["store"],
        "atomics": sorted(set(_AMD_ATOMIC.findall(text))),
    }


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the key of a compiled kernel, which kernels share that differ only in the types of their arguments."""
    return row["package"], row["kernel"], row["target"], str(row["warps"]), str(sorted(row["constants"].items()))


def regressions(row: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return the faults of a compiled kernel.

    These are a compare-and-swap loop, what exceeds the limits above, and accesses of memory that are narrower, or a
    quarter more registers, than in all rows of the same kernel `before`.
    """
    found = []
    for key in ("load_bits", "store_bits") if before else ():
        if row[key] < (least := min(one[key] for one in before)):
            found.append(f"the widest {key[:-5]} has {row[key]} bits, {least} before")
    if before and row["registers"] > 1.25 * (most := max(one["registers"] for one in before)):
        found.append(f"{row['registers']} registers, {most} before")
    if loops := [name for name in row["atomics"] if "cmpswap" in name or ".cas" in name]:
        found.append(f"atomic operation as a compare-and-swap loop ({', '.join(loops)})")
    name = f"{row['package']}.{row['kernel']}"
    limit = SPILL_LIMITS.get((name, row["constants"].get("BLOCK", 0), row["target"]), 0)
    if row["spilled_bytes"] > limit:
        found.append(f"{row['spilled_bytes']} bytes of registers spilled, limit {limit}")
    constants = row["constants"]
    aligned = constants.get("ALIGNED_TILE", constants.get("FULL", True))
    usual = aligned and constants.get("FORM", "listed") == "listed" and constants.get("BLOCK") in (None, 128, 1024)
    if usual and row.get("barriers", 0) > BARRIER_LIMITS.get(name, 1000):
        found.append(f"{row['barriers']} barriers, limit {BARRIER_LIMITS[name]}")
    conditions = dict(REGISTER_LIMITS.get(name, {}))
    most = conditions.pop("limit", 1000)
    applies = usual and row["target"] == "cuda:90" and all(constants.get(k) == v for k, v in conditions.items())
    if applies and row.get("registers", 0) > most:
        found.append(f"{row['registers']} registers, limit {most}")
    return found

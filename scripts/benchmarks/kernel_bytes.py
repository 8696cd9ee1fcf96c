"""Bytes a parameter that the passes of a SCAPE step cannot do without; no GPU needed.

    python -m scripts.benchmarks.kernel_bytes

Every input read once, every output written once; writes results/bench_kernels/bytes.md.
"""

import argparse
from pathlib import Path

from scripts.common import RESULTS
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.scape.cost import kernel_bytes
from torchtitan_scape.methods.topk.blocks import entries_of
from torchtitan_scape.planner.volumes import PlannedRun

MODELS = {"llama-500m": "llama_500m", "llama-1.8b": "llama_1_8b"}
METHODS = tuple(PlannedRun("scape", d, wire) for d, wire in ((0.1, "float32"), (0.05, "int4"), (0.01, "float32")))
REPLICAS = 8
PASSES = ("finite", "pack", "squares", "update", "coding")


def table() -> str:
    lines = [
        "`python -m scripts.benchmarks.kernel_bytes`: bytes a parameter that must move, FP32, blocks of 1024, "
        f"{REPLICAS} replicas.",
        "Fused AdamW moves 28, dense AdamS 20, both without a finite check.",
        "",
        f"| model | parameters | density, wire | {' | '.join(PASSES)} | pack + update + coding | all |",
        "| --- " * (len(PASSES) + 5) + "|",
    ]
    for name, workload in MODELS.items():
        shapes = get_workload(workload).shapes()
        for method in METHODS:
            least, n = kernel_bytes(method, shapes, REPLICAS), entries_of(shapes)
            shown = [least.get(one, 0.0) for one in PASSES]
            shown += [sum(least.get(one, 0.0) for one in ("pack", "update", "coding")), sum(least.values())]
            cells = [name, f"{n:,}", f"{method.density:g}, {method.wire}", *(f"{f / n:.2f}" for f in shown)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--output", type=Path, default=RESULTS / "bench_kernels")
    output, text = own.parse_args().output, table()
    output.mkdir(parents=True, exist_ok=True)
    (output / "bytes.md").write_text(text)
    print(text)

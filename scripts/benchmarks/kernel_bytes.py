"""Bytes a parameter that the passes of a SCAPE step cannot do without; no GPU needed.

    python -m scripts.benchmarks.kernel_bytes

Every input read once, every output written once; writes results/bench_kernels/bytes.md.
"""

import argparse
from pathlib import Path

from scripts.common import RESULTS
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.scape.options import ScapeOptions

MODELS = {"llama-500m": "llama_500m", "llama-1.8b": "llama_1_8b"}
METHODS = (ScapeOptions(density=0.1), ScapeOptions(density=0.05, wire="int4"), ScapeOptions(density=0.01))
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
        model = get_workload(workload).local(1)
        for method in METHODS:
            least, n = method.cost().pass_bytes(model, REPLICAS), model.entries
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

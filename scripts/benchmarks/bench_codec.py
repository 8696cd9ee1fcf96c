"""Times the block codes on a GPU: encoding with errors, decoding, and adding up the messages of 16 replicas.

    python -m scripts.benchmarks.bench_codec
    TRITON_INTERPRET=1 python -m scripts.benchmarks.bench_codec --smoke    # whether the script itself runs, anywhere

Milliseconds (median of --repeat, after warm-up), the bytes an entry that must move, GB/s on them, and what that is of
the rate of a copy on this machine. Writes results/bench_codec/table.md.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kernels import block_code
from kernels.codec.formats import FORMATS
from scripts.benchmarks.bench_kernels import Clock, copy_bandwidth

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = 16


def measure(name: str, entries: int, clock: Clock, device: torch.device, bandwidth: float) -> list[str]:
    code = block_code("triton", name)
    x = torch.randn(1, entries, device=device)
    error, total = torch.empty_like(x), torch.empty(entries, device=device)
    message = code.encode(x, error)
    messages = message.repeat(REPLICAS, 1)
    coded = message.shape[1] / entries
    works: list[tuple[str, int, float, Callable[[], object]]] = [
        ("encode", 1, 8 + coded, lambda: code.encode(x, error)),
        ("decode", 1, 4 + coded, lambda: code.decode(message, x)),
        ("add up", REPLICAS, 4 + REPLICAS * coded, lambda: code.add_up(messages, total)),
    ]
    lines = []
    for what, rows, least, work in works:
        ms = clock(work)
        rate = least * entries / (ms / 1e3)
        cells = [name, what, rows, f"{ms:.3f}", f"{least:.2f}", f"{rate / 1e9:.0f}", f"{100 * rate / bandwidth:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2**26)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="few entries on whatever device; nothing is stored")
    parser.add_argument("--output", type=Path, default=ROOT / "results/bench_codec")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        sys.exit("bench_codec.py needs a GPU, and torch sees none; --smoke checks the script without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, 1 if arguments.smoke else arguments.repeat)
    bandwidth = copy_bandwidth(clock, device, 0.001 if arguments.smoke else 4.0)
    entries = 256 if arguments.smoke else arguments.entries
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted"
    lines = [
        f"`python -m scripts.benchmarks.bench_codec` on {name}, torch {torch.__version__}: {entries:,} entries, blocks "
        f"of 128, BF16 scales. A copy moves {bandwidth / 1e9:.0f} GB/s, read and written.",
        "",
        "| code | pass | messages | ms | minimal bytes an entry | GB/s | of the copy's bandwidth, % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for code in FORMATS:
        lines += measure(code, entries, clock, device, bandwidth)
    text = "\n".join(lines) + "\n"
    if not arguments.smoke:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

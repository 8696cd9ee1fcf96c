"""Times the block codes: encoding with errors, decoding, and adding up the messages of 16 replicas.

python -m scripts.gpu.codes --result FILE
TRITON_INTERPRET=1 python -m scripts.gpu.codes --smoke --result FILE    # a few blocks, anywhere
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels import block_code
from kernels.codec.formats import FORMATS
from scripts.common import guarded, parser, write
from scripts.gpu.timing import Clock, copy_bandwidth, device_for, of

REPLICAS = 16


def measure(name: str, entries: int, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Figures by pass of one code. An entry moves 4 bytes and its code; 4 more where the rounding error is kept."""
    code = block_code("triton", name)
    x = torch.randn(1, entries, device=clock.device)
    error, total = torch.empty_like(x), torch.empty(entries, device=clock.device)
    message = code.encode(x, error)
    messages = message.repeat(REPLICAS, 1)
    coded = message.shape[1] / entries
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "encode": (8 + coded, lambda: code.encode(x, error)),
        "decode": (4 + coded, lambda: code.decode(message, x)),
        f"add up {REPLICAS}": (4 + REPLICAS * coded, lambda: code.decode_and_sum(messages, total)),
    }
    return {
        name: of(clock(work).figures(), least * entries, entries, bandwidth) for name, (least, work) in works.items()
    }


def run(args: argparse.Namespace) -> None:
    clock = Clock(device_for(args.smoke), 1 if args.smoke else args.repeats)
    bandwidth = copy_bandwidth(clock, 0.001 if args.smoke else 4.0)
    entries = 256 if args.smoke else args.entries
    found: dict[str, Any] = {"copy_bandwidth": bandwidth, "entries": entries, "codes": {}}
    for name in FORMATS:
        found["codes"][name] = measure(name, entries, clock, bandwidth)
        write(args.result, found)
    print(f"{len(found['codes'])} codes on {entries:,} entries", flush=True)


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--result", type=Path, required=True)
    own.add_argument("--entries", type=int, default=2**26)
    own.add_argument("--repeats", type=int, default=20)
    own.add_argument("--smoke", action="store_true", help="few entries, on whatever device there is")
    args = own.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())

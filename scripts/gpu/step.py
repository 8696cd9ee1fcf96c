"""Run a step of the GPU check: `scripts.gpu.check` starts a process for each.

python -m scripts.gpu.step scripts.gpu.passes:passes llama_500m --result FILE
"""

import argparse
import pkgutil
import sys
from pathlib import Path

from scripts.common import run_command


def run(args: argparse.Namespace) -> None:
    pkgutil.resolve_name(args.function)(args.result, args.smoke, *args.arguments)


if __name__ == "__main__":
    options = {
        "function": dict(metavar="module:function", help="called with the result file, smoke, and the arguments"),
        "arguments": dict(nargs="*"),
        "--result": dict(type=Path, required=True, help="file for what is measured, JSON"),
        "--smoke": dict(action="store_true", help="tiny sizes, on a CPU too"),
    }
    sys.exit(run_command(__doc__, run, options))

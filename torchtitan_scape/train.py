"""Command line of the trainer.

torchrun --nproc_per_node=2 -m torchtitan_scape.train --job.config_file train_configs/embedded.toml
"""

import os
import signal
import sys
from importlib import import_module
from importlib.metadata import version

from torchtitan_scape.runtime.device_settings import set_allocator


def main() -> None:
    """Run `trainer.command`. Imports take seconds, in which a request to stop must not end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    set_allocator(os.environ, version("torch"))
    try:
        command = import_module("torchtitan_scape.trainer.command")
    except ImportError as error:  # a package is missing, or its release is not supported
        if os.environ.get("SCAPE_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    command.main()


if __name__ == "__main__":
    main()

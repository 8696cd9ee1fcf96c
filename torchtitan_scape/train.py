"""Command line of the trainer.

torchrun --nproc_per_node=2 -m torchtitan_scape.train --job.config_file train_configs/embedded.toml
"""

import os
import signal
from importlib import import_module
from importlib.metadata import version

from torchtitan_scape.core.files import allow_open_files
from torchtitan_scape.runtime.device_settings import set_allocator


def main() -> None:
    """Run `trainer.command`. Imports take seconds, in which a request to stop must not end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    allow_open_files()
    set_allocator(os.environ, version("torch"))
    import_module("torchtitan_scape.trainer.command").main()


if __name__ == "__main__":
    main()

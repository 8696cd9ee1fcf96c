"""torchrun with support for stopping, failing and restarting runs.

python -m torchtitan_scape.runtime.launch --nproc_per_node=2 ... -m torchtitan_scape.train ...

SIGTERM, SIGINT, SIGUSR1 and SIGHUP are forwarded to the ranks, which write a checkpoint and end by themselves. A failed
run is restarted up to MAX_RESTARTS times in a row without progress. This process then replaces itself, so that no state
of the old start remains. The report of a failed rank is one line instead of a traceback.

With NNODES=2:4 the run continues with the nodes that are present after a restart; nodes that join later are taken up
after a checkpoint (see `rendezvous`).

MAX_RESTARTS   restarts without progress before giving up; 0 for none
STOP_SECONDS   time for the ranks to end by themselves after a signal, by default 1800
SCAPE_*        internal state between the starts of one run

`launcher` does the work. This module imports no torch.
"""

import signal
from importlib import import_module

from torchtitan_scape.core.files import allow_open_files

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}


def main() -> None:
    """Run the launcher. It waits for signals, which threads that start with the import of torch must not receive."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    allow_open_files()
    import_module("torchtitan_scape.runtime.launcher").main()


if __name__ == "__main__":
    main()

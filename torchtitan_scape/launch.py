"""torchrun, whose report of a failed rank is one line instead of a traceback of its own.

python -m torchtitan_scape.launch --nproc_per_node=2 ... -m torchtitan_scape.train ...
"""

import logging
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its own reports of a failed rank
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # A rank that could still speak left its exception; a killed one leaves torchrun's words on the signal.
        told: Any = failure.message
        message = told["message"].removeprefix("ValueError: ") if isinstance(told, dict) else told
        print(f"error: rank {rank} ended with exit code {failure.exitcode}: {message}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


if __name__ == "__main__":
    main()

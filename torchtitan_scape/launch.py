"""torchrun, whose report of a failed rank is one line instead of a traceback of its own.

python -m torchtitan_scape.launch --nproc_per_node=2 ... -m torchtitan_scape.train ...
"""

import logging
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        # Their reports of a failed rank, of several lines, would stand around ours.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told: Any = failure.message
        if isinstance(told, dict):  # the exception that the rank left behind
            message = told["message"].removeprefix("ValueError: ")
        elif failure.exitcode > 0:
            message = "its message stands above"
        else:
            message = told  # which signal ended it
        print(f"error: rank {rank} ended with exit code {failure.exitcode}: {message}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


if __name__ == "__main__":
    main()

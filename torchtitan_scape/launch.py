"""torchrun, whose report of a failed rank is one line instead of a traceback of its own.

python -m torchtitan_scape.launch --nproc_per_node=2 ... -m torchtitan_scape.train ...
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(
            f"error: rank {rank} ended with exit code {failure.exitcode}; its message stands above "
            "(LOG_RANK chooses whose output is shown)",
            file=sys.stderr,
        )
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)


if __name__ == "__main__":
    main()

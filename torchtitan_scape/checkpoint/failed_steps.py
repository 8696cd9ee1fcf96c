"""The steps at which a run found damage, kept next to its checkpoints, so that a restart can choose an older one.

A checkpoint may contain damage that no check finds when it is written. Every restart from it would then fail at the
same step.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

_FILE = "failed_steps"


def note(folder: str, step: int) -> None:
    """Append a step at which the run failed."""
    with open(Path(folder, _FILE), "a") as file:
        file.write(f"{step}\n")


def newest_to_leave_out(folder: str, steps: Sequence[int], saved_at: Callable[[int], float]) -> tuple[int, int]:
    """Return how many of the newest checkpoints a start leaves out, and the step at which it failed before.

    It leaves out none after the first failure at a step, one after the second, and so on; all but the oldest at most.

    Args:
        steps: of the finished checkpoints.
        saved_at: returns the time in seconds at which that of a step was saved. A newer one than the last failure, such
            as one of a run that has left out its damaged predecessor, is not left out.
    """
    path = Path(folder, _FILE)
    failed = [int(line) for line in path.read_text().split() if line.isdigit()] if path.exists() else []
    if not failed or not steps or max(steps) >= failed[-1] or saved_at(steps[-1]) > path.stat().st_mtime:
        return 0, 0
    in_a_row = next((i for i, step in enumerate(reversed(failed)) if step != failed[-1]), len(failed))
    return min(in_a_row - 1, len(steps) - 1), failed[-1]

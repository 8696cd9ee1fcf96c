"""Positions of the main threads of the ranks when a collective has timed out although all ranks are alive.

A rank that hangs in Python, for example in a read from a file system that does not respond, still has heartbeats. The
other ranks wait for it in a collective.
"""

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_INNERMOST = 3  # Frames that decide; those of the launcher are also in torch.distributed.
_COLLECTIVES = ("torch.distributed", "topology")


@dataclass(frozen=True)
class Place:
    """Location of a rank's main thread.

    Attributes:
        line: "folder/file.py:line (function)" of the innermost frame.
        collective: Whether it is in a collective.
    """

    line: str
    collective: bool


def main_thread_place() -> Place:
    """Return the location of this process's main thread. Called in another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines, modules = list[str](), list[str]()
    while frame is not None and len(lines) < _INNERMOST:
        file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
        lines.append(f"{file}:{frame.f_lineno} ({frame.f_code.co_name})")
        modules.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return Place(lines[0] if lines else "an unknown place", any(name.startswith(_COLLECTIVES) for name in modules))


def stalled_rank(places: Mapping[int, Place], names: Mapping[int, str]) -> tuple[int, str] | None:
    """Return the rank that the others wait for and one line, or None if the places do not show it.

    Args:
        places: Place of each rank that has not completed a step for nearly the timeout of collectives.
        names: Host and process of ranks.
    """
    stalled = [rank for rank, place in sorted(places.items()) if not place.collective]
    if not stalled or len(stalled) == len(places):
        return None
    named = ", ".join(f"rank {rank} ({names.get(rank, 'this process')}) in {places[rank].line}" for rank in stalled[:4])
    more = f" and {len(stalled) - 4} more ranks" if len(stalled) > 4 else ""
    verb = "does" if len(stalled) == 1 else "do"
    return stalled[0], (
        f"a collective timed out, and all ranks are alive; {named}{more} {verb} not take part, "
        f"{len(places) - len(stalled)} wait"
    )


def places_in_words(places: Mapping[int, Place]) -> str:
    """Return the places with their first ranks, the rarest first."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place.line, []).append(rank)
    rarest = sorted(ranks, key=lambda line: len(ranks[line]))
    return "; ".join(
        f"rank {', '.join(map(str, ranks[line][:4]))}{' and more' if len(ranks[line]) > 4 else ''} in {line}"
        for line in rarest[:4]
    )

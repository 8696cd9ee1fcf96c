"""Formatting of quantities for logs and reports."""

from collections.abc import Sequence


def size_text(count: float) -> str:
    """Return bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def sent_text(sent: dict[str, float], dense: float) -> str:
    """Return bytes by level, and the reduction relative to dense."""
    if not sent:
        return "nothing (one replica)"
    levels, factor = (
        ", ".join(f"{level} {size_text(value)}" for level, value in sent.items()),
        dense / sum(sent.values()),
    )
    return f"{levels} (dense {size_text(dense)}" + (f", {factor:.1f}x less)" if factor >= 1.05 else ")")


def shards_text(sent: dict[tuple[str, str], float]) -> str:
    """Return bytes by level and kind."""
    levels: dict[str, list[str]] = {}
    for (level, kind), value in sent.items():
        levels.setdefault(level, []).append(f"{kind} {size_text(value)}")
    return "; ".join(f"{level} {', '.join(kinds)}" for level, kinds in levels.items())


def first_text(items: Sequence[object], most: int) -> str:
    """Return the first items, and the number of the others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def seconds_text(seconds: float) -> str:
    """Return seconds, in ms below one second."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def kinds_text(kinds: dict[str, float]) -> str:
    """Return bytes by kind."""
    return ", ".join(f"{kind} {size_text(value)}" for kind, value in kinds.items())


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: "45 s", "12 min 5 s", "3 h 20 min", "2 d 4 h"."""
    left = round(seconds)
    for (large, size), (small, part) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if left >= size:
            rest = left % size // part
            return f"{left // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{left} s"

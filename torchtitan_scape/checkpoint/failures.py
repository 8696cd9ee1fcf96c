"""Error messages for checkpoints that cannot be written or read."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_scape.core.text import first_text

_ADVICE = {
    errno.ENOSPC: "make room there, or name another folder",
    errno.EDQUOT: "make room there, or name another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name another folder",
    errno.EACCES: "make it writable, or name another folder",
    errno.EPERM: "make it writable, or name another folder",
    errno.EROFS: "make it writable, or name another folder",
}


def failure_text(error: BaseException, folder: str | os.PathLike[str], reading: bool = False) -> str:
    """Return one line for a failed save or load of `folder`: reasons, ranks and, for a save, free bytes and the fix."""
    failures = error.failures if isinstance(error, CheckpointException) else {-1: (error, None)}
    ranks: dict[str, list[int]] = {}
    advice = ""
    for rank, (cause, _) in sorted(failures.items()):
        ranks.setdefault(_reason(cause), []).append(rank)
        if isinstance(cause, OSError) and not advice and not reading:
            advice = f"; {_free(Path(folder))}{_ADVICE.get(cause.errno or 0, 'name another folder')}"
    return f"checkpoint {folder}: {', '.join(reason + _ranks(those) for reason, those in ranks.items())}{advice}"


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    lines = str(cause).split("\n")
    return lines[0] if isinstance(cause, ValueError) and lines[0] else f"{type(cause).__name__}: {lines[0]}"


def _ranks(ranks: list[int]) -> str:
    if ranks == [-1]:
        return ""
    return f" on rank{'s' if len(ranks) > 1 else ''} {first_text(ranks, 4)}"


def _free(folder: Path) -> str:
    for path in (folder, *folder.absolute().parents):
        with suppress(OSError):  # the folder may not be there, or may just be removed
            return f"{shutil.disk_usage(path).free:,} bytes are free; "
    return ""

"""Atomic file writes."""

import errno
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes to a file in an existing folder. The content is synced to disk before the rename."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk, if the file system supports it."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(folder)

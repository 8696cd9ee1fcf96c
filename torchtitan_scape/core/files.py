"""Files that are there as a whole or not at all."""

import errno
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Text, as UTF-8, or bytes; in a folder that is there. It is on the disk before it has its name."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on the disk; not every file system can, and then it need not."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(folder)

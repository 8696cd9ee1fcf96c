"""Atomic file writes, JSON of unknown origin, files of this package, and the limit of open files."""

import errno
import json
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
OPEN_FILES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)  # A full disk, or an exhausted quota.
_SERVER_LOST = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO)  # Of a network file system, for a while.
_PASSING = (BrokenPipeError, ConnectionResetError, TimeoutError)
# Beginning of a pointer -> its kind, and the command that replaces it by the file.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"version https://hawser.github.com/spec/": ("Git LFS", "git lfs pull"),  # Before its release.
    b"/annex/objects/": ("git-annex", "git annex get"),
}
_POINTER_BYTES = 1024


def packaged(path: str) -> str:
    """Return the path, or, if nothing is there, that of the file in this package.

    Recipes name their files as in a clone: "train_configs/embedded.toml", "torchtitan_scape/data/tokenizer". Outside of
    a clone, these are files of the package.
    """
    name = os.path.normpath(path)
    inside = PACKAGE / name.removeprefix(f"{PACKAGE.name}/")
    is_own = name.startswith((f"{PACKAGE.name}/", "train_configs/"))
    return str(inside) if is_own and not os.path.exists(path) and inside.exists() else path


def passing_cause(error: BaseException) -> OSError | None:
    """Return the first cause of an error that may be gone at the next start, or on another node; None if there is none.

    The causes are the error itself, and those that it was raised from, or while they were handled.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and may_pass(cause):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def may_pass(error: OSError) -> bool:
    """Return whether the operating system may not repeat an error: it is one of a connection or a server."""
    return isinstance(error, _PASSING) or error.errno in _SERVER_LOST


def allow_open_files() -> None:
    """Raise the limit of open files to `OPEN_FILES`, or as far as permitted. Child processes have it too.

    The store's process and groups of gloo have connections for every rank, and prepared data have a file per shard. The
    usual limit of 1,024 is too low for 512 ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is none, or is nested so deeply that the parser gives up."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def pointer_text(path: Path) -> str:
    """Return an error message if a file is a pointer of Git LFS or git-annex, else "".

    Until `git lfs pull`, a clone has pointers in the place of large files: texts of less than 1,024 bytes (Git LFS
    specification). A file that is missing or cannot be read is no pointer.
    """
    try:
        content = path.read_bytes() if path.stat().st_size < _POINTER_BYTES else b""
    except OSError:  # Reported by the reader of the file.
        return ""
    for begin, (kind, command) in _POINTERS.items():
        if content.startswith(begin):
            fix = f"run {command} in its repository, or download the file"
            return f"{path} is a {kind} pointer, not the file itself; {fix}"
    return ""


def refuse_pointers(*paths: Path) -> None:
    """Raise ValueError if one of these files is a pointer of Git LFS or git-annex."""
    for path in paths:
        if text := pointer_text(path):
            raise ValueError(text)


def require_plain_name(name: str, where: Path) -> None:
    """Raise ValueError if a file name that was read from `where` leads out of that file's folder."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{where} names the file {name!r}, which is not in its folder")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes to a file in an existing folder. The content is synced to disk before the rename.

    Raises:
        OSError: It cannot be written, with its name. No part of it is left.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        # Errors of writing have no name.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
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

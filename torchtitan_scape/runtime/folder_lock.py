"""Lock of a dump folder, so that two runs do not overwrite each other's files.

A POSIX record lock of one process: the kernel releases it when the process ends, however it ends, and forks do not
inherit it. File systems without locks between nodes lock within a node only.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from torchtitan_scape.core.files import parse_json

NAME = "run.lock"
WAIT_SECONDS = 5.0  # for an earlier run that is about to end


class FolderLock:
    """The lock of a folder, held until `release` or the end of this process. ValueError if another run holds it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not str(folder):
            raise ValueError("job.dump_folder is empty; set it to a folder for the results, such as outputs/run-1")
        self._path = Path(folder, NAME)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        except OSError as error:
            raise self._unwritable(error) from None
        end = time.monotonic() + WAIT_SECONDS
        while not self._acquired():
            if time.monotonic() >= end:
                text = self._holder()
                self._file.close()
                raise ValueError(
                    f"{folder} is in use by {text}; wait for its end, or choose another folder with --job.dump_folder"
                )
            time.sleep(0.2)
            self._file.close()
            self._file = self._path.open("a+")  # The earlier run may have removed the file.
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        try:
            self._file.truncate(0)
            os.write(self._file.fileno(), json.dumps(holder).encode())  # Not buffered: `close` would write it again.
        except OSError as error:
            self.release()
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ValueError:
        return ValueError(
            f"nothing can be written to {self._path.parent} ({error.strerror}); free space there, or choose another "
            "folder with --job.dump_folder"
        )

    def _acquired(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # This file system has no locks.
            return True
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False

    def _holder(self) -> str:
        try:
            self._file.seek(0)
            held = parse_json(self._file.read())
            minutes = (time.time() - held["since"]) / 60
            return f"process {held['process']} on {held['host']}, started {minutes:.0f} min ago"
        except (ValueError, KeyError, TypeError):
            return "another run"

    def release(self) -> None:
        """Remove the file and release the lock."""
        with suppress(OSError):
            self._path.unlink()
        self._file.close()

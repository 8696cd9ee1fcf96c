"""Lock of a dump folder, so that two runs do not overwrite each other's files.

The kernel releases it when the process ends, however it ends. File systems without locks between nodes lock within a
node only.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan_scape.core.files import parse_json

NAME, HOLDER = "run.lock", "run.lock.json"
WAIT_SECONDS = 5.0  # for an earlier run that is about to end


class FolderLock:
    """The lock of a folder, held until `release` or the end of this process.

    Raises ValueError if another run holds it, OSError if the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not str(folder):
            raise ValueError("job.dump_folder is empty; set it to a folder for the results, such as outputs/run-1")
        self._files = Path(folder, NAME), Path(folder, HOLDER)
        self._lock = FileLock(self._files[0], timeout=WAIT_SECONDS)
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with suppress(NotImplementedError):  # This file system has no locks.
                self._lock.acquire()
            self._files[1].write_text(json.dumps(holder))
        except Timeout:
            raise ValueError(
                f"{folder} is in use by {self._holder()}; wait for its end, or choose another folder with "
                f"--job.dump_folder. A file system may keep the lock of a host that was lost: delete {self._files[0]} "
                "if the process no longer exists"
            ) from None
        except OSError:
            if self._lock.is_locked:
                self.release()
            raise

    def _holder(self) -> str:
        try:
            held = parse_json(self._files[1].read_bytes())
            minutes = (time.time() - held["since"]) / 60
            return f"process {held['process']} on {held['host']}, started {minutes:.0f} min ago"
        except (OSError, ValueError, KeyError, TypeError):
            return "another run"

    def release(self) -> None:
        """Remove the files and release the lock."""
        for file in self._files:
            with suppress(OSError):
                file.unlink()
        self._lock.release(force=True)

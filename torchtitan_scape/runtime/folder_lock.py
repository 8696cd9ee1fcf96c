"""Lock of a dump folder, so that two runs do not overwrite each other's files.

The kernel releases it when the process ends, however it ends. A network file system may keep the lock of a lost host
until that host is started again. The holder therefore changes the time of a second file every few seconds, and a run on
another host takes over a lock whose second file no longer changes. File systems without locks lock nothing.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_scape.core.files import parse_json

logger = logging.getLogger(__name__)

NAME, HOLDER = "run.lock", "run.lock.json"
WAIT_SECONDS = 5.0  # for an earlier run that is about to end
BEAT_SECONDS = 10.0
SILENT_SECONDS = 45.0  # without a beat; the other ranks wait meanwhile, see comm.init_timeout_seconds


class FolderLock:
    """The lock of a folder, held until `release` or the end of this process.

    Raises ValueError if another run holds it, OSError if the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not str(folder):
            raise ValueError("job.dump_folder is empty; set it to a folder for the results, such as outputs/run-1")
        self._path, self._record = Path(folder, NAME), Path(folder, HOLDER)
        self._released = threading.Event()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = self._acquire()
        try:
            holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
            self._record.write_text(json.dumps(holder))
        except OSError:
            self.release()
            raise
        threading.Thread(target=self._beat, name="folder lock", daemon=True).start()

    def _acquire(self) -> int:
        """Return the locked file."""
        begin, first = time.monotonic(), self._last_beat()
        while (file := self._try_to_lock()) is None:
            waited, holder = time.monotonic() - begin, self._holder()
            alive = holder.get("host", socket.gethostname()) == socket.gethostname() or self._last_beat() != first
            if alive and waited >= WAIT_SECONDS:
                raise ValueError(
                    f"{self._path.parent} is in use by {_in_words(holder)}; wait for its end, or choose another folder "
                    "with --job.dump_folder"
                )
            if waited >= SILENT_SECONDS:
                logger.warning(f"taking over the lock of {_in_words(holder)}: no sign of it for {waited:.0f} s")
                self._path.unlink(missing_ok=True)
            time.sleep(0.1)
        return file

    def _try_to_lock(self) -> int | None:
        """Return the locked file, or None if another process has locked it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # This file system has no locks.
                return file
        os.close(file)  # Its holder has it, or has just removed it.
        return None

    def _last_beat(self) -> int | None:
        # NFS reads the time from the server when a file is opened; `stat` may return an older one.
        with suppress(OSError), open(self._record) as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return None

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._record)

    def _holder(self) -> dict[str, Any]:
        """Return the record of the holder; {} if it cannot be read."""
        with suppress(OSError, ValueError):
            holder = parse_json(self._record.read_bytes())
            return holder if isinstance(holder, dict) else {}
        return {}

    def release(self) -> None:
        """Remove the files and release the lock."""
        self._released.set()
        for file in (self._path, self._record):
            with suppress(OSError):
                file.unlink()
        os.close(self._file)


def _in_words(holder: dict[str, Any]) -> str:
    try:
        minutes = (time.time() - holder["since"]) / 60
        return f"process {holder['process']} on {holder['host']}, started {minutes:.0f} min ago"
    except (KeyError, TypeError):
        return "another run"

"""The lock of a dump folder, between processes."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import ROOT
from torchtitan_scape.core.files import passing_cause
from torchtitan_scape.runtime import folder_lock
from torchtitan_scape.runtime.folder_lock import HOLDER, NAME, FolderLock


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock of `tmp_path`."""
    code = (
        "import sys, time; from torchtitan_scape.runtime.folder_lock import FolderLock\n"
        "lock = FolderLock(sys.argv[1]); print('locked', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_names_the_first(
    other: "subprocess.Popen[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.3)
    message = f"is in use by process {other.pid} on .*, started 0 min ago; .*dump_folder.* delete .*run.lock"
    with pytest.raises(ValueError, match=message) as refused:
        FolderLock(tmp_path)
    assert passing_cause(refused.value), "a restart may succeed: the first run ends, or the server releases its lock"


def test_the_lock_of_a_killed_run_is_taken_over(other: "subprocess.Popen[str]", tmp_path: Path) -> None:
    other.send_signal(signal.SIGKILL)
    lock = FolderLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_file_without_an_owner_is_no_lock(tmp_path: Path) -> None:
    for name in (NAME, HOLDER):
        (tmp_path / name).write_text("left by another program")
    FolderLock(tmp_path).release()


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left on device"):
        FolderLock(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(ValueError, match=r"job\.dump_folder is empty; set it to a folder"):
        FolderLock("")

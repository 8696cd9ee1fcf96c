"""A save that is killed, fails, or has nowhere to write to leaves no checkpoint that looks complete."""

import errno
import itertools
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.small_states import same, save, small, zeros
from tests.pool import Pool
from torchtitan_scape.checkpoint import storage
from torchtitan_scape.checkpoint.metadata import CheckedReader, SafePlanner
from torchtitan_scape.checkpoint.storage import CheckedWriter, failure_text, find_damage, is_complete, remove

pytestmark = pytest.mark.filterwarnings("ignore")


def in_child(function: Callable[[], str]) -> str | int:
    """Return the result of `function` in a separate process, and the signal that killed the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else text


@contextmanager
def before_disk_accesses(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before each disk access of a save: write, fsync, rename or unlink."""

    def acting(function: Callable[..., Any]) -> Callable[..., Any]:
        def access(*args: Any, **kwargs: Any) -> Any:
            act()
            return function(*args, **kwargs)

        return access

    with ExitStack() as stack:
        for owner, name in [(storage._SummedStream, "write"), (os, "fsync"), (os, "replace")]:
            stack.enter_context(patch.object(owner, name, acting(getattr(owner, name))))
        for name in ("rename", "unlink"):
            stack.enter_context(patch.object(Path, name, acting(getattr(Path, name))))
        yield


def killed_at(path: Path, access: int) -> str:
    """Overwrite a checkpoint, and kill this process before a disk access."""
    calls = itertools.count()

    def kill() -> None:
        if next(calls) == access:
            os.kill(os.getpid(), signal.SIGKILL)

    with before_disk_accesses(kill):
        save(small(1), path, threads=1)
    return "not killed"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_save_killed_at_any_point_leaves_no_mixture(tmp_path: Path) -> None:
    """The result is the old checkpoint, the new one, or one that is recognized as incomplete.

    A copy of the folder before a disk access equals the folder of a process killed there; one killed process shows it.
    """
    save(small(0), tmp_path / "new")
    killed = Path(shutil.copytree(tmp_path / "new", tmp_path / "killed"))
    copies: list[Path] = []

    def copy() -> None:
        copies.append(Path(shutil.copytree(tmp_path / "new", tmp_path / str(len(copies)))))

    with before_disk_accesses(copy):
        save(small(1), tmp_path / "new", threads=1)
    assert len(copies) > 20
    left = []
    for path in copies:
        found = find_damage(path)
        assert is_complete(path) == (found is None)
        if found is None or "cannot be checked" in found:  # all data must come from one save
            loaded = zeros(small())
            dcp.load(loaded, storage_reader=CheckedReader(path), planner=SafePlanner())
            left.append(("" if found is None else "unchecked ") + str(loaded["optimizer"]["step"]))
            assert same(loaded, small(loaded["optimizer"]["step"]))
        else:
            assert found == f"{path} has no manifest.json: it is half-written"
            left.append("half-written")
    assert list(dict.fromkeys(left)) == ["0", "unchecked 0", "half-written", "unchecked 1", "1"]
    middle = left.index("half-written") + 9
    assert in_child(lambda: killed_at(killed, middle)) == signal.SIGKILL
    assert left[middle] == "half-written" and contents(killed) == contents(copies[middle])


def limited(path: Path, threads: int) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    try:
        save(small(), path, threads)
    except BaseException as error:
        return failure_text(error, path)
    return "no error"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_size_limit_fails_the_save(threads: int, tmp_path: Path) -> None:
    text = in_child(lambda: limited(tmp_path / "c", threads))
    assert str(text).startswith(f"checkpoint {tmp_path / 'c'}: File too large on rank 0; ") and "ulimit -f" in str(text)
    assert find_damage(tmp_path / "c") == f"{tmp_path / 'c'} has no manifest.json: it is half-written"


def test_a_failing_writer_thread_fails_the_save(tmp_path: Path) -> None:
    """DCP itself would treat such a save as complete."""
    write, before, failing = storage._SummedStream.write, threading.active_count(), ""

    def fail(self: Any, data: Any) -> int:
        if Path(self.name).name == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.001)
        return write(self, data)

    with patch.object(storage._SummedStream, "write", fail), patch("threading.excepthook"):
        for name in ("__0_0.distcp", "__0_1.distcp"):  # one of them is the calling thread's
            failing = name
            with pytest.raises(dcp.CheckpointException) as info:
                save(small(), tmp_path / "c", threads=2)
            assert "No space left on device on rank 0;" in failure_text(info.value, tmp_path / "c")
            assert not is_complete(tmp_path / "c") and not threading.active_count() > before
    save(small(), tmp_path / "c", threads=2)
    assert find_damage(tmp_path / "c") is None


def fill(path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.ones(1 << 20), mesh, [Shard(0)])}
    try:
        dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    except BaseException as error:
        return failure_text(error, path)
    return "no error"


def test_a_full_disk_fails_the_save(pool2: Pool, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        first, second = pool2(fill, str(tmp_path / "c"))
        assert first == second and "No space left on device on rank" in first
        assert " bytes are free; make room there" in first and "\n" not in first
        assert find_damage(tmp_path / "c") == f"{tmp_path / 'c'} has no manifest.json: it is half-written"
        remove(tmp_path / "c")
        assert not (tmp_path / "c").exists()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_failure_text_names_path_and_cause() -> None:
    full, denied = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EACCES))
    failures = dict.fromkeys(range(7), (full, None)) | {9: (denied, None)}
    text = failure_text(dcp.CheckpointException("write", failures), "/nowhere/step-3")  # type: ignore[arg-type]
    assert text.startswith(
        "checkpoint /nowhere/step-3: No space left on device on ranks 0, 1, 2, 3 and 3 more, "
        "Permission denied on rank 9; "
    )
    assert text.endswith(" bytes are free; make room there, or name another folder")
    assert failure_text(ValueError("it is bad\nsee"), "/a") == "checkpoint /a: it is bad"
    assert failure_text(RuntimeError("process is dead"), "/a") == "checkpoint /a: RuntimeError: process is dead"
    assert "make it writable" in failure_text(denied, "/a")


def save_on_local_disks(folder: str) -> None:
    path = f"{folder}/disk-of-node-{dist.get_rank()}/step-1"
    with patch.object(storage, "SHARED_SECONDS", 0.5):
        dcp.save({"values": torch.ones(3), f"own-{dist.get_rank()}": torch.ones(2)}, storage_writer=CheckedWriter(path))


def test_a_folder_that_nodes_do_not_share_is_named(pool2: Pool, tmp_path: Path) -> None:
    """The same path on the local disks of two nodes: here two paths."""
    for good, text in pool2.outcomes(save_on_local_disks, str(tmp_path)):
        assert not good and "this is not a file system that all nodes share" in text
    assert not is_complete(tmp_path / "disk-of-node-0" / "step-1")

"""Folders of checkpoints, with a manifest of checksums, on top of torch.distributed.checkpoint (DCP).

    dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    find_damage(path, rank, world_size)     # None, or a description of the first damaged file of this rank's share
    dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner())      # see metadata.py

A save writes the data files, then DCP's `.metadata`, then `manifest.json` with the name, size and CRC-32 of every other
file. The checksums are computed from the bytes that are written. Each file is synchronized to the disk before the next
one begins, and saving into an existing folder first deletes its manifest and `.metadata`. Therefore, wherever a save is
interrupted, a folder with a manifest is complete, and one with neither manifest nor `.metadata` is incomplete.
"""

import errno
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_scape.core.files import (
    may_pass,
    parse_json,
    passing_cause,
    pointer_text,
    require_plain_name,
    sync_folder,
    write_whole,
)
from torchtitan_scape.core.text import first_text
from torchtitan_scape.topology.groups import gather_lists

MANIFEST, METADATA = "manifest.json", ".metadata"
UNPUBLISHED = "manifest.unpublished"  # until all nodes have their copies, see node_folders.py
FORMAT = 1
SHARED_SECONDS = 30.0  # time for the files of other nodes to become visible
FAILED_STEPS = "failed_steps"  # a file next to the checkpoints
_CHUNK = 4 << 20  # bytes read at a time
_LARGE = 1 << 18  # bytes of a write from which the checksum is computed in a second thread
_ROOM, _WRITABLE = "make room there, or name another folder", "make it writable, or name another folder"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name another folder",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
}


@dataclass(frozen=True)
class FileSum:
    """Name, size in bytes and CRC-32 of a file of a checkpoint."""

    name: str
    size: int
    crc32: int


# ------------------------------------------------------------------------------------------------------ writing


class _SummedStream(io.BufferedWriter):
    """A new file, written sequentially, with the CRC-32 of its content. `close` synchronizes it to the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size = self.crc32 = 0
        self.error: OSError | None = None
        self._summer = ThreadPoolExecutor(1)  # starts no thread before it is needed

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        # For a large piece, in parallel with the write: both release the interpreter lock.
        summing = self._summer.submit(zlib.crc32, data, self.crc32) if nbytes >= _LARGE else None
        try:
            super().write(data)
        except OSError as error:
            # torch.save replaces it by a RuntimeError without the reason.
            self.error = error
            raise
        finally:
            self.crc32 = zlib.crc32(data, self.crc32) if summing is None else summing.result()
        self.size += nbytes
        return nbytes

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("a file with a checksum is written sequentially")

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()
        self._summer.shutdown()

    def abandon(self) -> None:
        """Close the file without writing the buffered bytes."""
        self.raw.close()
        self._summer.shutdown()


class _SummedFileSystem(FileSystem):
    """DCP's file system, with the checksums of the files that it wrote, by name. Thread-safe; it can be pickled."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Drop the results of an earlier save."""
        self.sums: dict[str, FileSum] = {}
        self.errors: list[BaseException] = []
        self.open: dict[str, bool] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        if self.errors:
            raise self.errors[0]
        name = Path(path).name
        self.open[name] = True
        try:
            summed = _SummedStream(path)
            try:
                yield summed
                summed.close()
            except BaseException as error:
                summed.abandon()
                raise summed.error or error from None
            self.sums[name] = FileSum(name, summed.size, summed.crc32)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            del self.open[name]

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        old, new = Path(path).name, Path(new_path).name
        self.sums[new] = FileSum(new, self.sums[old].size, self.sums.pop(old).crc32)


class CheckedWriter(FileSystemWriter):
    """DCP's writer of one file per rank and thread, with checksums and a manifest.

    It works with dcp.save, and with dcp.async_save in a thread or a process, into a new folder or over an older
    checkpoint. use_collectives=False is refused, because no rank would know all files. An OSError, for example if the
    disk is full, is raised on every rank inside DCP's CheckpointException; see failure_text.

    Args:
        shared: All nodes share the folder. Otherwise the manifest has a preliminary name.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1, shared: bool = True) -> None:
        # The streams synchronize their files themselves: DCP does so before Python's buffers are written.
        super().__init__(path, sync_files=False, thread_count=thread_count)
        self.fs, self._shared = _SummedFileSystem(), shared

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "CheckedWriter cannot save with use_collectives = False: the manifest names all ranks' files"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder. Unlike DCP, do not warn about an existing checkpoint."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Invalidate an existing checkpoint. Called on the coordinator, before any rank writes."""
        _invalidate(Path(self.path))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult | FileSum]]:
        """Write this rank's files. Their checksums are sent to the coordinator with DCP's results. Raises OSError."""
        self.fs.begin()
        try:
            results = super().write_data(plan, planner).value()
        except BaseException:
            # DCP does not wait for its other threads; they stop at the next file.
            while self.fs.open:
                time.sleep(0.01)
            raise
        if self.fs.errors:  # in another thread, whose errors DCP ignores
            raise self.fs.errors[0]
        done: Future[list[WriteResult | FileSum]] = Future()
        done.set_result([*results, *self.fs.sums.values()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult | FileSum]]) -> None:
        """Write `.metadata`, then the manifest. Called on the coordinator after all ranks have written their files."""
        sums = [one for of_rank in results for one in of_rank if isinstance(one, FileSum)]
        if self._shared:
            _wait_for_all(Path(self.path), [one.name for one in sums])
        self.fs.begin()
        sync_folder(Path(self.path).parent)
        sync_folder(Path(self.path))
        super().finish(metadata, [[one for one in of_rank if not isinstance(one, FileSum)] for of_rank in results])
        name = MANIFEST if self._shared else UNPUBLISHED
        _write_manifest(Path(self.path, name), [*sums, self.fs.sums[METADATA]])


def _wait_for_all(path: Path, names: list[str]) -> None:
    """Wait until the files of all ranks are visible, which network file systems may delay.

    Raises:
        OSError: Some are not, for example because the folder is on the local disks of several nodes.
    """
    end = time.monotonic() + SHARED_SECONDS
    while missing := [name for name in names if not (path / name).exists()]:
        if time.monotonic() >= end:
            raise OSError(
                errno.ENOTDIR,
                f"{len(missing)} of {len(names)} files, first {missing[0]}, are not visible on the node of rank 0: "
                "this is not a file system that all nodes share",
            )
        time.sleep(0.2)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, complete or not. Called on one rank. If it is interrupted, the rest is an incomplete one."""
    if Path(path).is_dir():
        _invalidate(Path(path))
        shutil.rmtree(path)


def _invalidate(path: Path) -> None:
    for name in (MANIFEST, METADATA):  # in this order, see the top of this file
        (path / name).unlink(missing_ok=True)
        sync_folder(path)


# ----------------------------------------------------------------------------------------------------- manifest


def _sum_of(files: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def _write_manifest(path: Path, sums: list[FileSum]) -> None:
    each = sorted(sums, key=lambda one: one.name)
    files = {one.name: {"bytes": one.size, "crc32": f"{one.crc32:08x}"} for one in each}
    sync_folder(path.parent)
    write_whole(path, json.dumps({"format": FORMAT, "files": files, "crc32": _sum_of(files)}, indent=1))


def read_manifest(path: str | os.PathLike[str], name: str = MANIFEST) -> list[FileSum]:
    """Return the files of a checkpoint, from the file `name`.

    Raises:
        ValueError: The manifest is missing or damaged, or has another format.
    """
    path = Path(path)
    try:
        manifest = parse_json((path / name).read_bytes())
        version, files = manifest["format"], manifest["files"]
        if version == FORMAT and manifest["crc32"] != _sum_of(files):
            raise ValueError
        sums = [FileSum(name, one["bytes"], int(one["crc32"], 16)) for name, one in files.items()]
        for one in sums:
            require_plain_name(one.name, path / MANIFEST)
            if type(one.size) is not int:
                raise TypeError
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}") from None
        if (path / METADATA).is_file():
            raise ValueError(f"{path} has no {MANIFEST}, so its files cannot be checked") from None
        if steps := [one for one in path.glob("step-*") if is_finished(one) and one.name[5:].isdigit()]:
            newest = max(steps, key=lambda one: int(one.name[5:]))
            raise ValueError(f"{path} is the folder of all checkpoints; give one of them, such as {newest}") from None
        raise ValueError(f"{path} has no {MANIFEST}: it is half-written") from None
    except OSError as error:
        raise ValueError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path / MANIFEST} is damaged") from None
    if version != FORMAT:
        raise ValueError(f"{path / MANIFEST} has format {version!r}, this version reads {FORMAT}")
    return sums


def is_finished(path: str | os.PathLike[str]) -> bool:
    """Return whether a save was completed: there is a manifest. Its files may have been damaged since.

    Raises OSError if that cannot be determined. `Path.is_file` would return False, with Python 3.14 for any error.
    """
    try:
        return stat.S_ISREG(os.stat(Path(path, MANIFEST)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a manifest, and every file has its size. `find_damage` also reads the data."""
    try:
        return all(damage_of(Path(path), one, reads=False) is None for one in read_manifest(path))
    except (OSError, ValueError):
        return False


def find_damage(path: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> str | None:
    """Read this rank's share of a checkpoint's files, divided by bytes. Not collective.

    Returns:
        The first damaged file and its damage, as a clause; None without damage.

    Raises:
        OSError: A file cannot be read for a reason that may pass: it may be intact.
    """
    path = Path(path)
    try:
        files = read_manifest(path)
    except ValueError as error:
        if cause := passing_cause(error):
            raise cause from None
        return str(error)
    for one in share_of(files, rank, world_size):
        if (damage := damage_of(path, one, reads=True, raises=True)) is not None:
            return damage
    return None


def share_of(files: list[FileSum], rank: int, world_size: int) -> list[FileSum]:
    """Return this rank's files: the largest first, each assigned to the rank with the fewest bytes so far."""
    loads, mine = [0] * world_size, []
    for one in sorted(files, key=lambda one: (-one.size, one.name)):
        least = loads.index(min(loads))
        loads[least] += one.size
        if least == rank:
            mine.append(one)
    return mine


def damage_of(path: Path, one: FileSum, reads: bool, raises: bool = False) -> str | None:
    """Return the damage of a file, as a clause: a wrong size, or if it `reads` the file also a wrong checksum.

    An error of a read that may pass is damage as well, as of a local disk, or `raises`.
    """
    file, crc32 = path / one.name, one.crc32
    try:
        size = file.stat().st_size
        if reads and size == one.size:
            crc32 = _crc32_of(file, size)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        if raises and may_pass(error):
            raise
        return f"{file} cannot be read: {error.strerror}"
    if size != one.size:
        wrong = "truncated" if size < one.size else "too long"
        return pointer_text(file) or f"{file} is {wrong}: has {size:,} of {one.size:,} bytes"
    return None if crc32 == one.crc32 else f"{file} is damaged: its bytes do not give its checksum"


def _crc32_of(file: Path, size: int) -> int:
    buffer, crc32 = memoryview(bytearray(min(_CHUNK, size))), 0
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


# ------------------------------------------------------------------------------------- the folder of all checkpoints


def steps_in(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps that have a folder, in ascending order. Raises OSError if `folder` exists and cannot be read."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (re.fullmatch(r"step-(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def call_on_rank_0(function: Callable[[], Any]) -> Any:
    """Return the result of `function` on rank 0: nodes may have different views of a shared file system. Collective.

    Raises:
        OSError, ValueError: On every rank, if `function` raises it on rank 0.
    """
    outcome: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (OSError, ValueError) as error:
            outcome[1:] = error, passing_cause(error)  # which pickle would leave out
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        if dist.get_rank() != 0:
            outcome[1].__cause__ = outcome[2]
        raise outcome[1]
    return outcome[0]


def first_damage(path: str) -> str | None:
    """Return a description of the first damage, or None. Collective: each rank reads some of the files.

    Raises:
        ValueError: On every rank, from the error of a read that may pass.
    """
    damage: str | None = None
    lost: OSError | None = None
    try:
        damage = find_damage(path, dist.get_rank(), dist.get_world_size())
    except OSError as error:
        lost = error
    damages, errors = zip(*gather_lists(dist.group.WORLD, [(damage, lost)]), strict=True)
    if first := next(filter(None, errors), None):
        raise ValueError(f"{path} cannot be read: {first.strerror}") from first
    return next((text for text in damages if text is not None), None)


def note_failed_step(folder: str, step: int) -> None:
    """Append a step at which the run found damage, so that a restart can choose an older checkpoint.

    A checkpoint may contain damage that no check finds when it is written. Every restart from it would fail at the same
    step.
    """
    with open(Path(folder, FAILED_STEPS), "a") as file:
        file.write(f"{step}\n")


def newest_to_leave_out(folder: str, steps: Sequence[int]) -> tuple[int, int]:
    """Return how many of the newest checkpoints a start leaves out, and the step at which it failed before.

    It leaves out none after the first failure at a step, one after the second, and so on; all but the oldest at most. A
    checkpoint that is newer than the last failure, such as one of a run that has left out its damaged predecessor, is
    not left out.

    Args:
        steps: of the finished checkpoints, ascending.
    """
    path = Path(folder, FAILED_STEPS)
    failed = [int(line) for line in path.read_text().split() if line.isdigit()] if path.exists() else []
    if not failed or not steps or max(steps) >= failed[-1]:
        return 0, 0
    if os.path.getmtime(Path(folder, f"step-{steps[-1]}", MANIFEST)) > path.stat().st_mtime:
        return 0, 0
    in_a_row = next((i for i, step in enumerate(reversed(failed)) if step != failed[-1]), len(failed))
    return min(in_a_row - 1, len(steps) - 1), failed[-1]


def check_shared(folder: str | os.PathLike[str]) -> None:
    """Check at startup that all nodes see the folder: a run would fail at its first save. Collective over all ranks.

    Raises:
        ValueError: On every rank, with the hosts that do not see the folder.
        OSError: On every rank, if rank 0 cannot write to the folder.
    """
    if hosts := hosts_without(folder):
        raise ValueError(not_shared_text(folder, hosts))


def hosts_without(folder: str | os.PathLike[str]) -> list[str]:
    """Return the hosts that do not see `folder` of rank 0's host, or cannot write to it. Collective over all ranks.

    Rank 0 writes an empty file with a random name, and the ranks with LOCAL_RANK 0 look for it. The file is removed
    afterwards, and the folder as well if it did not exist before. Raises OSError as `check_shared`.
    """
    path = Path(folder).absolute()
    probe = path / call_on_rank_0(lambda: write_probe(path))
    host = None
    if os.environ.get("LOCAL_RANK", "0") == "0" and not (_is_visible(probe) and os.access(path, os.W_OK | os.X_OK)):
        host = socket.gethostname()
    hosts = gather_lists(dist.group.WORLD, [] if host is None else [host])
    if dist.get_rank() == 0:
        with suppress(OSError):
            probe.unlink()
            path.rmdir()  # only if it is empty
    return sorted(set(hosts))


def not_shared_text(folder: str | os.PathLike[str], hosts: list[str]) -> str:
    """Return one line with the hosts that do not see the folder, and the fix."""
    return (
        f"{Path(folder).absolute()} is not a folder that all nodes share and may write to: a file of rank 0 is missing "
        f"on {first_text(hosts, 8)}; checkpoints need one. Set --job.dump_folder to a folder of a shared file "
        "system, such as NFS or Lustre, or --checkpoint.copies=1 to keep them on the nodes"
    )


def write_probe(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".probe-{secrets.token_hex(8)}"
    (folder / name).touch(exist_ok=False)
    return name


def _is_visible(probe: Path) -> bool:
    """Wait until the file is visible. A new name is in no cache, but its folders may be cached as missing."""
    end = time.monotonic() + SHARED_SECONDS
    while not probe.exists():
        if time.monotonic() >= end:
            return False
        for folder in reversed(probe.parents):  # opening a folder makes NFS update its cached entries
            with suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        time.sleep(0.2)
    return True


# ------------------------------------------------------------------------------------------------------ messages


def failure_text(error: BaseException, folder: str | os.PathLike[str], reading: bool = False) -> str:
    """Return one line for a failed save or load of `folder`: reasons, ranks and, for a save, free bytes and the fix."""
    failures = error.failures if isinstance(error, CheckpointException) else {-1: (error, None)}
    ranks: dict[str, list[int]] = {}
    advice = ""
    for rank, (cause, _) in sorted(failures.items()):
        ranks.setdefault(_reason(cause), []).append(rank)
        if isinstance(cause, OSError) and not advice and not reading:
            advice = f"; {_free(Path(folder))}{_ADVICE.get(cause.errno or 0, 'name another folder')}"
    return f"checkpoint {folder}: {', '.join(reason + _on_ranks(those) for reason, those in ranks.items())}{advice}"


def first_os_error(error: BaseException) -> OSError | None:
    """Return the error itself, or that of the first rank in DCP's CheckpointException; None if there is no OSError."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return next((cause for cause in causes if isinstance(cause, OSError)), None)


def _reason(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    lines = str(cause).split("\n")
    return lines[0] if isinstance(cause, ValueError) and lines[0] else f"{type(cause).__name__}: {lines[0]}"


def _on_ranks(ranks: list[int]) -> str:
    if ranks == [-1]:
        return ""
    return f" on rank{'s' if len(ranks) > 1 else ''} {first_text(ranks, 4)}"


def _free(folder: Path) -> str:
    for path in (folder, *folder.absolute().parents):
        with suppress(OSError):  # the folder may not be there, or may just be removed
            return f"{shutil.disk_usage(path).free:,} bytes are free; "
    return ""

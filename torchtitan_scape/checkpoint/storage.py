"""Checkpoint folders with a manifest of checksums, on top of torch.distributed.checkpoint (DCP).

    dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    find_damage(path, rank, world_size)     # None, or a description of the first damaged file of this rank's share
    dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner())      # see safe_load.py

A save writes the data files, then DCP's `.metadata`, then `manifest.json` with the name, size and CRC-32 of every other
file. The checksums are computed from the bytes that are written. Each file is synchronized to the disk before the next
one begins, and saving into an existing folder first deletes its manifest and `.metadata`. Therefore, wherever a save is
interrupted, a folder with a manifest is complete, and one with neither manifest nor `.metadata` is incomplete.
"""

import errno
import io
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_scape.core.files import parse_json, pointer_text, require_plain_name, sync_folder

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = 1
SHARED_SECONDS = 30.0  # time for the files of other nodes to become visible
_CHUNK = 4 << 20  # bytes read at a time
_LARGE = 1 << 18  # bytes of a write from which the checksum is computed in a second thread


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
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        # The streams synchronize their files themselves: DCP does so before Python's buffers are written.
        super().__init__(path, sync_files=False, thread_count=thread_count)
        self.fs = _SummedFileSystem()

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
        _wait_for_all(Path(self.path), [one.name for one in sums])
        self.fs.begin()
        sync_folder(Path(self.path).parent)
        sync_folder(Path(self.path))
        super().finish(metadata, [[one for one in of_rank if not isinstance(one, FileSum)] for of_rank in results])
        _write_manifest(Path(self.path), [*sums, self.fs.sums[METADATA]])


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
    files = {
        one.name: {"bytes": one.size, "crc32": f"{one.crc32:08x}"} for one in sorted(sums, key=lambda one: one.name)
    }
    manifest = {"format": FORMAT, "files": files, "crc32": _sum_of(files)}
    sync_folder(path)
    with _SummedStream(path / f"{MANIFEST}.tmp") as stream:
        stream.write(json.dumps(manifest, indent=1).encode())
    os.replace(path / f"{MANIFEST}.tmp", path / MANIFEST)
    sync_folder(path)


def read_manifest(path: str | os.PathLike[str]) -> list[FileSum]:
    """Return the files of a checkpoint.

    Raises:
        ValueError: The manifest is missing or damaged, or has another format.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    try:
        manifest = parse_json((path / MANIFEST).read_bytes())
        version, files = manifest["format"], manifest["files"]
        if version == FORMAT and manifest["crc32"] != _sum_of(files):
            raise ValueError
        sums = [FileSum(name, one["bytes"], int(one["crc32"], 16)) for name, one in files.items()]
        for one in sums:
            require_plain_name(one.name, path / MANIFEST)
            if type(one.size) is not int:
                raise TypeError
    except FileNotFoundError:
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
    """Return whether a save was completed: there is a manifest. Its files may have been damaged since."""
    return Path(path, MANIFEST).is_file()


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a manifest, and every file has its size. `find_damage` also reads the data."""
    try:
        return all(_wrong_size(Path(path), one) is None for one in read_manifest(path))
    except ValueError:
        return False


def find_damage(path: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> str | None:
    """Read this rank's share of a checkpoint's files, divided by bytes. Not collective.

    Returns:
        The first damaged file and its damage, as a clause; None without damage.
    """
    path = Path(path)
    try:
        files = read_manifest(path)
    except ValueError as error:
        return str(error)
    for one in _share(files, rank, world_size):
        if (damage := _wrong_size(path, one) or _wrong_sum(path, one)) is not None:
            return damage
    return None


def _share(files: list[FileSum], rank: int, world_size: int) -> list[FileSum]:
    """Return this rank's files: the largest first, each assigned to the rank with the fewest bytes so far."""
    loads, mine = [0] * world_size, []
    for one in sorted(files, key=lambda one: (-one.size, one.name)):
        least = loads.index(min(loads))
        loads[least] += one.size
        if least == rank:
            mine.append(one)
    return mine


def _wrong_size(path: Path, one: FileSum) -> str | None:
    try:
        size = (path / one.name).stat().st_size
    except FileNotFoundError:
        return f"{path / one.name} is missing"
    except OSError as error:
        return f"{path / one.name} cannot be read: {error.strerror}"
    if size == one.size:
        return None
    if pointer := pointer_text(path / one.name):
        return pointer
    return f"{path / one.name} is {'truncated' if size < one.size else 'too long'}: has {size:,} of {one.size:,} bytes"


def _wrong_sum(path: Path, one: FileSum) -> str | None:
    buffer, crc32 = memoryview(bytearray(min(_CHUNK, one.size))), 0
    try:
        with open(path / one.name, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                crc32 = zlib.crc32(buffer[:count], crc32)
    except OSError as error:
        return f"{path / one.name} cannot be read: {error.strerror}"
    return None if crc32 == one.crc32 else f"{path / one.name} is damaged: its bytes do not give its checksum"

"""Checkpoint folders that are whole or known not to be, on top of torch.distributed.checkpoint (DCP).

    dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    find_damage(path, rank, world_size)     # None, or what is wrong with this rank's share of the files
    dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner())      # see safe_load.py

A save writes the data files, then DCP's `.metadata`, then `manifest.json`: every other file's name, bytes and CRC-32,
the sums taken from the bytes on their way to the disk. Each is on the disk before the next begins, and a folder that is
written again loses manifest and `.metadata` first. So whatever ends a save, at any point: a folder with a manifest is
whole, and one with neither manifest nor `.metadata` is half-written.
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

from torchtitan_scape.core.files import parse_json, require_plain_name, sync_folder

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT = 1
SHARED_SECONDS = 30.0  # time for the files of other nodes to become visible
_CHUNK = 4 << 20  # bytes read at a time
_LARGE = 1 << 18  # bytes of a write from which a second thread pays


@dataclass(frozen=True)
class FileSum:
    """A file of a checkpoint: name in its folder, bytes, CRC-32."""

    name: str
    size: int
    crc32: int


# ------------------------------------------------------------------------------------------------------ writing


class _SummedStream(io.BufferedWriter):
    """A new file whose CRC-32 is taken as it is written; closing it puts it on the disk. Sequential."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.size = self.crc32 = 0
        self.error: OSError | None = None
        self._summer = ThreadPoolExecutor(1)  # starts no thread before it is needed

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        # Of a large piece beside the write: both let go of the interpreter.
        summing = self._summer.submit(zlib.crc32, data, self.crc32) if nbytes >= _LARGE else None
        try:
            super().write(data)
        except OSError as error:
            # torch.save turns it into a RuntimeError that does not say why.
            self.error = error
            raise
        finally:
            self.crc32 = zlib.crc32(data, self.crc32) if summing is None else summing.result()
        self.size += nbytes
        return nbytes

    def seek(self, *args: Any) -> int:
        raise io.UnsupportedOperation("a checksummed file is written from its begin to its end")

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()
        self._summer.shutdown()

    def abandon(self) -> None:
        """Closes the file without writing what is still held back."""
        self.raw.close()
        self._summer.shutdown()


class _SummedFileSystem(FileSystem):
    """DCP's file system, which keeps the sums of what it wrote, by name. Threads may share it; it can be pickled."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets what belongs to an earlier save."""
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
    """DCP's writer of one file a rank and thread, each checksummed and put on the disk, with a manifest at the end.

    It serves dcp.save, and dcp.async_save in a thread or a process, into a new folder or over an older checkpoint; not
    use_collectives=False, for then no rank knows all files. An OSError (a full disk, say) reaches every rank as it was
    raised, inside DCP's CheckpointException: see failure_text.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        # The streams put their files on the disk themselves: DCP's own way misses what Python still holds back.
        super().__init__(path, sync_files=False, thread_count=thread_count)
        self.fs = _SummedFileSystem()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "CheckedWriter cannot save with use_collectives = False: the manifest names all ranks' files"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The folder. Unlike DCP's, silent about a checkpoint that is already there."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator alone, after every rank's plan and before any rank's first byte: the old one is void."""
        _invalidate(Path(self.path))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult | FileSum]]:
        """This rank's files. Sums travel to the coordinator with DCP's own results. Raises OSError."""
        self.fs.begin()
        try:
            results = super().write_data(plan, planner).value()
        except BaseException:
            # DCP leaves its other threads writing; they stop at the next file.
            while self.fs.open:
                time.sleep(0.01)
            raise
        if self.fs.errors:  # of another thread, which DCP does not look at
            raise self.fs.errors[0]
        done: Future[list[WriteResult | FileSum]] = Future()
        done.set_result([*results, *self.fs.sums.values()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult | FileSum]]) -> None:
        """On the coordinator, when all files of all ranks are on the disk: `.metadata`, then the manifest."""
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
        OSError: some are not, as if the folder is on the local disks of several nodes.
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
    """Deletes a checkpoint, whole or not; one rank calls it. What is left if it is stopped does not count as one."""
    if Path(path).is_dir():
        _invalidate(Path(path))
        shutil.rmtree(path)


def _invalidate(path: Path) -> None:
    for name in (MANIFEST, METADATA):  # in this order: see the rule above
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
    """The files of a checkpoint. Raises ValueError with a clause that says what is wrong with its manifest."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    try:
        manifest = parse_json((path / MANIFEST).read_bytes())
        version, files = manifest["format"], manifest["files"]
        if version == FORMAT and manifest["crc32"] != _sum_of(files):
            raise ValueError
        sums = [FileSum(name, one["bytes"], int(one["crc32"], 16)) for name, one in files.items()]
        for name in files:
            require_plain_name(name, path / MANIFEST)
    except FileNotFoundError:
        if (path / METADATA).is_file():
            raise ValueError(f"{path} has no {MANIFEST}, so its files cannot be checked") from None
        raise ValueError(f"{path} has no {MANIFEST}: it is half-written") from None
    except OSError as error:
        raise ValueError(f"{path / MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path / MANIFEST} is damaged") from None
    if version != FORMAT:
        raise ValueError(f"{path / MANIFEST} has format {version!r}, this version reads {FORMAT}")
    return sums


def is_finished(path: str | os.PathLike[str]) -> bool:
    """Whether a save came to its end here: there is a manifest. What it lists may have been damaged since."""
    return Path(path, MANIFEST).is_file()


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether the manifest is there and every file has its size. Reads no data: find_damage does."""
    try:
        return all(_wrong_size(Path(path), one) is None for one in read_manifest(path))
    except ValueError:
        return False


def find_damage(path: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> str | None:
    """Reads this rank's share of a checkpoint's files, dealt out by bytes; no collective call.

    Returns one clause that names the first bad file and what is wrong with it, or None.
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
    """Largest first, each to the rank with the fewest bytes so far; the same on all ranks."""
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

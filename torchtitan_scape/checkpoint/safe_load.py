"""Loading checkpoints of torch.distributed.checkpoint (DCP) without executing code from them.

DCP unpickles `.metadata` and every value that is not a tensor, without restrictions. Here `.metadata` may contain only
the classes that DCP itself writes, and other values are loaded by `torch.load` with `weights_only`.
"""

import gc
import io
import pickle
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_scape.checkpoint.metadata_checks import Index, RefusedError, check_metadata, check_opcodes
from torchtitan_scape.core.command import one_line

# All classes that FileSystemWriter of torch 2.10 to 2.14 writes into `.metadata`, except torch.dtype (see below).
_ADMITTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (MetadataIndex.__module__, "MetadataIndex"):
            return Index
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11.0 to 3.11.3 pickle an enum
        if (module, name) == ("pathlib._local", "PosixPath"):
            return Path  # as Python 3.13 pickles it
        if (module, name) not in _ADMITTED:
            raise RefusedError(f"names {module}.{name}, which no checkpoint needs; loading it could run code")
        return super().find_class(module, name)


def _unpickled(content: bytes) -> Any:
    """Return the object. The garbage collector, which would visit millions of objects repeatedly, is off meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _Unpickler(io.BytesIO(content)).load()
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1)  # A load reads it several times, and it may describe 100,000s of chunks.
def _read_metadata(path: Path, size: int, mtime_ns: int) -> Metadata:
    """Return the checked contents of `.metadata`, with its size and time of change, which identify them."""
    content = path.read_bytes()
    check_opcodes(content)
    metadata = _unpickled(content)
    check_metadata(metadata)
    return metadata


def forget_metadata() -> None:
    """Free the memory of the metadata that were read last."""
    _read_metadata.cache_clear()


def _member(kind: Any, name: str) -> Any:
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING":
        raise RefusedError(f"asks for the attribute {name} of {kind}; loading it could run code")
    return kind[name]


class CheckedReader(FileSystemReader):
    """DCP's reader with a checked `.metadata`.

    Inside `dcp.load` its ValueError becomes DCP's CheckpointException, after a warning in the log: call `read_metadata`
    first.
    """

    def read_metadata(self) -> Metadata:
        """Return the metadata, whose values the callers share and must not change.

        Raises:
            ValueError: `.metadata` is missing or damaged, could run code, or names a file outside its folder.
        """
        path = Path(self.path) / ".metadata"
        try:
            found = path.stat()
            metadata = _read_metadata(path, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except RefusedError as error:
            raise ValueError(f"{path} is refused: it {one_line(error)}") from None
        except Exception as error:  # damaged bytes can raise anything
            raise ValueError(f"{path} is damaged ({type(error).__name__})") from None
        return replace(metadata, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors and values, file by file. Not collective.

        Raises:
            ValueError: a file is damaged, or has not what `.metadata` describes.
            OSError: a file cannot be read.
        """
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self._file_of(item), []).append(item)
        for name, items in files.items():
            path = Path(self.path) / name
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except FileNotFoundError:
                raise ValueError(f"{path} is missing") from None
            except (OSError, ValueError):
                raise
            except Exception as error:  # damaged bytes can raise anything
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise ValueError(f"{path} has not what .metadata describes ({reason})") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file_of(self, item: ReadItem) -> str:
        """Return the name of the file of an entry, which must be large enough."""
        found = self.storage_data.get(item.storage_index)
        if found is None:
            raise ValueError(f"{self.path}/.metadata names no file of {item.storage_index.fqn}")
        path, end = Path(self.path) / found.relative_path, found.offset + found.length
        if path.exists() and end > (size := path.stat().st_size):
            name = item.storage_index.fqn
            raise ValueError(f"{path} has {size:,} bytes, but .metadata places the end of {name!r} at byte {end:,}")
        return str(found.relative_path)


class SafePlanner(DefaultLoadPlanner):
    """DCP's load planner for tensors and plain data: numbers, text, bytes, and containers of these."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor.

        Raises:
            ValueError: it is damaged, or not plain data.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"the checkpoint's value {name} is refused: {_refused(error)}") from None
        except Exception as error:
            raise ValueError(f"the checkpoint's value {name} is damaged ({type(error).__name__})") from None
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _refused(error: pickle.UnpicklingError) -> str:
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is None:
        return "it is no plain data"
    return f"it holds {found[1]}, which is no plain data; loading it could run code"

"""Reading checkpoints of torch.distributed.checkpoint (DCP) without executing code from them, and the run's record.

DCP unpickles `.metadata` and every value that is not a tensor, without restrictions. Here `.metadata` may contain only
the classes that DCP itself writes, and other values are loaded by `torch.load` with `weights_only`.
"""

import gc
import io
import json
import math
import os
import pickle
import pickletools
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.futures import Future

from torchtitan_scape.checkpoint.state import describe_states, has_dense_state, stores
from torchtitan_scape.checkpoint.storage import failure_text, first_os_error
from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import parse_json
from torchtitan_scape.core.options import removed_keys, with_present_keys
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

_CODES = {code.name: ord(code.code) for code in pickletools.opcodes}


def _of(names: str) -> set[int]:
    return {_CODES[name] for name in names.split()}


_TUPLES = _of("TUPLE TUPLE1 TUPLE2 TUPLE3")
# After these a pickler stores the new object for later references.
_NEW_OBJECTS = _TUPLES | _of(
    "EMPTY_LIST EMPTY_DICT REDUCE NEWOBJ GLOBAL STACK_GLOBAL SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES"
)
_PUTS = {_CODES["MEMOIZE"]: 0, _CODES["BINPUT"]: 1, _CODES["LONG_BINPUT"]: 4}  # Bytes of the number.
_GETS = {_CODES["BINGET"]: 1, _CODES["LONG_BINGET"]: 4}
_OTHERS = _of(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT EMPTY_TUPLE APPEND APPENDS "
    "SETITEM SETITEMS BUILD"
)
_ADMITTED_CODES = _NEW_OBJECTS | _PUTS.keys() | _GETS.keys() | _OTHERS


def _size(code: pickletools.OpcodeInfo) -> int:
    """Return the bytes of the argument; negative if it begins with its own length, of so many bytes."""
    if code.arg is None:
        return 0
    of_length = {pickletools.TAKEN_FROM_ARGUMENT1: -1, pickletools.TAKEN_FROM_ARGUMENT4: -4}
    return of_length.get(code.arg.n, -4 if code.arg.n == pickletools.TAKEN_FROM_ARGUMENT4U else code.arg.n)


_SIZES = {ord(code.code): _size(code) for code in pickletools.opcodes}


class RefusedError(pickle.UnpicklingError):
    """`.metadata` contains what no checkpoint needs; the message continues "it ..."."""


class _Index:
    """A MetadataIndex as it was read. Its hash is that of the object: the hash of MetadataIndex would visit whatever a
    file has in its place.
    """

    fqn: Any = None
    offset: Any = None
    index: Any = None

    def checked(self) -> MetadataIndex:
        """Return the MetadataIndex. Raises TypeError if a field has another type."""
        if (type(self.fqn), type(self.index)) not in ((str, int), (str, type(None))):
            raise TypeError
        if self.offset is not None and not isinstance(self.offset, torch.Size):
            raise TypeError
        return MetadataIndex(self.fqn, self.offset, self.index)


def check_opcodes(content: bytes) -> None:
    """Refuse references to tuples, and codes that no pickler writes for `.metadata`, before it is unpickled.

    A few bytes can nest references to tuples so that the tuple has 2**60 leaves, which its hash visits.

    Raises:
        RefusedError: The pickle has such codes.
        IndexError: It is incomplete.
    """
    position, number, last, tuples, stop = 0, 0, 0, set[int](), _CODES["STOP"]
    frame, sizes = _CODES["FRAME"], _SIZES
    while True:
        code = content[position]
        position += 1
        if code not in _ADMITTED_CODES:
            raise RefusedError(f"has the pickle opcode {code:#04x}, which no checkpoint needs")
        if code in _PUTS:
            if last not in _NEW_OBJECTS:
                raise RefusedError("stores a reference where no checkpoint does")
            width = _PUTS[code]
            index = int.from_bytes(content[position : position + width], "little") if width else number
            number += 1
            if last in _TUPLES:
                tuples.add(index)
        elif code in _GETS and int.from_bytes(content[position : position + _GETS[code]], "little") in tuples:
            raise RefusedError("refers to a tuple several times; reading it could take forever")
        elif code == _CODES["GLOBAL"]:
            position = content.index(b"\n", content.index(b"\n", position) + 1) + 1
            last = code
            continue
        elif code == stop:
            return
        size = sizes[code]
        position += size if size >= 0 else int.from_bytes(content[position : position - size], "little") - size
        if code != frame:
            last = code


def check_metadata(metadata: Any) -> None:
    """Check the types and numbers of all values, and replace each Index by its MetadataIndex.

    Raises:
        RefusedError: The metadata names a file outside of its folder.
        TypeError, AttributeError, ValueError: A value is of another type or impossible.
    """
    if type(metadata) is not Metadata or type(metadata.state_dict_metadata) is not dict:
        raise TypeError
    if type(metadata.storage_meta) not in (StorageMeta, type(None)):
        raise TypeError
    for name, stored in metadata.state_dict_metadata.items():
        if type(name) is not str or type(stored) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise TypeError
        if isinstance(stored, TensorStorageMetadata):
            _check_tensor(stored)
    metadata.storage_data = {index.checked(): info for index, info in metadata.storage_data.items()}
    for info in metadata.storage_data.values():
        if type(info) is not _StorageInfo or type(info.relative_path) is not str:
            raise TypeError
        if not (type(info.offset) is type(info.length) is int and info.offset >= 0 and info.length >= 0):
            raise ValueError
        if info.relative_path != os.path.basename(info.relative_path) or info.relative_path in ("", ".", ".."):
            raise RefusedError(f"names the file {info.relative_path!r}, which is not in its folder")


def _check_tensor(stored: TensorStorageMetadata) -> None:
    if type(stored.properties) is not TensorProperties or not isinstance(stored.properties.dtype, torch.dtype):
        raise TypeError
    if type(stored.size) is not torch.Size or type(stored.chunks) is not list:
        raise TypeError
    for chunk in stored.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > whole for end, whole in zip(ends, stored.size, strict=True)):
            raise ValueError
        if min((*chunk.offsets, *chunk.sizes), default=0) < 0:
            raise ValueError
    # Entries outside of all chunks would silently keep the values that they have before the load.
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
        raise ValueError


# ------------------------------------------------------------------------------------------------------ reading


def _member(kind: Any, name: str) -> Any:
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING":
        raise RefusedError(f"asks for the attribute {name} of {kind}; loading it could run code")
    return kind[name]


# All classes that FileSystemWriter of torch 2.10 to 2.14 writes into `.metadata`, except torch.dtype (see below).
_CLASSES = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, StorageMeta, TensorProperties, TensorStorageMetadata)
_ADMITTED = {(kind.__module__, kind.__name__) for kind in (*_CLASSES, _MEM_FORMAT_ENCODING, _StorageInfo, OrderedDict)}
_ADMITTED |= {("torch", "Size"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath")}
_ADMITTED |= {("torch.serialization", "_get_layout")}  # looks a name up in a table
_REPLACED = {
    (MetadataIndex.__module__, "MetadataIndex"): _Index,
    ("builtins", "getattr"): _member,  # how Python 3.11.0 to 3.11.3 pickle an enum
    ("pathlib._local", "PosixPath"): Path,  # as Python 3.13 pickles it
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ADMITTED:
            raise RefusedError(f"names {module}.{name}, which no checkpoint needs; loading it could run code")
        return super().find_class(module, name)


@lru_cache(maxsize=1)  # A load reads it several times, and it may describe 100,000s of chunks.
def _read_metadata(path: Path, size: int, mtime_ns: int) -> Metadata:
    """Return the checked contents of `.metadata`, with its size and time of change, which identify them."""
    content, enabled = path.read_bytes(), gc.isenabled()
    check_opcodes(content)
    gc.disable()  # it would visit millions of objects repeatedly
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    finally:
        if enabled:
            gc.enable()
    check_metadata(metadata)
    return metadata


def forget_metadata() -> None:
    """Free the memory of the metadata that were read last."""
    _read_metadata.cache_clear()


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
            status = path.stat()
            metadata = _read_metadata(path, status.st_size, status.st_mtime_ns)
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
        info = self.storage_data.get(item.storage_index)
        if info is None:
            raise ValueError(f"{self.path}/.metadata names no file of {item.storage_index.fqn}")
        path, end = Path(self.path) / info.relative_path, info.offset + info.length
        if path.exists() and end > (size := path.stat().st_size):
            name = item.storage_index.fqn
            raise ValueError(f"{path} has {size:,} bytes, but .metadata places the end of {name!r} at byte {end:,}")
        return str(info.relative_path)


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
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return "it is no plain data"
    return f"it holds {named[1]}, which is no plain data; loading it could run code"


def names_in(path: str) -> set[str]:
    """Return the names of all entries of a checkpoint, such as "train_state.step", and their first parts."""
    names = set(CheckedReader(path).read_metadata().state_dict_metadata)
    return names | {name.split(".")[0] for name in names}


@contextmanager
def one_process() -> Iterator[None]:
    """Suppress DCP's warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def load_into(path: str, state: dict[str, Any], alone: bool = False) -> None:
    """Read the entries of `state` from a checkpoint, in place. Collective, unless this rank reads `alone`.

    Raises:
        ValueError: an entry is missing or has another shape, or the checkpoint cannot be read.
    """
    try:
        with one_process():
            dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner(), no_dist=alone)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if "Missing key" in str(cause) or "ize mismatch" in str(cause):
                raise ValueError(f"{path} is of another model or method: {' '.join(str(cause).split())}") from None
        if all(isinstance(cause, (ValueError, OSError)) for cause in causes):
            raise ValueError(failure_text(error, path, reading=True)) from first_os_error(error)
        CheckedReader(path).read_metadata()  # Raises the reason if it is in `.metadata`; DCP replaces it.
        raise


# ----------------------------------------------------------------------------------------------- the record of the run

RUN_METADATA = "run_metadata"
# With another value of these, state is loaded by the rule for another layout; so it is with some options of a method.
_LAYOUT = {"replicas", "shard", "context", "tensor", "pipeline", "levels_weights", "levels_block"}
FORMAT = 3
_READS_EARLIER = "937dd8d0"  # the last commit that reads formats 1 and 2; it writes format 3
# Types of values that every record has.
_TYPES: dict[str, type] = {"method": str, "optimizer": str, "residual": str, "replicas": int, "shard": int}
_TYPES |= {"states": dict, "counters": dict}


class RunMetadata(Stateful):
    """Layout, method and options of a run, and its counters at the time of the save.

    Args:
        optimizer: it is asked for its counters at every save.
        residual: "exact", "mean" or "drop".
        facts: of the run, by name, JSON values; at least "model".

    Attributes:
        sent: bytes that a rank has sent until now, by level; None if unknown. The trainer sets it before every save.
    """

    sent: dict[str, float] | None = None

    def __init__(self, optimizer: ReplicaOptimizer, residual: str, facts: dict[str, Any]) -> None:
        self._optimizer, options, collectives = optimizer, optimizer.options, optimizer.collectives
        self.values: dict[str, Any] = {
            "format": FORMAT,
            "replicas": collectives.replicas,
            "shard": collectives.model_ranks,
            "method": options.method_name(),
            "optimizer": type(optimizer.inner).__name__,
            "dense_state": has_dense_state(optimizer),
            "betas": list(optimizer.param_groups[0].get("betas", ())),
            "residual": residual,
            "states": describe_states(optimizer, residual),
            **options.fingerprint(),
            **facts,
        }
        self._layout = {*_LAYOUT & self.values.keys(), *options.layout()}
        self._kinds = set(describe_states(optimizer, "exact"))

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.values | self._counters() | {"bytes_sent": self.sent})}

    def _counters(self) -> dict[str, Any]:
        """Return the counters and the state that is not a tensor."""
        optimizer = self._optimizer
        optimizer.finish_previous_step()
        counters = {"skipped": optimizer.guard.skipped, "skipped_in_a_row": optimizer.guard.skipped_in_a_row}
        values = {"counters": counters, "attempted_steps": optimizer.attempted_steps, **optimizer.methods[0].record()}
        if (each := stores(optimizer)) and (steps := each[0].steps()):
            values["applied_steps"] = float(steps[0])
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: `read_record` reads the record before anything else is loaded."""

    def compare(self, saved: dict[str, Any], path: str) -> tuple[bool, dict[str, str]]:
        """Compare this run with the one that saved.

        Returns:
            (whether the state can be loaded as it was saved, all differences as key: "saved -> here").

        Raises:
            ValueError: the checkpoint is of another model.
        """
        if saved["model"] != self.values["model"]:
            raise ValueError(
                f"{path} holds the model {saved['model']!r}, this run has {self.values['model']!r}; build the model "
                "of the checkpoint, or start in another folder (--job.dump_folder of the trainer)"
            )
        keys = [
            key
            for key in self.values | saved
            if key in self.values and key in saved and key not in ("format", "dense_state", "residual", "states")
        ]
        different = {key: f"{saved[key]!r} -> {self.values[key]!r}" for key in keys if saved[key] != self.values[key]}
        other = saved["method"] != self.values["method"] or saved["optimizer"] != self.values["optimizer"]
        laid_out = {key for key in self._layout if saved.get(key) != self.values[key]}
        removed = removed_keys(saved, f"sync.{saved['method']}")
        laid_out |= removed
        different |= {key: f"{saved[key]!r} -> removed" for key in removed}
        # If the code determines the layout of states (SCAPE), quantization errors belong to the entries of a payload,
        # which are others at another density.
        coded = {saved.get("code"), self.values.get("code")} - {None, "float32"}
        if "density" in different and "code" in self._layout and coded:
            laid_out.add("density")
        # An owner's error that this run has no state for must be subtracted from the weights.
        states = saved.get("states", {}).items()
        unknown = {k for k, s in states if s["on_migration"] == "displacement" and k not in self._kinds}
        return not (other or laid_out or unknown), different


def read_record(path: str) -> dict[str, Any]:
    """Return the record of the run that saved. Collective.

    Raises:
        ValueError: it cannot be read, is damaged, or is of another format.
    """
    state: dict[str, Any] = {RUN_METADATA: {"json": ""}}
    load_into(path, state)
    return parse_record(state[RUN_METADATA]["json"], path)


class _Record(dict[str, Any]):
    """A record whose missing keys raise ValueError with the checkpoint's path."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        super().__init__({k: _Record(v, path) if isinstance(v, dict) else v for k, v in values.items()})
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise damaged(self._path, f"it has no {key!r}")


def damaged(path: str, reason: str) -> ValueError:
    """Return the error for a record of the checkpoint `path` that cannot be interpreted."""
    return ValueError(f"{path}: the record of the run, run_metadata.json, is damaged: {reason}")


def parse_record(content: Any, path: str) -> dict[str, Any]:
    """Return the record in JSON text, with the present keys of options (`core.options`).

    Raises:
        ValueError: the record is damaged, or of another format. Missing keys raise it when they are read.
    """
    try:
        values = parse_json(content)
    except (ValueError, TypeError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(values, dict):
        raise damaged(path, f"it is {values!r:.100}")
    try:
        saved = _Record(_with_present_keys(_Record(values, path), path), path)
    except (TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    for key, kind in _TYPES.items():
        if type(saved[key]) is not (_Record if kind is dict else kind) or (kind is int and saved[key] < 1):
            raise damaged(path, f"{key!r} is {saved[key]!r:.100}")
    for table, kind in (("states", _Record), ("counters", int)):
        for key, value in saved[table].items():
            if type(value) is not kind:
                raise damaged(path, f"{key!r} of {table!r} is {value!r:.100}")
    if type(saved.get("code")) not in (str, type(None)):
        raise damaged(path, f"'code' is {saved['code']!r:.100}")
    if saved["method"] not in METHODS:
        raise damaged(path, f"there is no method {saved['method']!r:.100}")
    return saved


def _with_present_keys(saved: dict[str, Any], path: str) -> dict[str, Any]:
    version = saved.get("format", 1)
    if version != FORMAT:
        earlier = f"commit {_READS_EARLIER} reads formats 1 and 2: save with it once more" if version in (1, 2) else ""
        raise ValueError(
            f"{path} has format {version!r}, and this version reads format {FORMAT}; "
            f"{earlier or 'resume with the version that saved it'}, or start from its model alone "
            "(--checkpoint.initial_load_path of the trainer)"
        )
    record = with_present_keys(saved, f"sync.{saved['method']}")
    if "sharding" in record:
        record["sharding"] = with_present_keys(record["sharding"], "sharding")
    return record

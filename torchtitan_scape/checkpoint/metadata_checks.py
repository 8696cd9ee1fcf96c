"""Checks of DCP's `.metadata`: before it is unpickled, and of the values in it."""

import math
import os
import pickle
import pickletools
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_CODES = {code.name: ord(code.code) for code in pickletools.opcodes}


def _of(*names: str) -> set[int]:
    return {_CODES[name] for name in names}


_TUPLES = _of("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
# After these a pickler stores the new object for later references.
_NEW_OBJECTS = _TUPLES | _of(
    "EMPTY_LIST",
    "EMPTY_DICT",
    "REDUCE",
    "NEWOBJ",
    "GLOBAL",
    "STACK_GLOBAL",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
)
_PUTS = {_CODES["MEMOIZE"]: 0, _CODES["BINPUT"]: 1, _CODES["LONG_BINPUT"]: 4}  # Bytes of the number.
_GETS = {_CODES["BINGET"]: 1, _CODES["LONG_BINGET"]: 4}
_OTHERS = _of(
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "EMPTY_TUPLE",
    "APPEND",
    "APPENDS",
    "SETITEM",
    "SETITEMS",
    "BUILD",
)
_ADMITTED = _NEW_OBJECTS | _PUTS.keys() | _GETS.keys() | _OTHERS


def _size(code: pickletools.OpcodeInfo) -> int:
    """Return the bytes of the argument; negative if it begins with its own length, of so many bytes."""
    if code.arg is None:
        return 0
    of_length = {pickletools.TAKEN_FROM_ARGUMENT1: -1, pickletools.TAKEN_FROM_ARGUMENT4: -4}
    return of_length.get(code.arg.n, -4 if code.arg.n == pickletools.TAKEN_FROM_ARGUMENT4U else code.arg.n)


_SIZES = {ord(code.code): _size(code) for code in pickletools.opcodes}


class RefusedError(pickle.UnpicklingError):
    """`.metadata` contains what no checkpoint needs; the message continues "it ..."."""


class Index:
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
        if code not in _ADMITTED:
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

"""Files of prepared data: pairs of Megatron's format, and `manifest.json`, written after all other files.

Of a pair, `.bin` contains the token ids of all documents, `.idx` the start of each document, little-endian: the nine
bytes MMIDIDX\\0\\0, uint64 version 1, uint8 code of the ids' dtype, uint64 sequences n, uint64 documents + 1, then
int32 lengths[n] in tokens, int64 offsets[n] in bytes, and int64 [documents + 1] the first sequence of each document.
Files of Megatron's multimodal data continue with int8 modes[n]. In this project a document is one sequence. The layout
is that of megatron-core's `indexed_dataset.py`.
"""

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchtitan_scape.core.files import parse_json, refuse_pointers, require_plain_name, sync_folder, write_whole
from torchtitan_scape.titan.data import BaseTokenizer
from torchtitan_scape.titan.tokenizer import FILES

MANIFEST, FORMAT = "manifest.json", 1
TRAIN, VALIDATION = "train", "validation"
MAGIC, VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's dtype codes that can represent token ids.
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_UINT16 = 65_535

Tokens = np.ndarray[Any, np.dtype[Any]]


def dtype_for(entries: int) -> np.dtype[Any]:
    """Return the dtype of the ids of a tokenizer: two bytes per token up to 65,535 entries, else four."""
    return DTYPES[8 if entries <= LARGEST_UINT16 else 4]


def paths_of(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the pair's `.bin` and `.idx`."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class IndexedShard:
    """A pair of files as recorded in a manifest, with its split, the UTF-8 bytes of its text, and its SHA-256."""

    name: str
    split: str
    documents: int
    tokens: int
    bytes: int
    bin_sha256: str
    idx_sha256: str

    def sizes(self, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the sizes of the two files in bytes."""
        return self.tokens * dtype.itemsize, _HEADER.size + 20 * self.documents + 8


def shard_of(record: dict[str, Any]) -> IndexedShard:
    """Return the shard of a record in a manifest."""
    return IndexedShard(**{key: value for key, value in record.items() if key != "special_documents"})


class PairWriter:
    """Writer of a pair, as `.part` files in one folder; `finish` moves the complete pair to another folder."""

    def __init__(self, folder: Path, name: str, split: str, dtype: np.dtype[Any]) -> None:
        self.name, self.split, self.dtype = name, split, dtype
        self._parts = [path.with_name(path.name + ".part") for path in paths_of(folder / name)]
        self._file: IO[bytes] = open(self._parts[0], "wb")  # noqa: SIM115  # Closed by finish or discard.
        self._digest = hashlib.sha256()
        self._lengths = array("i")
        self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int], lengths: Sequence[int], n_bytes: int) -> None:
        """Append documents: their ids, concatenated, the tokens of each, and the bytes of their text.

        Raises OverflowError if an id does not fit the dtype.
        """
        # Python's `array` converts a list in a third of numpy's time.
        data = array("H" if self.dtype.itemsize == 2 else "i", ids).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._lengths.extend(lengths)
        self.tokens, self.bytes = self.tokens + len(ids), self.bytes + n_bytes

    def finish(self, folder: Path) -> IndexedShard | None:
        """Sync the pair to disk and rename it. Return its record, or None, without a file, if it contains no token."""
        if not self.tokens:
            self.discard()
            return None
        self._flush(self._file)
        index = _index(np.frombuffer(self._lengths, np.int32), self.dtype)
        with open(self._parts[1], "wb") as file:
            file.write(index)
            self._flush(file)
        for part, path in zip(self._parts, paths_of(folder / self.name), strict=True):
            os.replace(part, path)
        sync_folder(folder)
        sums = self._digest.hexdigest(), hashlib.sha256(index).hexdigest()
        counts = len(self._lengths), self.tokens, self.bytes
        return IndexedShard(self.name, self.split, *counts, *sums)

    def discard(self) -> None:
        """Delete the partial files."""
        self._file.close()
        for part in self._parts:
            part.unlink(missing_ok=True)

    @staticmethod
    def _flush(file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _index(lengths: Tokens, dtype: np.dtype[Any]) -> bytes:
    n = len(lengths)
    offsets = np.zeros(n, "<i8")
    np.cumsum(lengths[:-1], out=offsets[1:])
    header = _HEADER.pack(MAGIC, VERSION, _CODES[dtype], n, n + 1)
    return (
        header
        + lengths.astype("<i4").tobytes()
        + (offsets * dtype.itemsize).tobytes()
        + np.arange(n + 1, dtype="<i8").tobytes()
    )


def map_tokens(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Memory-map the ids of a `.bin` as unsigned numbers, so that a negative id exceeds every vocabulary."""
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    if path.stat().st_size == 0:
        return np.empty(0, unsigned)
    return np.asarray(np.memmap(path, unsigned, "r"))


def open_pair(prefix: Path) -> tuple[Tokens, str]:
    """Return the memory-mapped ids of a pair, of unsigned type, and a digest of the index and of a sample of the ids.

    Raises ValueError if a file is missing, has another format, or has another size than the index says.
    """
    path, index_path = paths_of(prefix)
    try:
        refuse_pointers(path, index_path)
        size, index_size = path.stat().st_size, index_path.stat().st_size
        with open(index_path, "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(MAGIC):
                raise ValueError(f"{index_path} is not an index of Megatron's format")
            _, version, code, n, n_documents = _HEADER.unpack(header)
            if version != VERSION or code not in DTYPES:
                known = f"known are {VERSION} and {[*DTYPES]}"
                raise ValueError(f"{index_path} has version {version} and type {code}; {known}")
            file.seek(_HEADER.size + 4 * max(0, n - 1))
            last_length = int.from_bytes(file.read(4), "little")
            file.seek(_HEADER.size + 4 * n + 8 * max(0, n - 1))
            last_offset = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; a pair is {path.name} and {index_path.name}") from None
    min_bytes = _HEADER.size + 12 * n + 8 * n_documents
    if index_size not in (min_bytes, min_bytes + n):
        raise ValueError(f"{index_path} is damaged: {index_size} bytes, {min_bytes} expected for {n} sequences")
    expected = last_offset + last_length * DTYPES[code].itemsize if n else 0
    if size != expected or (n and not size):
        raise ValueError(f"{path} is damaged: {size} bytes, {expected} expected by {index_path.name}")
    tokens = map_tokens(path, DTYPES[code])
    # Pairs of equally long documents have equal indices.
    begins = np.linspace(0, max(0, len(tokens) - 64), 1024).astype(int)
    sample = b"".join(tokens[begin : begin + 64].tobytes() for begin in begins)
    return tokens, hashlib.sha256(digest_of(index_path).encode() + sample).hexdigest()[:16]


def damage(folder: Path, shard: IndexedShard, dtype: np.dtype[Any]) -> str:
    """Return a description of a shard's damage after reading its two files completely, or "" if it is intact."""
    try:
        for path, size, expected in zip(
            paths_of(folder / shard.name), shard.sizes(dtype), (shard.bin_sha256, shard.idx_sha256), strict=True
        ):
            if (actual := path.stat().st_size) != size:
                return f"{path} is damaged: {actual} bytes, {size} expected"
            if digest_of(path) != expected:
                return f"{path} is damaged: its SHA-256 is not the manifest's"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def tokenizer_digest(folder: Path) -> str:
    """Return the first 16 digits of the SHA-256 of the tokenizer's files. Raises ValueError if there are none."""
    for names in FILES:
        if (folder / names[0]).is_file():
            files = [folder / name for name in names if (folder / name).is_file()]
            return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    raise ValueError(f"{str(folder)!r} has no tokenizer: none of {', '.join(names[0] for names in FILES)}")


def tokenizer_entries(tokenizer: BaseTokenizer) -> int:
    """Return the rows of an embedding for all ids: more than the number of tokens if the vocabulary has gaps."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=0))


def tokenizer_facts(folder: Path, tokenizer: BaseTokenizer) -> dict[str, Any]:
    """Return the properties of a tokenizer that must be equal in preparation and training."""
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos")}
    return {"digest": tokenizer_digest(folder), "entries": tokenizer_entries(tokenizer), **ids}


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of prepared data.

    Attributes:
        source: Origin of the text: dataset, path, revision, documents and bytes of text.
        tokenizer: See `tokenizer_facts`.
        held_out: Share of held-out documents; None if the source has its own validation split.
        shards: Shards in token order, training shards first.
        held_out_by: "text" if documents are held out by their text; None of earlier versions, which used their number.
    """

    source: dict[str, Any]
    tokenizer: dict[str, Any]
    border: str
    dtype: str
    shard_tokens: int
    held_out: float | None
    shards: tuple[IndexedShard, ...]
    held_out_by: str | None = None

    def of(self, split: str) -> list[IndexedShard]:
        return [shard for shard in self.shards if shard.split == split]

    def total(self, split: str, quantity: str) -> int:
        """Return the sum of an attribute of the shards of a split, such as its documents, tokens or bytes."""
        return sum(getattr(shard, quantity) for shard in self.of(split))

    def head(self) -> dict[str, Any]:
        """Return all fields except the shards."""
        return {"format": FORMAT, **{key: value for key, value in vars(self).items() if key != "shards"}}

    def write(self, folder: Path) -> None:
        counts = ("documents", "tokens", "bytes")
        content = self.head() | {
            "splits": {split: {count: self.total(split, count) for count in counts} for split in (TRAIN, VALIDATION)},
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder, and check that its files exist with the recorded sizes.

        Raises:
            ValueError: Preparation is unfinished, or the manifest or a shard is damaged.
        """
        path = folder / MANIFEST
        refuse_pointers(path)
        try:
            content = parse_json(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise ValueError
            content.pop("allow_special_tokens", None)  # Of earlier versions, as `special_documents`.
            content["shards"] = tuple(shard_of(shard) for shard in content["shards"])
            for shard in content["shards"]:
                require_plain_name(shard.name, path)
            del content["splits"]
            manifest = cls(**content)
            if missing := {"digest", "entries", "bos", "eos"} - manifest.tokenizer.keys():
                raise ValueError(f"its tokenizer lacks {', '.join(sorted(missing))}")
            dtype = np.dtype(manifest.dtype)
        except FileNotFoundError:
            raise ValueError(
                f"{str(folder)!r} has no {MANIFEST}: it contains no prepared data, or they are unfinished; run "
                "python -m torchtitan_scape.data.prepare to completion"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error or 'another format'}); prepare the data again") from None
        for shard in manifest.shards:
            for file, size in zip(paths_of(folder / shard.name), shard.sizes(dtype), strict=True):
                actual = file.stat().st_size if file.is_file() else None
                if actual != size:
                    refuse_pointers(file)
                    wrong = "is missing" if actual is None else f"has {actual} bytes, {size} expected"
                    raise ValueError(f"the prepared data are damaged: {file} {wrong}; run the prepare command again")
        return manifest

    @staticmethod
    def digest(folder: Path) -> str:
        """Return a digest that identifies a set of prepared data."""
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]

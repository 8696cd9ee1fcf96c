"""Local text files as one data set: selection of the files of a folder, checks of their format, and a copy of the text.

Files are read once, and their text is copied next to the cache of the datasets library, as one column. (The library's
own reader of JSON requires equal columns in all lines, and crashes on a line that is nested thousands of levels deep.)
"""

import codecs
import functools
import gzip
import hashlib
import io
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import datasets.config
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from datasets import Dataset
from filelock import FileLock

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import pointer_text

logger = logging.getLogger(__name__)

# File extension -> format. Plain .json is excluded: next to data it is usually metadata.
_BUILDERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".jsonl.zst": "json",
    ".json.zst": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
TEXT = pyarrow.large_string()
EXPECTED = f'files ending in {", ".join(_BUILDERS)}; all but .txt need a column "text" (training.text_column)'
_SPLITS = ("train", "validation", "test")
KEY_OF_COLUMN = "; training.text_column names the column"
_READ_ERRORS = (OSError, EOFError, zlib.error, pyarrow.ArrowException)
_CHUNK = 1 << 23  # Characters of JSON lines that are copied at once.


class TextPath(str):
    """A local path and the column of its text: TorchTitan passes nothing but a path to the loader of a dataset."""

    column: str

    def __new__(cls, path: str, column: str) -> "TextPath":
        self = super().__new__(cls, path)
        self.column = column
        return self


def _ending(path: Path) -> str | None:
    return next((ending for ending in _BUILDERS if path.name.lower().endswith(ending)), None)


def _split_of(path: Path, root: Path) -> str | None:
    """Return the split whose name is a prefix of the file name, or of the nearest folder's name, or None."""
    names = [path.name] if path == root else [*reversed(path.relative_to(root).parts), root.name]
    return next((split for name in names for split in _SPLITS if name.lower().startswith(split)), None)


def _files_below(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files below a folder, hidden ones excluded, and whether each may contain documents.

    Links are followed, but no folder is visited twice.
    """

    def fail(error: OSError) -> None:
        raise ValueError(f"dataset_path: the folder {error.filename} cannot be read ({error.strerror})") from error

    visited: set[str] = set()
    for path, folders, names in os.walk(root, followlinks=True, onerror=fail):
        folder, real = Path(path), os.path.realpath(path)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        # A file system has its own folder lost+found, which only root may read.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "lost+found")
        names = sorted(name for name in names if not name.startswith("."))
        has_caches = "dataset_info.json" in names  # `map` and `filter` write files into the library's own folders.
        for name in names:
            file = folder / name
            if file.is_file():
                is_cache = has_caches and name.startswith("cache-")
                yield file, _ending(file) is not None and not is_cache
            elif not file.exists():
                raise ValueError(
                    f"dataset_path: the link {file} leads to {os.path.realpath(file)}, which does not exist; restore "
                    "that, or delete the link"
                )


def _without_links(root: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files without further names of the same file; logs how many there are."""
    first: dict[str, Path] = {}
    real = functools.cache(os.path.realpath)
    for is_link, file in sorted((file.is_symlink(), file) for file in files):  # A file comes before links to it.
        first.setdefault(real(file) if is_link else os.path.join(real(file.parent), file.name), file)
    if more := len(files) - len(first):
        logger.warning(f"{root}: links to files that are read already are left out: {more:,}")
    return sorted(first.values())


def _log_skipped(root: Path, files: Sequence[Path]) -> None:
    """Log how many files of a folder are not read, by ending."""
    endings = Counter("".join(file.suffixes[-2:]) or "without ending" for file in files)
    if endings:
        counts = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(8))
        logger.info(
            f"{root}: {len(files):,} files are not read ({counts}); read are {EXPECTED}, but not those that map and "
            "filter of the datasets library wrote"
        )


def find_text_files(path: str | os.PathLike[str], split: str | None = None) -> list[Path]:
    """Return the text files of a file or a folder with its sub-folders, sorted, without hidden and empty files.

    The split "train" or "validation" selects the files of a folder whose name, or else the nearest folder's name,
    starts with it. Raises ValueError for files that cannot be one data set.
    """
    root = Path(path)
    if not root.exists():
        missing = str(root.absolute())
        raise ValueError(f"dataset_path: {missing!r} does not exist; expected a file or a folder with {EXPECTED}")
    if root.is_dir():
        below = sorted(_files_below(root))
        files = text_files = [file for file, is_data in below if is_data]
        _log_skipped(root, [file for file, is_data in below if not is_data])
    else:
        files = [root] if _ending(root) else []
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has no text; expected {EXPECTED}")
    if split is not None and root.is_dir():
        files = [file for file in files if _split_of(file, root) == split]
        if not files:
            if part := next((file for file in text_files if "partial-" in str(file.relative_to(root))), None):
                raise ValueError(
                    f"dataset_path: {str(root)!r} has {part.relative_to(root)}, the hub's mark of a partial "
                    "conversion; download all files, or read that part with dataset text_files"
                )
            raise ValueError(
                f"dataset_path: {str(root)!r} has no files of the split {split!r}; expected files or "
                f"sub-folders whose names begin with {split!r}, or dataset text_files to read all files"
            )
    for file in files:
        if text := pointer_text(file):
            raise ValueError(f"dataset_path: {text}")
    files = [file for file in _without_links(root, files) if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has zero documents: its files are empty")
    first = {_BUILDERS[cast(str, _ending(file))]: file for file in reversed(files)}
    if len(first) > 1:
        kinds = " and ".join(f"{kind} ({file})" for kind, file in sorted(first.items()))
        raise ValueError(
            f"dataset_path: {str(root)!r} mixes the formats {kinds}; give a file, or a folder of one format"
        )
    return files


def open_lines(file: Path) -> Any:
    """Open a file, which may be compressed, for its lines."""
    name = file.name.lower()
    if name.endswith(".zst"):
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return gzip.open(file, "rb") if name.endswith(".gz") else open(file, "rb")


def read_line(line: bytes, column: str = "text") -> str | None:
    """Return the text, in a column, of one line of JSON; None for null. Raises ValueError with the line's defect."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # Includes UnicodeDecodeError.
        raise ValueError(f"is no JSON in UTF-8 ({one_line(error)})") from None
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object")
    if column not in row:
        raise ValueError(f"has no column {column!r}, but {list(row)[:10]}{KEY_OF_COLUMN}")
    text = row[column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"has a text of type {type(text).__name__}; expected strings")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # For example a lone surrogate.
        raise ValueError(f"has a text that is no Unicode ({error.reason})") from None
    return text


def _json_texts(file: Path, column: str) -> Iterator[pyarrow.Array]:
    rows, size = list[str | None](), 0
    with open_lines(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
                raise ValueError("it is UTF-16 or UTF-32; convert it with iconv -t UTF-8")
            if not line.strip():
                continue
            try:
                text = read_line(line, column)
            except ValueError as error:
                raise ValueError(f"{file}:{number} {error}") from None
            rows.append(text)
            size += len(text or "")
            if size > _CHUNK:
                yield pyarrow.array(rows, TEXT)
                rows, size = [], 0
    yield pyarrow.array(rows, TEXT)


def _whole_text(file: Path) -> pyarrow.Array:
    """Return a .txt file as one document."""
    content = file.read_bytes()
    try:
        text = io.StringIO(content.decode("utf-8-sig"), newline=None).getvalue()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{number} is not UTF-8 ({error.reason})") from None
    return pyarrow.array([text], TEXT)


def _columnar_texts(file: Path, builder: str, column: str) -> Iterator[pyarrow.Array]:
    """Yield the texts of a parquet or arrow file, by record batches."""
    if builder == "parquet":
        stored = pyarrow.parquet.ParquetFile(file)
        schema, batches = stored.schema_arrow, stored.iter_batches(columns=[column])
    else:
        source = pyarrow.memory_map(str(file))
        try:
            batches = pyarrow.ipc.open_stream(source)
            schema = batches.schema
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            schema, batches = reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    if column not in schema.names:
        raise ValueError(
            f"it has no column {column!r}, but {schema.names}; expected a column of strings{KEY_OF_COLUMN}"
        )
    # Arrow uses a different type for texts above 2 GiB, and Polars writes views.
    kind = str(schema.field(column).type)  # "null" if there are no rows
    if kind.removeprefix("large_").removesuffix("_view") not in ("string", "null"):
        raise ValueError(f"it has a column {column!r} of {kind}; expected strings")
    for batch in batches:
        values = batch.column(column)
        try:
            values.validate(full=True)  # Decoding other bytes would raise an error during training.
        except pyarrow.ArrowInvalid:
            raise ValueError("it has a text that is not UTF-8") from None
        yield values.cast(TEXT)


def _texts(files: list[Path], builder: str, column: str) -> Iterator[pyarrow.Array]:
    """Yield the texts of all files, null where a row has none. Raises ValueError with the file that cannot be read."""
    for file in files:
        try:
            if builder == "json":
                yield from _json_texts(file, column)
            elif builder == "text":
                yield _whole_text(file)
            else:
                yield from _columnar_texts(file, builder, column)
        except (ValueError, *_READ_ERRORS) as error:
            raise ValueError(f"dataset_path: {str(file)!r} cannot be read as {builder}: {one_line(error)}") from error


def _copy(texts: Iterator[pyarrow.Array], target: Path) -> bool:
    """Write the texts as an arrow stream of one column. Return whether any is not empty."""
    schema, longest = pyarrow.schema([("text", TEXT)]), 0
    with pyarrow.ipc.new_stream(str(target), schema) as writer:
        for values in texts:
            longest = max(longest, pyarrow.compute.max(pyarrow.compute.binary_length(values)).as_py() or 0)
            writer.write_table(pyarrow.table({"text": values}, schema=schema))
    return longest > 0


def load_text_files(path: str | os.PathLike[str], split: str | None = None, column: str = "text") -> Dataset:
    """Read local text, map-style, so that a run resumes by document index. Several processes may do so at once.

    A line of .jsonl and a row of .parquet or .arrow are one document. A .txt file is one document as a whole, because a
    line break does not end a document; use .jsonl for one document per line. The copy of the text below
    HF_DATASETS_CACHE is about as large as the text. Its only column "text" may contain empty and null texts, which
    readers skip.

    Raises:
        ValueError: The files, their format or a line are unusable.
        OSError: The cache cannot be written to.
    """
    files = find_text_files(path, split)
    builder = _BUILDERS[cast(str, _ending(files[0]))]
    if builder == "text" and column != "text":
        raise ValueError(f"training.text_column: {column!r}, but {str(path)!r} has .txt files, which have no columns")
    stats = [(str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([5, builder, stats, column]).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "torchtitan_scape"
    copy = cache / f"{key}.arrow"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{copy}.lock"):
        if not copy.exists():
            part = copy.with_suffix(".part")
            try:
                if not _copy(_texts(files, builder, column), part):
                    raise ValueError(f"dataset_path: {str(path)!r} has zero documents with text")
                part.rename(copy)
            finally:
                part.unlink(missing_ok=True)
    return Dataset.from_file(str(copy))

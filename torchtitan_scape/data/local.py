"""Local text files: selection of the files of a folder, and checks of their format.

Several files form one dataset: they must have the same format and the same columns.
"""

import codecs
import functools
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import datasets.config
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from datasets import Dataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import FULL, parse_json, pointer_text

logger = logging.getLogger(__name__)

# Share of bad lines above which the files are assumed to have another format.
MAX_BAD = 0.1
KEY_OF_COLUMN = "; training.text_column names the column"
_READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Report:
    """Result of reading a set of files.

    Attributes:
        documents: Number of usable documents.
        bad: Lines (or rows) that are not JSON or not UTF-8, or have no text.
        empty: Empty texts, which readers skip.
        first: Location and reason of the first bad or empty line; "" if there is none.
        copied: The good lines were copied; else the files are read directly.
    """

    documents: int
    bad: int
    empty: int
    first: str
    copied: bool

    def line(self, path: str) -> str:
        kinds = [f"{count:,} {kind}" for count, kind in ((self.bad, "unusable"), (self.empty, "empty")) if count]
        return f"{path}: {' and '.join(kinds)} of {self.documents + self.bad + self.empty:,} documents are left out"


def open_lines(file: Path) -> Any:
    """Open a file, which may be compressed, for its lines."""
    name = file.name.lower()
    if name.endswith(".zst"):
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return gzip.open(file, "rb") if name.endswith(".gz") else open(file, "rb")


def read_line(line: bytes, column: str = "text") -> str:
    """Return the text, in a column, of one line of JSON.

    Raises:
        ValueError: With the defect of the line.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # Includes UnicodeDecodeError.
        raise ValueError(f"no JSON in UTF-8 ({one_line(error)})") from None
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object")
    if column not in row:
        raise ValueError(f"has no column {column!r}, but {list(row)[:10]}{KEY_OF_COLUMN}")
    text = row[column]
    if not isinstance(text, str):
        raise ValueError(f"has a text of type {type(text).__name__}; expected strings")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # For example a lone surrogate.
        raise ValueError(f"has a text that is no Unicode ({error.reason})") from None
    return text


def _numbered(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (file:line, content) of every line of a file that is not blank.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        with open_lines(file) as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
                    raise ValueError("it is UTF-16 or UTF-32; convert it with iconv -t UTF-8")
                if line.strip():
                    yield f"{file}:{number}", line
    except (ValueError, *_READ_ERRORS) as error:
        raise ValueError(f"dataset_path: {str(file)!r} cannot be read as json: {one_line(error)}") from error


def _first_defect(files: list[Path], builder: str, column: str) -> str:
    """Return location and reason of the first text that is not UTF-8, "" if there is none."""
    for file in files:
        if builder == "text":
            for number, line in enumerate(file.read_bytes().splitlines(), 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return f"{file}:{number} is not UTF-8 ({error.reason})"
        elif builder == "parquet":
            stored = pyarrow.parquet.ParquetFile(file)
            for group in range(stored.num_row_groups):
                try:
                    stored.read_row_group(group, [column]).column(column).validate(full=True)
                except pyarrow.ArrowInvalid:
                    return f"{file}, row group {group}, has a text that is not UTF-8"
    return ""


def _refuse(path: str, builder: str, report: Report) -> None:
    total = report.documents + report.bad
    if report.bad > MAX_BAD * total:
        raise ValueError(
            f"dataset_path: {path!r} cannot be read as {builder}: {report.bad:,} of {total:,} documents are unusable; "
            f"the first: {report.first}"
        )
    if report.documents == 0:
        raise ValueError(f"dataset_path: {path!r} has zero documents with text")


def _texts(file: Path, column: str) -> Iterator[tuple[str | None, str]]:
    """Yield (text, defect) of every line of a file that is not blank; the text of a bad line is None.

    Raises:
        ValueError: The file cannot be read, or has bad lines only: it is another file than its name says.
    """
    first, good = "", False
    for location, line in _numbered(file):
        try:
            text = read_line(line, column)
        except ValueError as error:
            first = first or f"{location} {error}"
            yield None, f"{location} {error}"
            continue
        good = True
        yield text, "" if text else f"{location} has an empty text"
    if first and not good:
        raise ValueError(
            f"dataset_path: {str(file)!r} cannot be read as json: none of its lines is usable; the first: {first}"
        )


def _copy(files: list[Path], target: Path, column: str) -> Report:
    """Write the good lines as an arrow stream of one column, line by line."""
    schema = pyarrow.schema([("text", pyarrow.large_string())])
    documents = bad = empty = size = 0
    first, rows = "", []
    with pyarrow.ipc.new_stream(str(target), schema) as writer:
        for text, defect in chain.from_iterable(_texts(file, column) for file in files):
            first = first or defect
            if text is None:
                bad += 1
                continue
            documents, empty = documents + bool(text), empty + (not text)
            rows.append(text)  # Also an empty one, so that positions are those in the files; readers skip it.
            size += len(text)
            if size > 1 << 23:
                writer.write_table(pyarrow.table({"text": rows}, schema=schema))
                rows, size = [], 0
        writer.write_table(pyarrow.table({"text": rows}, schema=schema))
    return Report(documents, bad, empty, first, copied=True)


def _inspect(data: Dataset) -> Report | None:
    """Return the report of the library's result, or None if it cannot be used directly: other types, or not UTF-8."""
    if getattr(data.features.get("text"), "dtype", "") not in ("string", "large_string"):
        return None
    column = data.data.table.column("text")
    try:
        # Columnar files may contain bytes that are not UTF-8; decoding them during training would raise an error.
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    empty = pyarrow.compute.sum(pyarrow.compute.equal(pyarrow.compute.binary_length(column), 0)).as_py() or 0
    bad, first = column.null_count, ""
    if bad or empty:
        first = "a row without text"
    return Report(len(data) - bad - empty, bad, empty, first, copied=False)


def _load(files: list[Path], builder: str, links: Path, column: str) -> Dataset:
    """Read a column of files by the datasets library, as the column "text".

    The library takes names for patterns and for addresses: files with wildcards or "::" are read by links.
    """
    options = {"sample_by": "document", "encoding": "utf-8-sig"} if builder == "text" else {}
    names = [str(file) for file in files]
    for i, file in enumerate(files):
        if glob.has_magic(names[i]) or "::" in names[i]:
            links.mkdir(exist_ok=True)
            link = links / f"{i:06}"
            names[i] = str(link)
            if not link.is_symlink():
                link.symlink_to(file.resolve())
    data = load_dataset(builder, data_files=names, split="train", **options).select_columns([column])
    if getattr(data.features[column], "dtype", "") == "string_view":  # Arrow cannot compute the lengths of views.
        data = data.cast_column(column, Value("large_string"))
    return data if column == "text" else data.rename_column(column, "text")


def _examine(files: list[Path], builder: str, path: str, folder: Path, links: Path, column: str) -> Report:
    if builder == "json":
        report = _copy(files, folder / "text.arrow", column)
        _refuse(path, builder, report)
        return report
    try:
        data = _load(files, builder, links, column)
        found = _inspect(data)
        kind = getattr(data.features.get("text"), "dtype", "nested")
        cause = "no UTF-8" if kind in ("string", "large_string") else f"has a column {column!r} of {kind}"
        cause += "; expected strings"
    except (DatasetGenerationError, ValueError, *_READ_ERRORS) as error:
        source = error.__cause__ or error
        if isinstance(source, OSError) and source.errno in FULL:
            raise source from None
        found, cause = None, one_line(source)
    if found is None:
        raise ValueError(
            f"dataset_path: {path!r} cannot be read as {builder}: {_first_defect(files, builder, column) or cause}"
        )
    _refuse(path, builder, found)
    return found


def load_files(files: list[Path], builder: str, path: str, column: str = "text") -> Dataset:
    """Read files of one format without the bad documents. Several processes may do so at the same time.

    Args:
        files: Paths; not empty.
        builder: "json", "parquet", "arrow" or "text" of the datasets library.
        path: The user's path, for messages.
        column: Column with the text; "text" for the builder "text".

    Returns:
        A dataset with the single column "text". It may contain empty and null texts, which readers skip.

    Raises:
        ValueError: A file is damaged as a whole, or has no good line; more than a tenth of all lines are bad; no
            document is left; or the library's cache cannot be written to.
    """
    stats = [(str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([3, builder, stats] + [column] * (column != "text")).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "torchtitan_scape"
    folder, links = cache / key, cache / f"{key}.files"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            if not (folder / "report.json").exists():
                work = Path(tempfile.mkdtemp(dir=cache))
                try:
                    report = _examine(files, builder, path, work, links, column)
                    (work / "report.json").write_text(json.dumps(asdict(report)))
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(work, folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:  # Errors of reading the files are ValueErrors.
        raise ValueError(
            f"HF_DATASETS_CACHE: {cache} cannot be written to ({error.strerror or one_line(error)}); free space there, "
            "or set HF_DATASETS_CACHE to another folder"
        ) from error
    report = Report(**json.loads((folder / "report.json").read_text()))
    if report.bad or report.empty:
        logger.warning(f"{report.line(path)}; the first: {report.first}")
    return Dataset.from_file(str(folder / "text.arrow")) if report.copied else _load(files, builder, links, column)


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
EXPECTED = f'files ending in {", ".join(_BUILDERS)}; all but .txt need a column "text" (training.text_column)'
_SPLITS = ("train", "validation", "test")


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


def _check_readable(path: Path, folder: bool) -> None:
    if not os.access(path, os.R_OK | (os.X_OK if folder else 0)):
        raise ValueError(f"dataset_path: {str(path)!r} is not readable by this user: check its permissions")


def _files_below(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files below a folder, hidden ones excluded, and whether each may contain documents.

    Links are followed, but no folder is visited twice.

    Raises:
        ValueError: A folder cannot be read, a link leads nowhere, or a file of a saved dataset is missing.
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
        saved = _saved_names(folder, {*folders, *names})
        if saved is not None:
            folders[:] = [name for name in folders if name in saved]
        has_caches = "dataset_info.json" in names  # `map` and `filter` write files into the library's own folders.
        for name in names:
            file = folder / name
            if file.is_file():
                is_cache = has_caches and name.startswith("cache-")
                yield file, _ending(file) is not None and not is_cache and (saved is None or name in saved)
            elif not file.exists():
                raise ValueError(
                    f"dataset_path: the link {file} leads to {os.path.realpath(file)}, which does not exist; restore "
                    "that, or delete the link"
                )


def _saved_names(folder: Path, names: set[str]) -> set[str] | None:
    """Return the files or sub-folders of a dataset that `save_to_disk` wrote to a folder; None for another folder.

    Raises:
        ValueError: One of them is not among the folder's `names`.
    """
    for record, key in (("state.json", "_data_files"), ("dataset_dict.json", "splits")):
        try:
            entries = parse_json((folder / record).read_bytes())[key]
            # A TypeError shows another program's file, whose entries are not names.
            saved = {os.fspath(entry["filename"] if isinstance(entry, dict) else entry) for entry in entries}
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if missing := sorted(saved - names):
            raise ValueError(
                f"dataset_path: {folder / missing[0]} is missing, which {record} there names; restore it, or delete "
                f"{record} to read the other files"
            )
        return saved
    return None


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
            f"{root}: {len(files):,} files are not read ({counts}); read are {EXPECTED}, and of a dataset that the "
            "datasets library saved, only its own files"
        )


def find_text_files(path: str | os.PathLike[str], split: str | None = None) -> list[Path]:
    """Return the text files of a local path, sorted, without hidden and empty files.

    Args:
        path: A file, or a folder, which is searched recursively.
        split: "train" or "validation" selects the files of a folder whose name, or else the nearest folder's name,
            starts with it; None selects all.

    Raises:
        ValueError: `path` is missing or not readable, or has no such file, only empty ones, files of several formats,
            a pointer of Git LFS or git-annex, or a link that leads nowhere.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"dataset_path: {str(root)!r} does not exist; expected a file or a folder with {EXPECTED}")
    _check_readable(root, root.is_dir())
    if root.is_dir():
        below = sorted(_files_below(root))
        files = found = [file for file, is_data in below if is_data]
        _log_skipped(root, [file for file, is_data in below if not is_data])
    else:
        files = [root] if _ending(root) else []
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has no text; expected {EXPECTED}")
    if split is not None and root.is_dir():
        files = [file for file in files if _split_of(file, root) == split]
        if not files:
            if part := next((file for file in found if "partial-" in str(file.relative_to(root))), None):
                raise ValueError(
                    f"dataset_path: {str(root)!r} has {part.relative_to(root)}, the hub's mark of a partial "
                    "conversion; download all files, or read that part with dataset text_files"
                )
            raise ValueError(
                f"dataset_path: {str(root)!r} has no files of the split {split!r}; expected files or "
                f"sub-folders whose names begin with {split!r}, or dataset text_files to read all files"
            )
    for file in files:
        _check_readable(file, folder=False)
        if text := pointer_text(file):
            raise ValueError(f"dataset_path: {text}")
    files = [file for file in _without_links(root, files) if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has zero documents: its files are empty")
    first = {_BUILDERS[cast(str, _ending(file))]: file for file in reversed(files)}
    if len(first) > 1:
        raise ValueError(
            f"dataset_path: {str(root)!r} mixes the formats {_examples(first)}; give a file, or a folder of one format"
        )
    return files


def _examples(first: dict[str, Path]) -> str:
    """Return the kinds in words, with one file of each."""
    return " and ".join(f"{kind} ({file})" for kind, file in sorted(first.items()))


def _columns(file: Path, builder: str) -> tuple[pyarrow.Schema, bool]:
    """Return the schema of a columnar file, and whether it has a row, without reading rows."""
    if builder == "parquet":
        metadata = pyarrow.parquet.read_metadata(file)
        return metadata.schema.to_arrow_schema(), metadata.num_rows > 0
    with pyarrow.memory_map(str(file)) as source:
        try:
            stream = pyarrow.ipc.open_stream(source)
            return stream.schema, any(batch.num_rows for batch in stream)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            stored = pyarrow.ipc.open_file(source)
            return stored.schema, any(stored.get_batch(i).num_rows for i in range(stored.num_record_batches))


def _with_documents(files: list[Path], text_column: str) -> list[Path]:
    """Return the files that contain a document, judged by metadata or a line of JSON, with clearer errors than the
    library's.

    Raises:
        ValueError: A file is damaged, or has other columns than the first one, or is columnar without `text_column`.
    """
    with_documents: list[Path] = []
    schemas: dict[str, Path] = {}
    for file in files:
        builder = _BUILDERS[cast(str, _ending(file))]
        try:
            if builder == "text":
                with_documents.append(file)
                continue
            if builder == "json":
                with open_lines(file) as lines:
                    with_documents += [file] if any(line.strip() for line in lines) else []
                continue
            schema, rows = _columns(file, builder)
        except (ValueError, OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
            raise ValueError(f"dataset_path: {str(file)!r} cannot be read as {builder}: {one_line(error)}") from error
        if not rows:
            continue
        if text_column not in schema.names:
            raise ValueError(
                f"dataset_path: {str(file)!r} has no column {text_column!r}, but {schema.names}; expected a column of "
                f"strings{KEY_OF_COLUMN}"
            )
        with_documents.append(file)
        # Arrow uses a different type for texts above 2 GiB, and Polars writes views.
        kinds = {field.name: str(field.type).removeprefix("large_").removesuffix("_view") for field in schema}
        columns = sorted(f"{name}: {kind}" for name, kind in kinds.items())
        schemas.setdefault(", ".join(columns), file)
        if len(schemas) > 1:
            raise ValueError(
                f"dataset_path: files with other columns cannot be read as one data set: {_examples(schemas)}; give a "
                "file, or a folder of files with the same columns"
            )
    return with_documents


def load_text_files(path: str | os.PathLike[str], split: str | None = None, column: str = "text") -> Dataset:
    """Read local text, map-style, so that a run resumes by document index.

    A line of .jsonl and a row of .parquet or .arrow are one document. A .txt file is one document as a whole, because a
    line break does not end a document; use .jsonl for one document per line. The datasets library converts the files
    once into its own cache (HF_DATASETS_CACHE), about as large as their text.

    Lines that are not JSON or not UTF-8, and lines without text, are left out; the log contains their number and the
    location of the first one. If more than a tenth of the lines is bad, the format is assumed to be wrong.

    Args:
        path: A file, or a folder, which is searched recursively.
        split: See `find_text_files`.
        column: Column with the text.

    Returns:
        A dataset with the single column "text".

    Raises:
        ValueError: As `find_text_files`; or a file is damaged as a whole, does not have the column, of strings, or has
            other columns than the first; or a column is named for .txt files; or there are zero documents.
    """
    files = _with_documents(find_text_files(path, split), column)
    if not files:
        raise ValueError(f"dataset_path: {str(path)!r} has zero documents")
    builder = _BUILDERS[cast(str, _ending(files[0]))]
    if builder == "text" and column != "text":
        raise ValueError(f"training.text_column: {column!r}, but {str(path)!r} has .txt files, which have no columns")
    return load_files(files, builder, str(path), column)

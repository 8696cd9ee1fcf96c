"""Local text with damaged lines: damaged and empty lines are left out, counted and reported.

Lines of JSON are read one by one, once, and the good ones are copied next to the cache of the datasets library. (Its
own reader fails as a whole on a single bad line, and crashes on one that is nested thousands of levels deep.) Other
formats are read by the library. Nothing is cached for refused files.
"""

import codecs
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets.config
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from datasets import Dataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import FULL

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

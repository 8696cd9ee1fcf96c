"""Local text with damaged lines: what is left out, how much of it there is, and where it begins.

The datasets library reads JSON fast, and fails as a whole for one bad line. Where it does, the files are read line by
line, once: the good lines go to a copy beside the library's own cache. Nothing is cached of files that are refused.
"""

import gzip
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets.config
import pyarrow
import pyarrow.compute
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock

from torchtitan_scape.core.command import one_line

logger = logging.getLogger(__name__)

# More bad lines than this are no accident: the files have another format.
MAX_BAD = 0.1
_READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Report:
    """What was found in a set of files.

    Attributes:
        documents: those that can be used.
        bad: lines (or rows) that are no JSON, no UTF-8, or have no text.
        empty: texts of no character. Readers pass over them.
        first: place and reason of the first bad or empty one; "" where there is none.
        copied: the good lines were copied; else the files are read as they are.
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
    return gzip.open(file, "rb") if file.name.lower().endswith(".gz") else open(file, "rb")


def read_line(line: bytes) -> str:
    """The text of one line of JSON. Raises ValueError that says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError among them
        raise ValueError(f"no JSON in UTF-8 ({one_line(error)})") from None
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object")
    if "text" not in row:
        raise ValueError(f"has no column 'text', but {list(row)[:10]}")
    text = row["text"]
    if not isinstance(text, str):
        raise ValueError(f"has a text of type {type(text).__name__}; expected strings")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ValueError(f"has a text that is no Unicode ({error.reason})") from None
    return text


def _numbered(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """(file:line, content) of every line that is not blank. Raises ValueError for a file that cannot be read."""
    for file in files:
        try:
            with open_lines(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{file}:{number}", line
        except _READ_ERRORS as error:
            raise ValueError(f"dataset_path: {str(file)!r} cannot be read as json: {one_line(error)}") from error


def _look_at_first_lines(files: list[Path]) -> None:
    """Raises ValueError for a file that does not begin with a document: the library guesses what else it may be."""
    for file in files:
        for _, line in _numbered([file]):
            read_line(line)
            break


def _first(files: list[Path]) -> str:
    """Place and reason of the first line that is not a document."""
    for place, line in _numbered(files):
        try:
            if not read_line(line):
                return f"{place} has an empty text"
        except ValueError as error:
            return f"{place} {error}"
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


def _copy(files: list[Path], target: Path) -> Report:
    """Writes the good lines as an arrow stream of one column, line by line."""
    schema = pyarrow.schema([("text", pyarrow.large_string())])
    documents = bad = empty = size = 0
    first, rows = "", []
    with pyarrow.ipc.new_stream(str(target), schema) as writer:
        for place, line in _numbered(files):
            try:
                text = read_line(line)
            except ValueError as error:
                bad, first = bad + 1, first or f"{place} {error}"
                continue
            if not text:
                empty, first = empty + 1, first or f"{place} has an empty text"
                continue
            rows.append(text)
            documents, size = documents + 1, size + len(text)
            if size > 1 << 23:
                writer.write_table(pyarrow.table({"text": rows}, schema=schema))
                rows, size = [], 0
        writer.write_table(pyarrow.table({"text": rows}, schema=schema))
    return Report(documents, bad, empty, first, copied=True)


def _look(data: Dataset, files: list[Path], builder: str) -> Report | None:
    """What the library's result holds; None where it is nothing to train on as it is: other types, no UTF-8."""
    if getattr(data.features.get("text"), "dtype", "") not in ("string", "large_string"):
        return None
    column = data.data.table.column("text")
    try:
        # The JSON reader takes over bytes that are no UTF-8, and decoding them would end a long run.
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    empty = pyarrow.compute.sum(pyarrow.compute.equal(pyarrow.compute.binary_length(column), 0)).as_py() or 0
    bad, first = column.null_count, ""
    if bad or empty:
        first = _first(files) if builder == "json" else "a row of no text"
    return Report(len(data) - bad - empty, bad, empty, first, copied=False)


def _load(files: list[Path], builder: str) -> Dataset:
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=[str(file) for file in files], split="train", **options)


def _examine(files: list[Path], builder: str, path: str, folder: Path) -> Report:
    report, cause = None, ""
    try:
        if builder == "json":
            _look_at_first_lines(files)
        data = _load(files, builder)
        report = _look(data, files, builder)
        kind = getattr(data.features.get("text"), "dtype", "nested")
        wrong = f"has a column 'text' of {kind}" if kind not in ("string", "large_string") else "no UTF-8"
        cause = f"{wrong}; expected strings"
    except (DatasetGenerationError, ValueError, *_READ_ERRORS) as error:
        cause = one_line(error.__cause__ or error)
    if report is None:
        if builder != "json":
            raise ValueError(f"dataset_path: {path!r} cannot be read as {builder}: {cause}")
        logger.warning(f"{path} is read line by line ({cause[:200]}); this takes longer, and is done once")
        report = _copy(files, folder / "text.arrow")
    _refuse(path, builder, report)
    return report


def load_files(files: list[Path], builder: str, path: str) -> Dataset:
    """Reads files of one format, the bad documents left out; several processes may do it at the same time.

    Args:
        files: not empty.
        builder: "json", "parquet" or "text" of the datasets library.
        path: what the user called them, for messages.

    Returns:
        A data set with the one column "text". Empty and null texts may be in it: readers pass over them.

    Raises:
        ValueError: a file is damaged as a whole; more than a tenth of the lines is bad; no document is left.
    """
    stats = [(str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([1, builder, stats]).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "torchtitan_scape"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    with FileLock(str(folder) + ".lock"):
        if not (folder / "report.json").exists():
            work = Path(tempfile.mkdtemp(dir=cache))
            try:
                report = _examine(files, builder, path, work)
                (work / "report.json").write_text(json.dumps(asdict(report)))
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    report = Report(**json.loads((folder / "report.json").read_text()))
    if report.bad or report.empty:
        logger.warning(f"{report.line(path)}; the first: {report.first}")
    data = Dataset.from_file(str(folder / "text.arrow")) if report.copied else _load(files, builder)
    return data.select_columns(["text"])

